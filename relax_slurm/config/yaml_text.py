"""YAML text to plain values, with nothing that surprises: JSON's types only, no repeated keys, bounded size.

Differences from PyYAML's safe loader, each for a reason seen in run files: `1:00:00` stays text (not 3600),
`yes`, `no`, `on` and `off` stay text, numbers with a leading zero stay text, dates stay text, `<<` is an
ordinary key, keys must be text, and an alias may not multiply a file beyond `MAX_NODES`.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from relax_slurm.errors import ConfigError

MAX_BYTES = 256 * 1024
MAX_NODES = 50_000
MAX_DEPTH = 32


class _Loader(yaml.SafeLoader):
    """SafeLoader with the resolvers of YAML 1.2's core schema."""

    # A fresh table: add_implicit_resolver would otherwise start from a copy of SafeLoader's.
    yaml_implicit_resolvers = {}  # noqa: RUF012


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9]{0,18})$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:[eE][-+]?[0-9]{1,3})?)$"),
    list("-+.0123456789"),
)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> Any:
    result: dict[str, Any] = {}
    yield result
    lines: dict[str, int] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {_short(key)} is not text; put it in quotes", key_node.start_mark
            )
        if key in result:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key '{key}' is already on line {lines[key]}; keep one", key_node.start_mark
            )
        lines[key] = line
        result[key] = loader.construct_object(value_node, deep=True)


_TAG = "tag:yaml.org,2002:"
_CONSTRUCT = yaml.SafeLoader.yaml_constructors
_Loader.yaml_constructors = {
    **{_TAG + name: _CONSTRUCT[_TAG + name] for name in ("null", "bool", "int", "float", "str", "seq")},
    _TAG + "map": _mapping,
    None: _CONSTRUCT[None],
}


def parse(text: str, label: str) -> Any:
    """The value of one YAML document. ConfigError with `label:line:column` for anything else."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{label}: {len(text)} characters, at most {MAX_BYTES} are read; is this the run file?")
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        value = loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_located(error, label)) from None
    except yaml.reader.ReaderError as error:
        seen = f"character {error.position} is 0x{_code(error.character):02x}"
        raise ConfigError(f"{label}: not text: {seen}; wanted YAML in UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{label}: not YAML: {' '.join(str(error).split())[:200]}; correct it") from None
    except RecursionError:
        raise ConfigError(f"{label}: nested too deeply; at most {MAX_DEPTH} levels are read") from None
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{label}: a value cannot be read: {str(error)[:120]}; correct it") from None
    finally:
        if loader is not None:
            loader.dispose()
    _measure(value, label)
    return value


def _located(error: yaml.MarkedYAMLError, label: str) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{label}:{mark.line + 1}:{mark.column + 1}" if mark else label
    problem = " ".join((error.problem or "cannot be read").split())[:200]
    if isinstance(error, yaml.constructor.ConstructorError) and "could not determine a constructor" in problem:
        return f"{where}: tags such as {problem.rsplit(' ', 1)[-1]} are not supported; write a plain value"
    if isinstance(error, yaml.constructor.ConstructorError):
        return f"{where}: {problem}"
    context = f"{' '.join(error.context.split())}, " if error.context else ""
    return f"{where}: not YAML: {context}{problem}; correct it there or just above"


def _measure(value: Any, label: str) -> None:
    """Refuses what an alias blew up: counting walks through aliases as often as they are used."""
    stack: list[tuple[Any, int]] = [(value, 0)]
    count = 0
    while stack:
        entry, depth = stack.pop()
        count += 1
        if count > MAX_NODES:
            raise ConfigError(f"{label}: more than {MAX_NODES} values once aliases are followed; write them out")
        if depth > MAX_DEPTH:
            raise ConfigError(f"{label}: nested too deeply; at most {MAX_DEPTH} levels are read")
        if isinstance(entry, dict):
            stack.extend((child, depth + 1) for child in entry.values())
        elif isinstance(entry, list):
            stack.extend((child, depth + 1) for child in entry)


def _code(character: Any) -> int:
    return character if isinstance(character, int) else ord(character)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
