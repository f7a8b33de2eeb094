"""What workload tests play with: a coordinator that knows the order of things, engines that answer, samples."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from relax_slurm.core.plan import Role
from relax_slurm.errors import DeadlineExceeded, RecoveryRequired, RelaxError
from relax_slurm.workload.samples import Group, Sample, SampleStatus


class Refused(RelaxError):
    """The fake coordinator's word for an illegal order."""


class Failed(RelaxError):
    """The fake coordinator's word to whoever waits for a batch that failed."""


class FakeLifecycle:
    """A coordinator with one card that all roles share. Illegal orders are refused, `broken` calls fail once."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state: dict[int, str] = {}
        self.errors: dict[int, str] = {}
        self.awake: set[str] = set()
        self.blocked: set[str] = set()
        self.offloaded = False
        self.student = False
        self.broken: dict[str, BaseException] = {}
        self.before: Callable[[str], Any] = lambda call: None
        self._changed = asyncio.Event()
        self._moving: dict[str, asyncio.Task[None]] = {}

    async def _move(self, holder: str, work: Coroutine[Any, Any, None]) -> None:
        """An operation goes on when who asked for it has left, and meanwhile no other one of its holder is taken."""
        running = self._moving.get(holder)
        if running is not None and not running.done():
            work.close()
            raise Refused(f"an operation of {holder} is under way")
        self._moving[holder] = task = asyncio.ensure_future(work)
        await asyncio.shield(task)

    async def _call(self, name: str) -> None:
        self.calls.append(name)
        waited = self.before(name)
        if waited is not None:
            await waited
        await asyncio.sleep(0)
        error = self.broken.pop(name, None)
        if error is not None:
            raise error

    def _current(self, batch: int) -> None:
        if self.state.get(batch) != "PENDING":
            raise Refused(f"batch {batch} is {self.state.get(batch)}, wanted PENDING")

    async def begin_batch(self, batch: int) -> None:
        await self._move("rollout", self._begin_batch(batch))

    async def _begin_batch(self, batch: int) -> None:
        await self._call("begin")
        if self.awake or self.blocked or "PENDING" in self.state.values() or "FAILED" in self.state.values():
            raise Refused(f"begin {batch}: awake {self.awake}, blocked {self.blocked}, batches {self.state}")
        self.state[batch] = "PENDING"
        self.awake.add("rollout")

    async def offload_rollout(self, batch: int) -> None:
        await self._move("rollout", self._offload_rollout(batch))

    async def _offload_rollout(self, batch: int) -> None:
        try:
            await self._call("offload")
        except RelaxError:
            self.blocked.add("rollout")
            raise
        self.offloaded = True

    async def onload_rollout(self, batch: int) -> None:
        await self._move("rollout", self._onload_rollout(batch))

    async def _onload_rollout(self, batch: int) -> None:
        if not self.student:
            raise Refused("onload without begin_student_scoring")
        await self._call("onload")
        self.offloaded = False

    async def acknowledge_rollout_offloaded(self, batch: int) -> None:
        await self._move("rollout", self._acknowledge_rollout_offloaded(batch))

    async def _acknowledge_rollout_offloaded(self, batch: int) -> None:
        await self._call("acknowledge")
        if not self.offloaded:
            raise Refused("acknowledged while on the card")
        self.awake.discard("rollout")

    async def activate(self, role: Role, batch: int) -> None:
        await self._move(str(role), self._activate(role, batch))

    async def _activate(self, role: Role, batch: int) -> None:
        self._current(batch)
        if self.awake or self.blocked:
            raise Refused(f"activate {role}: awake {self.awake}, blocked {self.blocked}")
        self.awake.add(str(role))
        try:
            await self._call(f"activate {role}")
        except RelaxError:
            self.blocked.add(str(role))
            raise

    async def deactivate(self, role: Role, batch: int) -> None:
        await self._move(str(role), self._deactivate(role, batch))

    async def _deactivate(self, role: Role, batch: int) -> None:
        if str(role) in self.blocked:
            raise RecoveryRequired(f"{role} is BLOCKED")
        try:
            await self._call(f"deactivate {role}")
        except RelaxError:
            self.blocked.add(str(role))
            raise
        self.awake.discard(str(role))

    async def begin_student_scoring(self, batch: int) -> None:
        await self._move("rollout", self._begin_student_scoring(batch))

    async def _begin_student_scoring(self, batch: int) -> None:
        self._current(batch)
        await self._call("begin student")
        if self.awake or self.blocked:
            raise Refused(f"student: awake {self.awake}")
        self.student = True
        self.offloaded = False
        self.awake.add("rollout")

    async def commit_batch(self, batch: int) -> None:
        await self._call("commit")
        self._current(batch)
        if self.awake or self.blocked:
            raise Refused(f"commit: awake {self.awake}, blocked {self.blocked}")
        self._end(batch, "COMMITTED")

    async def fail_batch(self, batch: int, error: str) -> None:
        await self._call("fail")
        self._current(batch)
        self.errors[batch] = error
        self._end(batch, "FAILED")

    async def wait_committed(self, batch: int, timeout_seconds: float) -> None:
        try:
            async with asyncio.timeout(timeout_seconds):
                while self.state.get(batch) not in ("COMMITTED", "FAILED"):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"batch {batch} is not committed") from None
        if self.state[batch] == "FAILED":
            raise Failed(self.errors[batch])

    async def get_state(self) -> dict[str, Any]:
        last = max(self.state, default=None)
        return {"batch": {"id": last, "state": None if last is None else self.state[last]}}

    @asynccontextmanager
    async def training(self, batch: int) -> AsyncIterator[None]:
        await self._call("train")
        yield
        await self._call("trained")

    def _end(self, batch: int, state: str) -> None:
        self.student = False
        self.state[batch] = state
        self._changed.set()


def sample(group: int = 0, index: int = 0, length: int = 3, **changes: Any) -> Sample:
    """A finished sample with a prompt of four tokens; `length` is R."""
    fields: dict[str, Any] = {
        "prompt": "What is 17 + 25?",
        "tokens": [10, 11, 12, 13, *range(20, 20 + length)],
        "response": "42",
        "response_length": length,
        "label": "42",
        "status": SampleStatus.COMPLETED,
        "rollout_log_probs": [-0.5] * length,
        "weight_versions": ["7"],
    }
    return Sample(group, index, **{**fields, **changes})


def groups(count: int = 2, size: int = 2) -> list[Group]:
    """Groups of finished samples, of different lengths."""
    return [[sample(g, g * size + i, length=1 + (g + i) % 3) for i in range(size)] for g in range(count)]


class FixedReward:
    """Scores by a function of the sample."""

    def __init__(self, value: Callable[[Sample], float | None] = lambda sample: 1.0) -> None:
        self.value = value
        self.seen: list[Sample] = []

    async def score(self, samples: Any) -> None:
        for each in samples:
            self.seen.append(each)
            each.reward = self.value(each)

    async def close(self) -> None:
        """Nothing is open."""


class FixedTeacher:
    """Log-probs without an engine."""

    def __init__(self, change: Callable[[Sample], None] = lambda sample: None) -> None:
        self.change = change

    async def score(self, samples: Any) -> None:
        for each in samples:
            each.teacher_log_probs = [-0.25] * each.response_length if each.scored else []
            self.change(each)


class MemoryPublisher:
    """Keeps partitions; `broken` fails after a part of one is there."""

    def __init__(self, broken: Exception | None = None) -> None:
        self.partitions: dict[str, Any] = {}
        self.cleared: list[str] = []
        self.broken = broken

    async def publish(self, partition: str, batch: Any) -> None:
        self.partitions[partition] = batch
        if self.broken is not None:
            raise self.broken

    async def clear(self, partition: str) -> None:
        self.cleared.append(partition)
        self.partitions.pop(partition, None)
