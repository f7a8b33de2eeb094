"""How long each phase of a batch took."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

HANDOVERS = frozenset({"begin", "offload", "genrm_on", "genrm_off", "teacher_on", "teacher_off", "student_on"})
HANDOVERS |= {"student_off"}
"""Phases in which GPUs change hands."""


@dataclass(slots=True)
class Timing:
    """Seconds per phase; a phase that comes twice adds up. `started` hears every phase as it begins."""

    clock: Callable[[], float]
    started: Callable[[str], None] = lambda phase: None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a block, whatever becomes of it."""
        self.started(name)
        began = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - began

    @property
    def handovers(self) -> dict[str, float]:
        """Seconds of the phases in which GPUs changed hands."""
        return {name: seconds for name, seconds in self.seconds.items() if name in HANDOVERS}
