"""Off the card and back on: the two sequences that may move an engine's memory, and what came of them.

Offload: close admission, pause, then abort and flush until a flush proves that nothing is left, release, and
measure until the card agrees. Onload: resume what was released, make the weights valid, flush, continue, open
admission.

A failure never raises and never opens anything: it is an `Outcome`, admission stays closed, and the same call may be
made again, which goes on where the last one stopped. A repeated success is a no-op.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from relax_slurm.core.plan import WeightSource
from relax_slurm.core.weights import Transport, Weights
from relax_slurm.errors import DeadlineExceeded, RecoveryRequired, RelaxError, UpstreamFailed
from sidecars.engine import ALL_TAGS, PauseMode, SGLangEngine, Tag, TagState

MemoryMeter = Callable[[Sequence[int]], Mapping[int, int]]
"""Bytes in use on each of the given physical GPUs, whoever uses them."""

_STEP_SECONDS = (0.01, 0.25)
_LAST_WORDS_SECONDS = 1.0
METER_SECONDS = 30.0
_LAST_LOOK_SECONDS = 2.0
"""What a measurement gets even at the deadline: without it the outcome could not be told."""


class MeterFailed(RecoveryRequired):
    """The cards could not be measured: what is on them is not known."""

    code = "meter_failed"


class Guard(Protocol):
    """The part of the admission guard that these sequences need."""

    def open(self, *, backend_drained: bool = False) -> None:
        """Admit requests; the caller vouches that the engine holds none of an earlier time."""

    async def close(self, drain_deadline_seconds: float) -> Any:
        """Admit nothing more and return when nothing is under way in the guard."""


class Result(StrEnum):
    """How a sequence ended."""

    RELEASED = "released"
    """The memory is free: released, and measured where there is something to measure."""
    ALREADY_RELEASED = "already_released"
    """Nothing was to be done."""
    QUIET = "quiet"
    """Admission closed, paused, and proven to hold no request; memory where it was."""
    READY = "ready"
    """Memory resident, weights valid, admission open."""
    ALREADY_READY = "already_ready"
    """Nothing was to be done."""
    PARTIAL = "partial"
    """The requested tags are resident and others are not; admission stays closed."""
    WEIGHTS_PENDING = "weights_pending"
    """Memory is resident and somebody else must bring the weights; admission stays closed."""
    NOT_DRAINED = "not_drained"
    """Requests were still there at the deadline; nothing was released."""
    MEMORY_HELD = "memory_held"
    """The engine says released and the card says no; the GPUs are not free."""
    REFUSED = "refused"
    """The engine, or a rule, said no; nothing moved."""
    DOUBTFUL = "doubtful"
    """A memory call had no clear outcome; only stopping the engine settles it."""
    ENGINE_GONE = "engine_gone"
    """The process ended in between."""


_GOOD = frozenset({Result.RELEASED, Result.ALREADY_RELEASED, Result.QUIET, Result.READY, Result.ALREADY_READY})


class WeightRestore(StrEnum):
    """How weights become valid after a resume."""

    BACKUP = "backup"
    """The engine kept them in host memory."""
    DISK = "disk"
    """The engine loads its present checkpoint again."""
    AWAIT = "await"
    """The trainer sends them; until then the replica is not ready."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an offload or onload."""

    result: Result
    message: str
    seconds: float
    before: dict[int, int] = field(default_factory=dict)
    """Bytes in use per physical GPU before the release; empty when nothing was measured."""
    after: dict[int, int] = field(default_factory=dict)
    """Bytes in use at the end."""

    @property
    def ok(self) -> bool:
        """Whether the sequence did what it is for."""
        return self.result in _GOOD

    def as_json(self) -> dict[str, Any]:
        """The outcome as a result of a command."""
        return {
            "result": self.result.value,
            "ok": self.ok,
            "message": self.message,
            "seconds": round(self.seconds, 6),
            "before": {str(gpu): size for gpu, size in self.before.items()},
            "after": {str(gpu): size for gpu, size in self.after.items()},
        }


