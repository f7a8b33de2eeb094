"""Prompts from a JSONL file, all checked before the first is used: a mistake in line 900 must not cost an hour of GPUs.

A line is `{"prompt": text}` or `{"input_ids": [ids]}`, with `label`, `metadata` (an object) and `multimodal` (an object
for the engine) if there are any. Other keys become metadata under their names. Empty lines are passed over.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_slurm.workload.failures import BadPrompts
from relax_slurm.workload.samples import Prompt

MAX_LINE_BYTES = 16 << 20
MAX_PROMPTS = 4_000_000
_KNOWN = ("prompt", "input_ids", "label", "metadata", "multimodal")


class PromptSource:
    """Prompts in the order of the file, over and over. `position` is how many were taken."""

    def __init__(self, prompts: list[Prompt]) -> None:
        if not prompts:
            raise BadPrompts("prompts: there are none; wanted at least one")
        self._prompts = prompts
        self.position = 0

    @classmethod
    def of(cls, path: Path) -> PromptSource:
        """Reads and checks the whole file. BadPrompts names the first bad line, and how many there are."""
        return cls(read_prompts(path))

    def __len__(self) -> int:
        return len(self._prompts)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; after the last comes the first again."""
        start = self.position
        self.position += count
        return [self._prompts[(start + offset) % len(self._prompts)] for offset in range(count)]


def read_prompts(path: Path) -> list[Prompt]:
    """Every prompt of the file. BadPrompts when one line is bad: none is left out in silence."""
    found: list[Prompt] = []
    bad: list[str] = []
    try:
        with path.open("rb") as stream:
            number = 0
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise BadPrompts(f"{path}:{number}: longer than {MAX_LINE_BYTES} bytes; is this a prompt file?")
                if not line.strip():
                    continue
                try:
                    found.append(prompt_of(_decoded(line)))
                except (ValueError, RecursionError) as error:
                    bad.append(f"{path}:{number}: {_plain(error)}")
                if len(found) > MAX_PROMPTS:
                    raise BadPrompts(f"{path}: more than {MAX_PROMPTS} prompts; split the file")
    except OSError as error:
        raise BadPrompts(f"{path}: cannot be read ({error.strerror or error}); check path and permissions") from None
    if bad:
        more = f" ({len(bad)} bad lines in all)" if len(bad) > 1 else ""
        raise BadPrompts(f"{bad[0]}{more}; no prompt of the file was used", detail={"lines": bad[:100]})
    if not found:
        raise BadPrompts(f"{path}: holds no prompts; wanted one JSON object per line")
    return found


def _decoded(line: bytes) -> Any:
    """JSON as everybody else reads it: no NaN and no infinities, and text that can be sent."""
    value = json.loads(line, parse_constant=_no_number)
    if rb"\u" in line:
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate is no text: UnicodeEncodeError
    return value


def _no_number(name: str) -> Any:
    raise ValueError(f"holds {name}, which is no number of JSON")


def prompt_of(row: Any) -> Prompt:
    """One decoded line. ValueError says what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f'is {type(row).__name__}, wanted an object such as {{"prompt": "What is 17 + 25?"}}')
    text, ids = row.get("prompt"), row.get("input_ids")
    if (text is None) is (ids is None):
        raise ValueError("wanted exactly one of prompt and input_ids")
    if text is not None and (not isinstance(text, str) or not text):
        raise ValueError(f"prompt is {text!r:.60}, wanted text that is not empty")
    if ids is not None and not _are_ids(ids):
        raise ValueError(f"input_ids is {ids!r:.60}, wanted a list of token ids (whole numbers from 0 on)")
    label = row.get("label")
    if isinstance(label, bool) or not isinstance(label, str | int | float | None):
        raise ValueError(f"label is {label!r:.60}, wanted text or a number")
    metadata = _object(row, "metadata") or {}
    extra = {key: value for key, value in row.items() if key not in _KNOWN}
    twice = sorted(extra.keys() & metadata.keys())
    if twice:
        raise ValueError(f"{twice[0]!r} is there twice, beside metadata and in it; keep one")
    return Prompt(
        text,
        None if ids is None else tuple(ids),
        None if label is None else str(label),
        {**metadata, **extra},
        _object(row, "multimodal"),
    )


def _object(row: Mapping[str, Any], key: str) -> dict[str, Any] | None:
    value = row.get(key)
    if value is None or isinstance(value, dict):
        return value
    raise ValueError(f"{key} is {value!r:.60}, wanted an object")


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(entry) is int and entry >= 0 for entry in value)


def _plain(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8"
    return str(error)
