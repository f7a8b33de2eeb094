"""The lifecycle coordinator at work: it asks `core.lifecycle`, moves engines and answers whoever waits.

One writer: everything here runs in the coordinator's loop, and what a request changes is changed before the next one
is looked at. Only waiting is left to tasks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from relax_slurm.core.batch import BatchState
from relax_slurm.core.lease import LeaseState
from relax_slurm.core.lifecycle import Lifecycle, Move, Unproven, Work
from relax_slurm.core.lifecycle_errors import BatchFailed
from relax_slurm.core.operations import Ask, Operation, Progress
from relax_slurm.errors import RelaxError

Record = Callable[..., None]


class Mover(Protocol):
    """What the lifecycle needs of the engines."""

    async def move(self, holder: str, move: Move) -> None:
        """Bring every engine of the holder back, or off its GPUs; `RelaxError` when one does not go."""

    def abandon(self, holder: str, reason: str) -> None:
        """A move failed or was too slow: end what hangs in between, so that there will be evidence."""

    def unproven(self) -> Unproven:
        """Holder to its replicas whose release is not proven now."""


class LifecycleCoordinator:
    """Leases and batches of a run, for as long as it serves."""

    def __init__(
        self,
        book: Lifecycle,
        mover: Mover,
        *,
        record: Record,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        clock: Callable[[], float],
    ) -> None:
        self.book = book
        self._mover, self._record, self._spawn, self._clock = mover, record, spawn, clock
        self._turn = asyncio.Event()
        self._seen = self._shown()

    # --- requests -------------------------------------------------------------------------------------------

    def ask(self, ask: Ask) -> Operation:
        """Take a request and start what follows from it. A refusal raises and changes nothing."""
        operation, work = self.book.ask(ask, self._clock(), self._mover.unproven())
        if work is not None:
            self._record("operation", id=work.operation, method=str(ask.method), holder=work.holder, batch=ask.batch)
            self._spawn(self._carry_out(work))
        self._changed(cause=str(ask.method))
        return operation

    async def result(self, operation: Operation) -> dict[str, Any]:
        """Wait for the end of an operation; raises its error."""
        while operation.progress is Progress.RUNNING:
            await self._turn.wait()
        if operation.error is not None:
            raise operation.error
        return self.state()

    async def committed(self, number: int, seconds: float) -> dict[str, Any]:
        """Wait until the batch is committed, but no longer than `seconds`; `BatchFailed` when it never will be."""
        deadline = self._clock() + seconds
        while (verdict := self.book.verdict(number)).state is BatchState.PENDING:
            left = deadline - self._clock()
            if left <= 0:
                break
            try:
                async with asyncio.timeout(left):
                    await self._turn.wait()
            except TimeoutError:
                continue
        if verdict.state is BatchState.FAILED:
            raise BatchFailed(f"batch {number} will not be committed: {verdict.error}")
        return {"batch": number, "state": str(verdict.state)}

    def holds(self, holder: str) -> bool:
        """Whether the holder has its GPUs, and nothing of ours moves its engines."""
        return self.book.leases[holder].state is LeaseState.ACTIVE and holder not in self.book.moving

    def state(self) -> dict[str, Any]:
        """Leases and batch, as the state document shows them."""
        current = self.book.current
        batch: dict[str, Any] = {"id": None, "state": None}
        if current is not None:
            batch = {"id": current.number, "state": str(current.state)}
        if current is not None and current.error:
            batch["error"] = current.error
        return {
            "leases": {name: str(lease.state) for name, lease in self.book.leases.items()},
            "batch": batch,
            "lifecycle_failure": self.book.failure,
            "trainers": list(self.book.trainers),
            "sharing": {each.name: list(self.book.sharing.rivals(each.name)) for each in self.book.sharing.holders},
        }

    def end(self, reason: str) -> None:
        """The run is over: whoever waits for a batch gets the reason."""
        self.book.end(reason)
        self._changed(cause="end")

    # --- work -----------------------------------------------------------------------------------------------

    async def _carry_out(self, work: Work) -> None:
        started = self._clock()
        failure = ""
        try:
            await self._mover.move(work.holder, work.move)
        except RelaxError as error:
            failure = error.message
        in_time = self.book.settle(work.operation, failure)
        self._record(
            "moved",
            id=work.operation,
            holder=work.holder,
            move=str(work.move),
            seconds=round(self._clock() - started, 6),
            failure=failure,
            late=not in_time,
        )
        if failure and in_time:
            self._mover.abandon(work.holder, failure)
        self._changed(cause=str(work.move))

    async def watch(self) -> None:
        """Give up what is past its deadline. Until cancelled."""
        while True:
            turn, due = self._turn, self.book.next_deadline
            try:
                async with asyncio.timeout(None if due is None else max(due - self._clock(), 0.0)):
                    await turn.wait()
            except TimeoutError:
                for operation in self.book.tick(self._clock()):
                    assert operation.error is not None
                    holder = operation.ask.holder or "rollout"
                    self._record("gave_up", id=operation.id, holder=holder, reason=operation.error.message)
                    self._mover.abandon(holder, operation.error.message)
                self._changed(cause="deadline")

    def _changed(self, *, cause: str) -> None:
        """Write down what is different, and wake everyone who waits."""
        seen = self._shown()
        for what, after in seen.items():
            before = self._seen.get(what)
            if after != before:
                self._record(
                    "lease" if what != "batch" else "batch", holder=what, before=before, after=after, cause=cause
                )
        self._seen = seen
        self._turn.set()
        self._turn = asyncio.Event()

    def _shown(self) -> dict[str, str]:
        return {"batch": self.book.shown_batch} | {name: str(lease.state) for name, lease in self.book.leases.items()}
