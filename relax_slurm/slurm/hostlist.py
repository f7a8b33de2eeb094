"""Slurm host lists, `rack[0-1]_blade[00-15],login1`, without scontrol (containers have none).

Grammar: entries separated by commas, spaces around a comma tolerated; an entry is text with any number of
bracket groups; a group is a comma list of numbers and ranges. Zero padding counts (`[008-010]`), the order is
kept, the last group of an entry runs fastest.
"""

from __future__ import annotations

from relax_slurm.errors import ConfigError

MAX_HOSTS = 65_536
"""More names than this are refused before any is made."""
MAX_DIGITS = 18
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")
_DIGITS = frozenset("0123456789")


class HostListError(ConfigError):
    """A host list that cannot be read. `position` is the 0-based offset of the offending character."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        shown = text if len(text) <= 120 else text[:117] + "..."
        super().__init__(
            f"host list {shown!r} is not readable at position {position}: {problem}",
            detail={"position": position},
        )
        self.position = position


def expand(text: str) -> tuple[str, ...]:
    """All host names of a host list, in order.

    HostListError for anything that is not one: empty entries, unbalanced, empty or nested brackets,
    descending ranges, characters that no node name has, and lists of more than 65,536 names.
    """
    if not text.strip():
        raise HostListError(text, 0, "it is empty, wanted at least one node name")
    hosts: list[str] = []
    position = 0
    while True:
        parts, position = _entry(text, position)
        size = 1
        for part in parts:
            size *= len(part)
        if len(hosts) + size > MAX_HOSTS:
            raise HostListError(text, position, f"it names more than {MAX_HOSTS} nodes")
        names = [""]
        for part in parts:
            names = [name + piece for name in names for piece in part]
        hosts += names
        if position == len(text):
            return tuple(hosts)
        position += 1  # the comma


def _entry(text: str, start: int) -> tuple[list[list[str]], int]:
    """One entry as a list of alternatives per part, and the position of the comma (or the end) after it."""
    position = _skip_spaces(text, start)
    parts: list[list[str]] = []
    begin = position
    while position < len(text):
        character = text[position]
        if character in _NAME:
            stop = position
            while stop < len(text) and text[stop] in _NAME:
                stop += 1
            parts.append([text[position:stop]])
            position = stop
        elif character == "[":
            group, position = _group(text, position)
            parts.append(group)
        else:
            break
    end = _skip_spaces(text, position)
    if end < len(text) and text[end] != ",":
        raise HostListError(text, end, f"{text[end]!r} does not belong in a node name")
    if position == begin:
        raise HostListError(text, begin, "an entry is empty, wanted a node name between commas")
    return parts, end


def _group(text: str, opening: int) -> tuple[list[str], int]:
    """The alternatives of one bracket group, and the position after its closing bracket."""
    found: list[str] = []
    position = opening + 1
    while True:
        position = _skip_spaces(text, position)
        low, position = _number(text, position, opening)
        high, at = low, position
        if position < len(text) and text[position] == "-":
            at = position + 1
            high, position = _number(text, at, opening)
        first, last = int(low), int(high)
        if last < first:
            raise HostListError(text, at, f"range {low}-{high} runs backwards")
        if len(found) + last - first + 1 > MAX_HOSTS:
            raise HostListError(text, at, f"range {low}-{high} names more than {MAX_HOSTS} nodes")
        found += [f"{value:0{len(low)}d}" for value in range(first, last + 1)]
        position = _skip_spaces(text, position)
        if position == len(text):
            raise HostListError(text, opening, "the bracket is never closed")
        if text[position] == "]":
            return found, position + 1
        if text[position] != ",":
            raise HostListError(text, position, f"{text[position]!r} in brackets, wanted ',' or ']'")
        position += 1


def _number(text: str, start: int, opening: int) -> tuple[str, int]:
    stop = start
    while stop < len(text) and text[stop] in _DIGITS:
        stop += 1
    if stop == start:
        if start == len(text):
            raise HostListError(text, opening, "the bracket is never closed")
        problem = "nested brackets" if text[start] == "[" else f"{text[start]!r} where a number is wanted"
        raise HostListError(text, start, problem)
    if stop - start > MAX_DIGITS:
        raise HostListError(text, start, f"a number of {stop - start} digits, at most {MAX_DIGITS} are read")
    return text[start:stop], stop


def _skip_spaces(text: str, position: int) -> int:
    while position < len(text) and text[position] == " ":
        position += 1
    return position
