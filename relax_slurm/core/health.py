"""When a living engine counts as suspect and when as failed: looks in, a verdict out. Pure.

The end of the process is no business of this file: it is seen at once, and it is the first signal. Here is the second
one, for engines that live and do not work. A look finds one of four signs; signs in a row use up a budget. An engine
that does not answer at all (MUTE) has a short one. An engine that answers and whose work does not move (STALLED) has a
longer one, because compiling a kernel or filling a long prompt looks the same for a while. A suspect engine gets
nothing new and comes back with the first good sign; a failed one does not come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from relax_slurm.errors import ProtocolError


class Sign(StrEnum):
    """What one look found."""

    HELD = "held"
    """An operation holds the replica, or it sleeps or is paused: nothing was asked, and nothing counts."""
    WELL = "well"
    """It works, or it answers and has nothing to do."""
    MUTE = "mute"
    """Its HTTP server did not answer in time."""
    STALLED = "stalled"
    """Its HTTP server answers; its scheduler does not, or requests run and no token comes."""


class Verdict(StrEnum):
    """What the signs so far amount to."""

    WELL = "well"
    """Route to it."""
    SUSPECT = "suspect"
    """Route nothing new to it; what runs there goes on."""
    FAILED = "failed"
    """The budget is used up: end it with everything that runs there."""


@dataclass(frozen=True, slots=True)
class HealthBudget:
    """How often to look and how many bad signs in a row are too many. Same keys as `engine.health` of a run file."""

    every_seconds: float = 1.0
    idle_seconds: float = 5.0
    answer_seconds: float = 2.0
    generate_seconds: float = 60.0
    mute_suspect: int = 2
    mute_failed: int = 6
    stalled_suspect: int = 5
    stalled_failed: int = 20

    @classmethod
    def from_wire(cls, value: Any) -> HealthBudget:
        """The budget in a `start_worker` command; defaults for what is missing, `ProtocolError` for no numbers."""
        given = value if isinstance(value, Mapping) else {}
        known = {entry.name for entry in fields(cls)}
        try:
            return cls(**{key: _number(item) for key, item in given.items() if key in known})
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"start_worker: health is not usable ({error}); send numbers") from None


def _number(item: Any) -> Any:
    if isinstance(item, bool) or not isinstance(item, int | float) or item < 0:
        raise ValueError(f"{item!r} is no number from 0 on")
    return item


@dataclass(frozen=True, slots=True)
class Look:
    """The facts of one look; None: not asked."""

    held: bool = False
    moved: bool = False
    """Bytes of an answer have come from it since the last look: then nothing else is asked."""
    answers: bool | None = None
    """Whether its HTTP server said that it is alive."""
    works: bool | None = None
    """Whether its scheduler answered and, with requests there, has moved since the last look."""

    @property
    def sign(self) -> Sign:
        """What the facts mean, the strongest first."""
        if self.held:
            return Sign.HELD
        if self.moved:
            return Sign.WELL
        if self.answers is False:
            return Sign.MUTE
        return Sign.STALLED if self.works is False else Sign.WELL


@dataclass(frozen=True, slots=True)
class Pulse:
    """Bad signs in a row. A mute engine does not work either, so those looks count for both."""

    mute: int = 0
    stalled: int = 0

    def after(self, sign: Sign) -> Pulse:
        """The pulse once `sign` was seen."""
        match sign:
            case Sign.MUTE:
                return Pulse(self.mute + 1, self.stalled + 1)
            case Sign.STALLED:
                return Pulse(0, self.stalled + 1)
            case _:
                return Pulse()

    def verdict(self, budget: HealthBudget) -> Verdict:
        """What it amounts to."""
        if self.mute >= budget.mute_failed or self.stalled >= budget.stalled_failed:
            return Verdict.FAILED
        suspect = self.mute >= budget.mute_suspect or self.stalled >= budget.stalled_suspect
        return Verdict.SUSPECT if suspect else Verdict.WELL

    def pause(self, budget: HealthBudget, *, busy: bool) -> float:
        """Seconds until the next look: long only while nothing is to do and nothing is in doubt."""
        return budget.every_seconds if busy or self.stalled else budget.idle_seconds

    def __str__(self) -> str:
        if self.mute:
            return f"it did not answer {self.mute} looks in a row"
        return f"its work did not move for {self.stalled} looks in a row"


MARKS = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "timestamp")
"""What changes in a scheduler's own words while it works. SGLang 0.5.23 answers with what the scheduler wrote down
last, so an answer alone proves nothing; the time at which that was is part of it."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a scheduler says of its work."""

    running: int
    mark: tuple[float, ...] = ()
    """Compared with the one before: with work to do it has to change."""

    @classmethod
    def read(cls, document: Any) -> Load | None:
        """SGLang's /v1/loads, all data-parallel ranks together; None when it is not what it should be."""
        loads = document.get("loads") if isinstance(document, Mapping) else None
        if not isinstance(loads, list) or not all(isinstance(entry, Mapping) for entry in loads):
            return None
        mark = [entry.get(key, 0) for entry in loads for key in MARKS]
        if not all(isinstance(value, int | float) for value in mark):
            return None
        return cls(int(sum(mark[:: len(MARKS)])), tuple(mark))


def works(before: Load | None, now: Load | None, *, busy: bool) -> bool:
    """Whether the scheduler answered and has moved, if it had something to do all the time.

    `busy`: requests were at the engine at both looks, by the guard's count. The scheduler may not know of them.
    """
    if now is None:
        return False
    if before is None or not (busy or (before.running and now.running)):
        return True
    return before != now
