"""The nearest known word to a wrong one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word` (case and `-`/`_` do not count), or None when none is like it."""
    table = {_fold(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_fold(word[:200]), table, n=1, cutoff=cutoff)
    return table[found[0]] if found else None


def hint(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what is known when nothing is near."""
    names = list(known)
    close = nearest(word, names)
    if close:
        return f"did you mean '{close}'?"
    return f"known here: {', '.join(names)}" if names else "no keys are known here"


def _fold(word: str) -> str:
    return word.lower().replace("-", "_")
