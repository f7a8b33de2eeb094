"""pydantic's findings as one sentence: where, what was seen, what was wanted, what to do."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from relax_slurm.config.hints import hint, nearest
from relax_slurm.errors import ConfigError

Path = tuple[str | int, ...]


def config_error(
    error: ValidationError, model: type[BaseModel], data: Any, label_of: Callable[[Path], str]
) -> ConfigError:
    """The first finding as a sentence; `detail["problems"]` has all (at most 50).

    `label_of` names the file, variable or flag that a key path came from. Unknown keys are told first,
    because a misspelt key is usually also the cause of a missing one.
    """
    findings = sorted(error.errors(include_url=False), key=lambda entry: entry["type"] != "extra_forbidden")
    sentences = list(dict.fromkeys(_sentence(entry, model, data, label_of) for entry in findings[:50]))
    more = len(sentences) - 1
    tail = f" (and {more} more problem{'s' if more > 1 else ''})" if more else ""
    return ConfigError(sentences[0] + tail, detail={"problems": sentences})


def dotted(path: Path) -> str:
    """`pools.rollout.nodes`; names with a dot are quoted as `--set` wants them; list places are in
    brackets."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = f'"{part}"' if "." in part else part
            text += f".{word}" if text else word
    return text


def _sentence(entry: Any, model: type[BaseModel], data: Any, label_of: Callable[[Path], str]) -> str:
    kind, seen, context = entry["type"], entry["input"], entry.get("ctx") or {}
    is_key = "[key]" in entry["loc"]
    path = _real_path(entry["loc"], data)
    where = f"{label_of(path)}:{dotted(path)}" if path else label_of(path)
    if kind == "extra_forbidden":
        parent = dotted(path[:-1])
        at = f"in {parent}" if parent else "at the top level"
        return f"{where}: unknown key '{path[-1]}' {at}; {hint(str(path[-1]), _fields_at(model, path[:-1]))}"
    if kind == "missing":
        return f"{where}: this key is missing; add it"
    if kind == "value_error":
        text = str(context.get("error", entry["msg"]))
        value = "" if isinstance(seen, (Mapping, list, BaseModel)) or not path else f"{show(seen)} "
        return f"{where}: {'the name ' if is_key else ''}{value}{text}"
    if kind in {"literal_error", "enum"}:
        wanted = str(context.get("expected", ""))
        close = nearest(str(seen), wanted.replace("'", "").replace(" or ", ", ").split(", "))
        advice = f"did you mean '{close}'?" if close else "choose one of them"
        return f"{where}: {'the key is' if is_key else 'seen'} {show(seen)}, wanted {wanted}; {advice}"
    wanted = entry["msg"].removeprefix("Input should be ").removeprefix("an instance of ")
    wanted = f"a number {wanted}" if wanted.startswith(("greater", "less")) else wanted
    wanted = wanted.replace("an object", "a mapping").replace("a valid dictionary", "a mapping")
    wanted = wanted.replace("a valid array", "a list").replace("a valid boolean", "true or false").replace("valid ", "")
    wanted = wanted.replace("a integer", "an integer")
    return f"{where}: seen {show(seen)}, wanted {wanted}; correct the value"


def show(value: Any) -> str:
    """The value as YAML would spell it, shortened."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _real_path(loc: tuple[str | int, ...], data: Any) -> Path:
    """pydantic's location without the parts that name union members or dictionary keys."""
    path: list[str | int] = []
    node = data
    for place, part in enumerate(loc):
        last = place == len(loc) - 1
        if has_part(node, part):
            path.append(part)
            node = node[part]
        elif last and isinstance(node, dict) and part != "[key]":
            path.append(part)
    return tuple(path)


def has_part(node: Any, part: str | int) -> bool:
    """Whether `node[part]` exists."""
    if isinstance(node, dict):
        return part in node
    return isinstance(node, list) and isinstance(part, int) and part < len(node)


def _fields_at(model: type[BaseModel], path: Path) -> list[str]:
    """Keys that the section at `path` knows."""
    current: Any = model
    for part in path:
        current = _step(current, part)
        if current is None:
            return []
    found = _section(current)
    return list(found.model_fields) if found else []


def _step(annotation: Any, part: str | int) -> Any:
    section = _section(annotation)
    if section is not None:
        field = section.model_fields.get(str(part))
        return field.annotation if field else None
    for option in _options(annotation):
        origin, args = typing.get_origin(option), typing.get_args(option)
        if origin is dict:
            return args[1]
        if origin in {tuple, list}:
            return args[0]
    return None


def _section(annotation: Any) -> type[BaseModel] | None:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _options(annotation: Any) -> list[Any]:
    """The members of a union, or the annotation itself, without `Annotated`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _options(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in {dict, tuple, list} or not typing.get_args(annotation):
        return [annotation]
    return [option for entry in typing.get_args(annotation) for option in _options(entry)]
