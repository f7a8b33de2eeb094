"""What happened in a schedule, step by step. Cheap to write down; it becomes words only when somebody reads."""

from __future__ import annotations

import hashlib
from collections.abc import Callable


class Broken(AssertionError):
    """A promise of the system was broken."""


class Story:
    """Numbered steps."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.over = False
        """Nothing more is written down: what follows a broken promise is of no interest."""
        self._steps: list[tuple[float, str, str, tuple[object, ...]]] = []

    def tell(self, who: str, words: str, *values: object) -> None:
        """One step; `words` is a %-format for the values, which must not change afterwards."""
        if not self.over:
            self._steps.append((self._clock(), who, words, values))

    def __len__(self) -> int:
        return len(self._steps)

    def lines(self) -> list[str]:
        """Every step as a line: number, second, who, what."""
        return [
            f"{number:>4}  {at:8.3f} s  {who:<12} {words % values if values else words}"
            for number, (at, who, words, values) in enumerate(self._steps, start=1)
        ]

    def digest(self) -> str:
        """The same for the same story."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()[:16]
