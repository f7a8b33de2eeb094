"""What every section of the run file shares: strictness, names, and the values that may stand in a Slurm
directive."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,48}$"
RESERVED_WORDS = ("hetjob", "packjob")
"""sbatch looks for these anywhere in a directive line and ends the component there; the second is the old
spelling."""


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversions, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


def directive_fault(value: str, *, spaces: bool = False) -> str | None:
    """Why `value` may not stand in an `#SBATCH` line or in a path that one names; None when it may.

    sbatch cuts a script at `hetjob`, ends a directive at a newline, takes `#` as a comment and splits at
    spaces.
    `spaces=True` allows spaces, for values that are a whole line themselves.
    """
    lowered = value.lower()
    for word in RESERVED_WORDS:
        if word in lowered:
            return f"contains the word '{word}', at which sbatch would cut the script; use another name"
    if not value:
        return "is empty; leave the key out instead"
    for character in value:
        if character == "#":
            return "contains '#', which starts a comment in a directive; remove it"
        if character in "\n\r" or not character.isprintable():
            return f"contains the control character {character!r}; write it on one line"
        if character.isspace() and not spaces:
            return "contains a space, at which sbatch would split the directive; remove it"
    return None


def _directive(value: str) -> str:
    fault = directive_fault(value)
    if fault:
        raise ValueError(fault)
    return value


def _line(value: str) -> str:
    fault = directive_fault(value, spaces=True)
    if fault:
        raise ValueError(fault)
    return value


def _one_line(value: str) -> str:
    if "\n" in value or "\r" in value or "\0" in value:
        raise ValueError("contains a line break; give one list entry per line")
    return value


def _plain(value: str) -> str:
    """Text that ends up in a command line or a path: NUL cannot, and a line break is never meant."""
    if any(character in value for character in "\0\n\r"):
        raise ValueError("contains a NUL or a line break; write plain text on one line")
    return value


def _name(value: str) -> str:
    if not re.fullmatch(NAME_PATTERN, value):
        raise ValueError("is not a name; use 1 to 48 of the characters A-Z a-z 0-9 . _ -")
    if value.startswith((".", "-")):
        raise ValueError("starts with '.' or '-'; start it with a letter, a digit or '_'")
    return _directive(value)


Name = Annotated[str, AfterValidator(_name)]
"""Run, pool and model names: they become file names, job names and parts of ids."""
Directive = Annotated[str, AfterValidator(_directive)]
"""One word of a Slurm directive."""
OptionLine = Annotated[str, AfterValidator(_line)]
"""One whole sbatch or srun option, such as `--mail-type=END`."""
PathText = Annotated[str, AfterValidator(_line)]
"""A path that a directive names; it may contain spaces, since it is written in quotes."""
ShellLine = Annotated[str, AfterValidator(_one_line)]
"""One line of shell, run before our own commands."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=4096), AfterValidator(_plain)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