def default_restore(engine: SGLangEngine) -> WeightRestore:
    """What the engine's arguments and weight source imply."""
    if engine.worker.has_weights_backup:
        return WeightRestore.BACKUP
    return WeightRestore.DISK if engine.worker.weight_source is WeightSource.STATIC else WeightRestore.AWAIT


class _Stop(Exception):
    """Ends a sequence with a result."""

    def __init__(self, result: Result, message: str) -> None:
        super().__init__(message)
        self.result = result
        self.message = message


class Tenancy:
    """An engine's stay on its cards. One sequence runs at a time; a second one waits for it."""

    def __init__(
        self,
        engine: SGLangEngine,
        guard: Guard,
        meter: MemoryMeter | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        freed_fraction: float = 0.8,
    ) -> None:
        """`freed_fraction` of what the engine held must be gone; the rest is context that stays until its exit."""
        self._engine = engine
        self._guard = guard
        self._meter = meter if engine.worker.gpu_indexes else None
        self._clock = clock
        self._freed_fraction = freed_fraction
        self._foreign: dict[int, int] = {}
        self._own: dict[int, int] = {}
        self._loaded: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._confirmed = False
        self._open = False
        self._measuring: asyncio.Future[dict[int, int]] | None = None
        self._lock = asyncio.Lock()

    # ---- measuring ---------------------------------------------------------------------------------------------

    def measure(self) -> dict[int, int]:
        """Bytes in use on the engine's GPUs now; empty when there is no meter."""
        return {} if self._meter is None else dict(self._meter(self._engine.worker.gpu_indexes))

    async def measured(self, seconds: float) -> dict[int, int]:
        """`measure`, in a thread: drivers and shared file systems hang, and the loop carries every request.

        `MeterFailed` when there is no answer within `seconds`, or the meter fails. A thread that hangs is left behind
        and waited for by the next call, so that there is never more than one.
        """
        if self._meter is None:
            return {}
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.ensure_future(asyncio.to_thread(self.measure))
        await asyncio.wait({self._measuring}, timeout=max(seconds, 0.0))
        who = self._engine.worker.worker_id
        if not self._measuring.done():
            raise MeterFailed(
                f"{who}: its GPUs could not be measured within {seconds:.1f} s; look at the node's driver"
            )
        try:
            return self._measuring.result()
        except (RelaxError, OSError) as error:
            raise MeterFailed(f"{who}: its GPUs could not be measured ({error}); look at the node's driver") from error

    async def note_before_start(self) -> None:
        """Remember what others hold on the cards. Call before the engine starts."""
        self._foreign = await self.measured(METER_SECONDS)

    async def note_loaded(self) -> None:
        """Remember how much the engine took. Call once it is healthy."""
        self._loaded = await self.measured(METER_SECONDS)
        self._own = {gpu: used - self._foreign.get(gpu, 0) for gpu, used in self._loaded.items()}

    def opened(self) -> None:
        """Say that admission was opened by somebody else, for instance after the start."""
        self._open = True

    # ---- sequences ---------------------------------------------------------------------------------------------

    async def offload(self, timeout_seconds: float, drain_seconds: float = 0.0) -> Outcome:
        """Get the engine off its cards. Requests in the guard get `drain_seconds` before they are cut."""
        async with self._lock:
            started = self._clock()
            deadline = started + timeout_seconds
            return await self._outcome(started, self._offload(deadline, drain_seconds))

    async def onload(
        self,
        timeout_seconds: float,
        tags: Iterable[Tag] = ALL_TAGS,
        restore: WeightRestore | None = None,
        weights: Weights | None = None,
    ) -> Outcome:
        """Get the engine back onto its cards and open admission, if everything is there for it.

        `weights` on disk are loaded unless the engine says that it has them; without, `restore` decides.
        """
        async with self._lock:
            started = self._clock()
            how = restore or default_restore(self._engine)
            return await self._outcome(started, self._onload(started + timeout_seconds, frozenset(tags), how, weights))

    async def quiet(self, timeout_seconds: float, drain_seconds: float = 0.0) -> Outcome:
        """Close admission and get the engine paused and empty while it keeps its memory: for other weights."""
        async with self._lock:
            started = self._clock()
            return await self._outcome(started, self._quiet(started + timeout_seconds, drain_seconds))

    async def wake(self, timeout_seconds: float) -> Outcome:
        """After `quiet`: generate again; the guard may be opened."""
        async with self._lock:
            started = self._clock()
            return await self._outcome(started, self._wake(started + timeout_seconds))

    async def _outcome(self, started: float, sequence: Awaitable[tuple[Result, str]]) -> Outcome:
        try:
            result, message = await sequence
        except _Stop as stop:
            result, message = stop.result, stop.message
        except MeterFailed as error:
            result, message = await self._unless_gone(Result.MEMORY_HELD, error)
        except RecoveryRequired as error:
            result, message = await self._unless_gone(Result.DOUBTFUL, error)
        except DeadlineExceeded as error:
            result, message = await self._unless_gone(Result.NOT_DRAINED, error)
        except RelaxError as error:
            result, message = await self._unless_gone(Result.REFUSED, error)
        after: dict[int, int] = {}
        with contextlib.suppress(MeterFailed):  # the result stands; this number is for whoever reads it
            after = await self.measured(_LAST_LOOK_SECONDS)
        return Outcome(result, message, self._clock() - started, dict(self._before), after)

    async def _unless_gone(self, result: Result, error: RelaxError) -> tuple[Result, str]:
        """A call fails a moment before the exit of a dying engine is seen, so look once more."""
        engine = self._engine
        if engine.running and result is not Result.NOT_DRAINED:
            await engine.wait_exit(_LAST_WORDS_SECONDS)
        if engine.running:
            return result, error.message
        return Result.ENGINE_GONE, f"{engine.worker.worker_id}: the engine ended ({error.message})"

    async def _offload(self, deadline: float, drain_seconds: float) -> tuple[Result, str]:
        engine = self._engine
        if not engine.worker.is_head:
            return await self._follow_release(deadline)
        self._open = False
        await self._guard.close(min(drain_seconds, max(self._left(deadline), 0.0)))
        released = all(state is TagState.RELEASED for state in engine.tags.values())
        if released and self._confirmed:
            return Result.ALREADY_RELEASED, "the engine was asleep already"
        self._alive()
        if not released:
            self._confirmed = False
            await self._quieten(deadline)
            self._before = await self.measured(max(self._left(deadline), _LAST_LOOK_SECONDS))
            await engine.release(timeout_seconds=self._left(deadline))
        await self._until_free(deadline)
        self._confirmed = True
        return Result.RELEASED, "released and measured" if self._before else "released; no GPU to measure"

    async def _quiet(self, deadline: float, drain_seconds: float) -> tuple[Result, str]:
        self._alive()
        missing = sorted(ALL_TAGS - self._engine.resident)
        if missing:
            worker = self._engine.worker.worker_id
            raise _Stop(Result.REFUSED, f"{worker}: {', '.join(missing)} is not resident; onload it first")
        self._open = False
        await self._guard.close(min(drain_seconds, max(self._left(deadline), 0.0)))
        await self._quieten(deadline)
        return Result.QUIET, "paused and empty"

    async def _wake(self, deadline: float) -> tuple[Result, str]:
        self._alive()
        await self._engine.continue_(self._left(deadline))
        self._guard.open(backend_drained=True)
        return Result.READY, "generates again"

    async def _follow_release(self, deadline: float) -> tuple[Result, str]:
        """A follower has no admin HTTP: the head's call reaches it inside the engine, and its cards are the proof."""
        if self._confirmed:
            return Result.ALREADY_RELEASED, "the engine was asleep already"
        self._alive()
        self._before = dict(self._loaded)
        await self._until_free(deadline)
        self._engine.followed(TagState.RELEASED)
        self._confirmed = True
        return Result.RELEASED, "measured after the head's release" if self._before else "no GPU to measure"

    async def _quieten(self, deadline: float) -> None:
        """Pause, and abort until a flush proves that nothing is left."""
        engine = self._engine
        if not engine.paused:
            await engine.pause(PauseMode.ABORT, self._left(deadline))
        pause = _STEP_SECONDS[0]
        while True:
            what = "requests are still in the engine"
            try:
                await engine.abort_all(self._left(deadline))
                if await engine.flush(self._left(deadline)):
                    return
            except UpstreamFailed as error:
                # Both calls may be repeated, so a connection that broke once decides nothing.
                what = error.message
            pause = await self._wait(pause, deadline, Result.NOT_DRAINED, what)

    async def _until_free(self, deadline: float) -> None:
        if not self._before:
            return
        pause = _STEP_SECONDS[0]
        while True:
            used_now = await self.measured(max(self._left(deadline), _LAST_LOOK_SECONDS))
            held = [gpu for gpu, used in used_now.items() if not self._is_free(gpu, used)]
            if not held:
                return
            what = f"GPU {', '.join(map(str, held))} still holds the engine's memory"
            pause = await self._wait(pause, deadline, Result.MEMORY_HELD, what)

    def _is_free(self, gpu: int, used: int) -> bool:
        before = self._before.get(gpu, 0)
        own = self._own.get(gpu) or before
        return before - used >= own * self._freed_fraction

    async def _onload(
        self, deadline: float, tags: frozenset[Tag], restore: WeightRestore, weights: Weights | None
    ) -> tuple[Result, str]:
        engine = self._engine
        self._alive()
        if not engine.worker.is_head:
            # The head's resume returns only when every worker has its memory again.
            self._confirmed = False
            engine.followed(TagState.RESIDENT)
            return Result.READY, "follows its head"
        if self._open and engine.resident == ALL_TAGS and engine.weights_valid:
            return Result.ALREADY_READY, "the engine was ready already"
        self._confirmed = False
        await engine.resume(tags, self._left(deadline))
        if engine.resident != ALL_TAGS:
            return Result.PARTIAL, f"resident: {', '.join(sorted(engine.resident))}"
        if weights is not None:
            await self._bring(weights, deadline)
        elif not engine.weights_valid:
            if restore is not WeightRestore.DISK:
                return Result.WEIGHTS_PENDING, "memory is resident, the weights have to be sent"
            await engine.reload_weights(self._left(deadline))
        await self._quieten(deadline)
        await engine.continue_(self._left(deadline))
        self._guard.open(backend_drained=True)
        self._open = True
        return Result.READY, "memory resident, weights valid, admission open"

    async def _bring(self, weights: Weights, deadline: float) -> None:
        """Have these weights in the engine: proven by what it says itself."""
        engine = self._engine
        if engine.weights_valid and await engine.weight_version(self._left(deadline)) == weights.version:
            return
        engine.weights_valid = False
        body = {"model_path": weights.path, "weight_version": weights.version, "flush_cache": True}
        await engine.change_weights(Transport.DISK, body, self._left(deadline))
        said = await engine.weight_version(self._left(deadline))
        if said != weights.version:
            engine.weights_valid = False
            raise _Stop(Result.DOUBTFUL, f"{engine.worker.worker_id} says version {said!r}, wanted {weights.version!r}")

    # ---- small things ------------------------------------------------------------------------------------------

    def _left(self, deadline: float) -> float:
        return deadline - self._clock()

    def _alive(self) -> None:
        if not self._engine.running:
            raise _Stop(Result.ENGINE_GONE, f"{self._engine.worker.worker_id}: the engine's process is not running")

    async def _wait(self, pause: float, deadline: float, late: Result, what: str) -> float:
        """Wait for the next look, less when the engine ends; the pause after that one."""
        left = self._left(deadline)
        if left <= 0:
            raise _Stop(late, f"{self._engine.worker.worker_id}: {what} at the deadline; try again or stop the engine")
        await self._engine.wait_exit(min(pause, left))
        self._alive()
        return min(pause * 2, _STEP_SECONDS[1])
