"""Reading device masks: CUDA_VISIBLE_DEVICES and Slurm's index lists, in every spelling seen in the field.

A parser never guesses: a list it cannot read exactly is BROKEN and carries the sentence that says why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

MAX_ENTRIES = 1024
_INDEX = re.compile(r"0|[1-9][0-9]{0,4}")  # one spelling per number, so that text and value compare alike
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z][0-9A-Za-z/-]*")
_WORDS = {"all", "none", "void"}


class MaskKind(StrEnum):
    """How a mask names its GPUs."""

    UNSET = "unset"
    """The variable is not in the environment."""
    NONE = "none"
    """No GPU at all: Slurm's `NoDevFiles`, or an empty value."""
    INDEX = "index"
    """Integers; absolute or relative is decided by comparison."""
    UUID = "uuid"
    """`GPU-…` or `MIG-…` names, possibly shortened."""
    BROKEN = "broken"
    """Not readable, or names a GPU twice."""


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask as read. `problem` and `wanted` are set exactly when it is BROKEN."""

    kind: MaskKind
    entries: tuple[str, ...] = ()
    problem: str = ""
    wanted: str = ""

    @property
    def numbers(self) -> tuple[int, ...]:
        """The entries of an INDEX mask as integers."""
        return tuple(int(entry) for entry in self.entries) if self.kind is MaskKind.INDEX else ()


def _broken(problem: str, wanted: str) -> Mask:
    return Mask(MaskKind.BROKEN, problem=problem, wanted=wanted)


def _fault(entry: str) -> str | None:
    """What is wrong with one entry; None when it is fine."""
    if entry == "":
        return "an entry is empty"
    if entry != entry.strip():
        return f"entry {entry!r} contains a space"
    if entry.lstrip("+-").isdecimal() and entry[0] == "-":
        return f"entry {entry} is negative, which hides every GPU behind it"
    if entry.lower() in _WORDS:
        return f"{entry!r} is a word for NVIDIA_VISIBLE_DEVICES, CUDA does not know it"
    if not (_INDEX.fullmatch(entry) or _UUID.fullmatch(entry)):
        return f"entry {entry[:60]!r} is neither an index nor a GPU-/MIG- UUID"
    return None


def parse_mask(text: str | None) -> Mask:
    """CUDA_VISIBLE_DEVICES as text (None = not set) to a value; never raises."""
    if text is None:
        return Mask(MaskKind.UNSET)
    if text == "NoDevFiles" or not text.strip():
        return Mask(MaskKind.NONE)
    entries = text.split(",")
    if len(entries) > MAX_ENTRIES:
        return _broken(f"{len(entries)} entries", f"at most {MAX_ENTRIES}")
    for entry in entries:
        fault = _fault(entry)
        if fault is not None:
            return _broken(fault, "distinct indexes or UUIDs, as Slurm set them: do not edit the variable")
    by_index = [_INDEX.fullmatch(entry) is not None for entry in entries]
    if any(by_index) and not all(by_index):
        return _broken("indexes and UUIDs are mixed", "one kind")
    seen: set[str] = set()
    for entry in entries:
        key = str(int(entry)) if by_index[0] else entry.casefold()
        if key in seen:
            return _broken(f"{entry} is named twice", "every GPU once")
        seen.add(key)
    return Mask(MaskKind.INDEX if by_index[0] else MaskKind.UUID, tuple(entries))


def parse_indexes(text: str | None) -> Mask:
    """SLURM_STEP_GPUS or SLURM_JOB_GPUS, integers and ranges: INDEX, UNSET or BROKEN; never raises."""
    if text is None or not text.strip():
        return Mask(MaskKind.UNSET)
    wanted = "a list of distinct indexes such as 0,1 or 0-3"
    entries: list[str] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not _INDEX.fullmatch(first) or (dash and not _INDEX.fullmatch(last)):
            return _broken(f"entry {part[:60]!r} is not an index", wanted)
        low, high = int(first), int(last) if dash else int(first)
        if high < low:
            return _broken(f"range {part} descends", wanted)
        if len(entries) + high - low + 1 > MAX_ENTRIES:
            return _broken(f"more than {MAX_ENTRIES} entries", wanted)
        entries += [str(number) for number in range(low, high + 1)]
    if len(set(entries)) != len(entries):
        twice = next(entry for entry in entries if entries.count(entry) > 1)
        return _broken(f"{twice} is named twice", wanted)
    return Mask(MaskKind.INDEX, tuple(entries))
