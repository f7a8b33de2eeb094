"""Writes docs/configuration.md out of the config classes: `python -m relax_slurm.config.reference`.

`--check` writes nothing and exits 1 when the page is not what it would write.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from relax_slurm.config import base
from relax_slurm.config.engine_args import ALIASES, OWNED
from relax_slurm.config.layers import CLUSTER_KEYS, TOP_LEVEL_VARIABLES
from relax_slurm.config.models import RunConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"

INTRODUCTION = """\
# Configuration

<!-- Written by `python -m relax_slurm.config.reference`; edit the classes in relax_slurm/config instead. -->

A run is described by one YAML file. A cluster file may add what is true for the whole site. The strongest
source wins:

1. `--set key.path=value` on the command line (repeatable; a name with dots is quoted: `models."qwen2.5".gpus=4`);
2. variables: `RELAX_SLURM__PARTITION=main` sets `slurm.partition`, two underscores stand for a dot; {variables};
   a variable that is near to these and none of them is an error;
3. the run file;
4. the cluster file, named by `--set cluster=…`, by `RELAX_CLUSTER_FILE` or by the run file's `cluster`; it may have
   {cluster};
5. the defaults below.

Mappings are merged key by key; every other value replaces the weaker one. Unknown keys are errors. Text
stays text: `1:00:00`, `yes` and `0123` are not turned into numbers or truth values; only `true` and
`false` are truth values. Keys that appear twice, YAML tags and merge keys (`<<`) are errors. Every mistake
ends with exit code 2 and one sentence that says where, what was seen, what was wanted and what to do.

The config of a run, defaults filled in, is in its folder as `config.json`.
"""

ENGINE_ARGS = """\
## Engine arguments

`engine_args` go to SGLang untouched. `tp_size`, `tp-size` and `--tp-size` are the same key, and so are
SGLang's second names ({aliases}). `true` becomes a bare flag, `false` and `null` leave the argument out, a
list becomes several words, a mapping becomes JSON. A role never gets another role's arguments. `tp_size`
that is left out is `gpus_per_engine / pp_size`.

These belong to the tool and are refused by name, shortened spellings included:

| argument | reason |
|---|---|
{owned}
"""


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION.format(
            variables=", ".join(f"`{name}` sets `{key}`" for name, key in TOP_LEVEL_VARIABLES.items()),
            cluster=", ".join(f"`{key}`" for key in CLUSTER_KEYS),
        )
    ]
    seen: set[type[BaseModel]] = set()
    _section(RunConfig, "", parts, seen)
    parts.append(
        ENGINE_ARGS.format(
            aliases=", ".join(f"`{alias}`" for alias in sorted(ALIASES)),
            owned="\n".join(f"| `{name}` | {reason} |" for name, reason in OWNED.items()),
        )
    )
    return "\n".join(parts)


def _section(model: type[BaseModel], path: str, parts: list[str], seen: set[type[BaseModel]]) -> None:
    if model in seen:
        return
    seen.add(model)
    notes = _notes(model)
    title = f"## `{path}`" if path else "## The run file"
    lines = [title, "", inspect.cleandoc(model.__doc__ or ""), "", "| key | value | default | meaning |"]
    lines.append("|---|---|---|---|")
    inner: list[tuple[type[BaseModel], str]] = []
    for name, field in model.model_fields.items():
        lines.append(f"| `{name}` | {_kind(field)} | {_default(field)} | {notes.get(name, '')} |")
        for section, suffix in _sections(field.annotation):
            inner.append((section, f"{path}.{name}{suffix}" if path else f"{name}{suffix}"))
    parts.append("\n".join(lines) + "\n")
    for section, where in inner:
        _section(section, where, parts, seen)


def _notes(model: type[BaseModel]) -> dict[str, str]:
    """The text under each field, read from the source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(tree, ast.ClassDef)
    notes: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            notes[field.target.id] = " ".join(str(text.value.value).split()).replace("|", "\\|")
    return notes


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "see below"
    return f"`{json.dumps(value)}`"


def _kind(field: FieldInfo) -> str:
    limits = [f"{sign} {_number(bound)}" for sign, bound in _bounds(field.metadata)]
    text = _type(field.annotation)
    return f"{text} {', '.join(limits)}" if limits else text


def _bounds(metadata: typing.Iterable[Any]) -> list[tuple[str, float]]:
    found = []
    for entry in metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            if getattr(entry, name, None) is not None:
                found.append((sign, getattr(entry, name)))
    return found


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


_NAMED = {
    id(base.Name): "name",
    id(base.Directive): "word",
    id(base.OptionLine): "option",
    id(base.ShellLine): "line",
    id(base.PathText): "path",
}
_PLAIN = {str: "text", int: "integer", float: "number", bool: "true, false", types.NoneType: "null"}


def _type(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if id(annotation) in _NAMED:
        return _NAMED[id(annotation)]
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    if origin is typing.Annotated:
        limits = ", ".join(f"{sign} {_number(bound)}" for sign, bound in _bounds(_metadata(args[1:])))
        return f"{_type(args[0])} {limits}".rstrip()
    if origin is typing.Literal:
        return ", ".join(f"`{value}`" for value in args)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_type(option) for option in args)
    if origin is tuple:
        return f"list of {_type(args[0])}"
    if origin is dict:
        return f"mapping of {_type(args[0])} to {_type(args[1])}"
    return "any value"


def _metadata(entries: typing.Iterable[Any]) -> list[Any]:
    return [part for entry in entries for part in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]


def _sections(annotation: Any) -> list[tuple[type[BaseModel], str]]:
    """Sections inside a field, each with what stands for its place."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, "")]
    if origin is dict:
        return [(section, f".NAME{suffix}") for section, suffix in _sections(args[1])]
    if origin is tuple:
        return [(section, f"[n]{suffix}") for section, suffix in _sections(args[0])]
    if origin in {typing.Union, types.UnionType}:
        return [found for option in args for found in _sections(option)]
    return []


def main(arguments: list[str]) -> int:
    """Writes the page, or compares it."""
    text = page()
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
