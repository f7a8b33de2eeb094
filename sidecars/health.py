"""Looks at one engine: the edge of `core.health`.

While answers come through the guard nothing is asked at all. Otherwise the HTTP server is asked whether it lives, then
the scheduler what it does, and an engine that has been idle for long is asked for one token. `/health_generate` is
never asked, and a sleeping, paused or held engine is not asked for anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from relax_slurm.core.health import HealthBudget, Load, Look, works
from relax_slurm.core.plan import WorkerType
from sidecars.admission import AdmissionGuard
from sidecars.engine import SGLangEngine


class HealthWatch:
    """What has to be remembered from one look to the next."""

    def __init__(
        self,
        engine: SGLangEngine,
        guard: AdmissionGuard | None,
        budget: HealthBudget,
        held: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held` says whether an operation, a pause or sleep forbids to ask."""
        self._engine, self._guard, self._budget, self._held, self._clock = engine, guard, budget, held, clock
        self._load: Load | None = None
        self._was_busy = False
        self._worked = clock()
        self._generates = budget.generate_seconds > 0 and engine.worker.worker_type is WorkerType.REGULAR

    @property
    def busy(self) -> bool:
        """Whether requests are at the engine."""
        return self._guard is not None and self._guard.in_flight > 0

    async def look(self) -> Look:
        """One look, which takes a few times `answer_seconds` at most."""
        if self._held():
            self._forget()
            return Look(held=True)
        if self._guard is not None and self._guard.moved():
            self._forget()
            return Look(moved=True)
        answers = await self._engine.health(self._budget.answer_seconds)
        moves = await self._moves() if answers and self._guard is not None else None
        # An operation may have begun while the engine was asked: then the answer says nothing about its health.
        return Look(held=True) if self._held() else Look(answers=answers, works=moves)

    def _forget(self) -> None:
        self._load, self._was_busy, self._worked = None, False, self._clock()

    async def _moves(self) -> bool:
        """Whether the scheduler does what it has to. Only the head has one that can be asked."""
        now = await self._engine.load(self._budget.answer_seconds)
        before, self._load = self._load, now
        was_busy, self._was_busy = self._was_busy, self.busy
        if not works(before, now, busy=was_busy and self.busy):
            return False
        if self.busy or (now is not None and now.running):
            self._worked = self._clock()
        elif self._generates and self._clock() - self._worked >= self._budget.generate_seconds:
            if not await self._engine.generates(self._budget.answer_seconds):
                return False
            self._worked = self._clock()
        return True
