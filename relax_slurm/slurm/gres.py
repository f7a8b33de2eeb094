"""Generic resource strings: `gpu:h100:8(S:0-1)`, `gres/gpu:l40s=2`, `gpu:a100:4(IDX:0-1,6-7)`, `(null)`,
`N/A`.

Slurm often states the same GPUs twice, once with and once without a type (`gpu:2,gpu:h100:2`). The two are
never added: the total is whichever is larger.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from relax_slurm.errors import ConfigError, shown

NOTHING = frozenset({"", "(null)", "none", "null"})
UNKNOWN = "N/A"
MAX_INDEX = 4095
"""Largest GPU index that is believed."""
_ITEM = re.compile(
    r"(?:gres[:/])?(?P<name>[A-Za-z][\w.-]*)(?P<fields>(?::[\w.-]+)*)(?:=(?P<equals>\d+[KMGTP]?))?(?P<notes>(?:\([^()]*\))*)",
    re.ASCII,
)
_COUNT = re.compile(r"(\d{1,12})([KMGTPkmgtp]?)", re.ASCII)
_SCALE = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}


class GresError(ConfigError):
    """A resource string that cannot be read."""


@dataclass(frozen=True, slots=True)
class GresItem:
    """One entry. `indexes` are physical device indexes; None when the string does not state them."""

    name: str
    type: str | None
    count: int
    indexes: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class GpuCounts:
    """GPUs by type (None = no type stated) and their total; typed and untyped entries are the same GPUs."""

    by_type: dict[str | None, int]

    @property
    def total(self) -> int:
        """Number of GPUs."""
        typed = sum(count for kind, count in self.by_type.items() if kind is not None)
        return max(typed, self.by_type.get(None, 0))

    @property
    def types(self) -> tuple[str, ...]:
        """The types named, sorted."""
        return tuple(sorted(kind for kind in self.by_type if kind is not None))


def parse(text: str) -> tuple[GresItem, ...] | None:
    """All GRES entries of a string; () when it states that there are none, None when it states nothing
    (`N/A`).

    In a TRES list (`cpu=8,mem=16G,gres/gpu:h100=8`) only the `gres/` entries count. GresError when
    unreadable.
    """
    text = text.strip()
    if text == UNKNOWN:
        return None
    if text.lower() in NOTHING:
        return ()
    entries = list(_split(text))
    tres = any("=" in entry.partition("(")[0] for entry in entries)
    return tuple(_item(entry, text) for entry in entries if not tres or entry.startswith(("gres/", "gres:")))


def gpu_counts(text: str) -> GpuCounts | None:
    """GPUs of a GRES or TRES string by type; None when unknown (`N/A`). GresError when unreadable."""
    items = parse(text)
    if items is None:
        return None
    by_type: dict[str | None, int] = {}
    for item in items:
        if item.name == "gpu":
            by_type[item.type] = by_type.get(item.type, 0) + item.count
    return GpuCounts(by_type)


def parse_idx(text: str) -> tuple[int, ...] | None:
    """Physical GPU indexes of a string such as `gpu:h100:4(IDX:2-5)`, ascending.

    () when the string says there are no GPUs, None when it does not tell which. GresError when it contradicts
    itself.
    """
    items = parse(text)
    if items is None:
        return None
    gpus = [item for item in items if item.name == "gpu" and item.count]
    if any(item.indexes is None for item in gpus):
        return None
    indexes = sorted(index for item in gpus for index in item.indexes or ())
    if len(set(indexes)) != len(indexes):
        raise GresError(f"GRES string {shown(text)} names a GPU index twice, wanted each one once")
    return tuple(indexes)


def parse_ranges(text: str) -> tuple[int, ...]:
    """`0-1,6-7` to (0, 1, 6, 7). GresError for anything else, for descending ranges and indexes above 4095."""
    found: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", piece.strip(), re.ASCII)
        if match is None:
            raise GresError(f"index list {shown(text)} has the piece {shown(piece)}, wanted numbers and ranges")
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low or high > MAX_INDEX:
            raise GresError(
                f"index list {shown(text)} has the range {shown(piece)}, wanted it ascending, up to {MAX_INDEX}"
            )
        found += range(low, high + 1)
        if len(found) > MAX_INDEX + 1:
            raise GresError(f"index list {shown(text)} names more than {MAX_INDEX + 1} devices")
    return tuple(found)


def _split(text: str) -> Iterator[str]:
    """Entries separated by commas outside parentheses."""
    depth, begin = 0, 0
    for position, character in enumerate(text):
        if character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[begin:position].strip()
            begin = position + 1
    yield text[begin:].strip()


def _item(entry: str, text: str) -> GresItem:
    match = _ITEM.fullmatch(entry)
    if match is None:
        raise GresError(f"GRES string {shown(text)} has the entry {shown(entry)}, wanted NAME[:TYPE][:COUNT]")
    fields = [field for field in match["fields"].split(":")[1:] if field != "no_consume"]
    count: int | None = _number(match["equals"]) if match["equals"] else None
    if count is None and fields and _COUNT.fullmatch(fields[-1]):
        count = _number(fields.pop())
    if len(fields) > 1:
        raise GresError(f"GRES string {shown(text)} has the entry {shown(entry)} with several types, wanted one")
    indexes = _indexes(match["notes"])
    if count is None:
        count = 1
    if indexes is not None and len(indexes) != count:
        raise GresError(f"GRES string {shown(text)} states {count} devices and {len(indexes)} indexes, wanted as many")
    return GresItem(match["name"], fields[0] if fields else None, count, indexes)


def _number(text: str) -> int:
    match = _COUNT.fullmatch(text)
    if match is None:
        raise GresError(f"{shown(text)} is not a resource count")
    return int(match[1]) * _SCALE[match[2].lower()]


def _indexes(notes: str) -> tuple[int, ...] | None:
    for note in re.findall(r"\(([^()]*)\)", notes):
        kind, _, value = note.partition(":")
        if kind == "IDX" and value != UNKNOWN:
            return parse_ranges(value) if value else ()
    return None
