"""One closed batch: captured, scored on copies while roles take turns, validated, written back, published, committed.

Every role that was woken is put to sleep again, whatever happened meanwhile and even when the caller is cancelled; a
release that is not confirmed is never acknowledged, and the error says so. docs/batches.md has the table of failures.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from relax_slurm.core.plan import Role
from relax_slurm.errors import RelaxError
from relax_slurm.workload import stages
from relax_slurm.workload.collector import MAX_SAMPLES
from relax_slurm.workload.failures import BatchNotMade, NotReleased, PartitionExists, PublishFailed, StagingRefused
from relax_slurm.workload.lifecycle import Lifecycle, settled
from relax_slurm.workload.publishers.base import Publisher, partition_name
from relax_slurm.workload.samples import Group, Sample, samples_of, staged_copy
from relax_slurm.workload.stages import Stage, Step
from relax_slurm.workload.timing import Timing
from relax_slurm.workload.training_batch import TrainingBatch, convert
from relax_slurm.workload.validate import Expected, check_generated, write_back

TIMEOUT_SECONDS = 1800.0


class Scorer(Protocol):
    """Writes scores on copies."""

    async def score(self, samples: Sequence[Sample]) -> None:
        """Score all of them, or raise."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """The stages of a batch, in their order. None leaves one out."""

    reward: Scorer | None = None
    reward_role: Role | None = None
    """Role that the reward needs while it scores; None means it needs no GPU."""
    teacher: Scorer | None = None
    student: Scorer | None = None
    expected: Expected = field(default_factory=Expected)


Finalizer = Callable[[TrainingBatch, Sequence[Group]], Awaitable[None] | None]
"""Runs when the partition is written and before training may have it: metrics, a copy for debugging."""


class DeferredBatch:
    """One batch, once. `begin`, then `complete` with the groups, or `abandon` when there will be none."""

    def __init__(
        self,
        number: int,
        lifecycle: Lifecycle,
        scoring: Scoring,
        publisher: Publisher,
        *,
        finalizer: Finalizer | None = None,
        facts: dict[str, Any] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        max_samples: int = MAX_SAMPLES,
        timing: Timing | None = None,
        ready: Callable[[Role], Awaitable[None]] | None = None,
    ) -> None:
        self.number = number
        self.stage = Stage.GENERATED
        self.timing = timing or Timing(time.monotonic)
        self._lifecycle = lifecycle
        self._scoring = scoring
        self._publisher = publisher
        self._finalizer = finalizer
        self._facts = facts or {}
        self._timeout_seconds = timeout_seconds
        self._max_samples = max_samples
        self._ready = ready
        self._where = "begin"
        self._rollout_awake = False
        self._published = False
        self._unconfirmed = False
        self._confirmed = False
        self._notes: list[str] = []

    @property
    def partition(self) -> str:
        """Name of its partition."""
        return partition_name(self.number)

    async def begin(self) -> None:
        """Open the batch; rollout is READY afterwards. A refusal is raised as it is: nothing was begun."""
        with self._phase("begin"):
            await self._moved(self._lifecycle.begin_batch(self.number), begins=True)
            try:
                await self._seen(Role.ROLLOUT)
            except BaseException as error:  # rollout is awake by now, and ours
                await self.abandon(error)

    async def abandon(self, error: BaseException, where: str | None = None) -> NoReturn:
        """Generation failed: release rollout, tell the coordinator and raise. BatchNotMade or NotReleased."""
        self._where = where or self._where
        await self._fail(error)

    async def complete(self, groups: Sequence[Group]) -> TrainingBatch:
        """Everything after generation; the batch that training got. BatchNotMade says what failed and what stays."""
        self._take(Step.SCORE)
        try:
            async with asyncio.timeout(self._timeout_seconds):
                batch = await self._until_published(groups)
            with self._phase("commit"):
                _, error, cancelled = await settled(self._lifecycle.commit_batch(self.number))
            if error is not None:
                raise error
        except BaseException as error:  # the edge of the batch: whatever it is, GPUs are released and waiters told
            await self._fail(error)
        self._take(Step.COMMIT)
        if cancelled:
            raise asyncio.CancelledError
        return batch

    async def _until_published(self, groups: Sequence[Group]) -> TrainingBatch:
        originals = samples_of(groups)
        self._where = "capture"
        if len(originals) > self._max_samples or len({id(sample) for sample in originals}) != len(originals):
            raise StagingRefused(
                f"{len(originals)} samples, of which {len({id(sample) for sample in originals})} are different ones; "
                f"wanted up to {self._max_samples}, each once"
            )
        groups = sorted(groups, key=lambda group: group[0].index)
        originals = samples_of(groups)
        check_generated(originals)
        copies = [staged_copy(sample) for sample in originals]
        with self._phase("offload"):
            await self._release_rollout()
        await self._score(copies)
        with self._phase("validate"):
            write_back(originals, copies, self._scoring.expected)
        self._take(Step.WRITE_BACK)
        with self._phase("convert"):
            batch = convert(self.number, groups, self._facts)
        self._take(Step.PUBLISH)
        with self._phase("publish"):
            try:
                await self._publisher.publish(self.partition, batch)
            except BaseException as error:
                # A part of it may be there, unless all of it is somebody else's.
                self._published = not isinstance(error, PartitionExists)
                raise
            self._published = True
        if self._finalizer is not None:
            with self._phase("finalize"):
                outcome = self._finalizer(batch, groups)
                if inspect.isawaitable(outcome):
                    await outcome
        return batch

    async def _score(self, copies: Sequence[Sample]) -> None:
        scoring = self._scoring
        if scoring.reward is not None:
            name = "reward" if scoring.reward_role is None else str(scoring.reward_role)
            await self._in_turn(scoring.reward_role, scoring.reward, copies, name)
        if scoring.teacher is not None:
            await self._in_turn(Role.TEACHER, scoring.teacher, copies, "teacher")
        if scoring.student is not None:
            await self._as_student(scoring.student, copies)

    async def _in_turn(self, role: Role | None, scorer: Scorer, copies: Sequence[Sample], name: str) -> None:
        if role is None:
            with self._phase(name):
                await scorer.score(copies)
            return
        try:
            with self._phase(f"{name}_on"):
                await self._moved(self._lifecycle.activate(role, self.number))
                await self._seen(role)
            with self._phase(name):
                await scorer.score(copies)
        except BaseException:
            # Also when `activate` failed: it may have woken the role all the same.
            await self._quietly(self._lifecycle.deactivate(role, self.number), f"{role} is not released")
            raise
        with self._phase(f"{name}_off"):
            await self._released(self._lifecycle.deactivate(role, self.number))

    async def _as_student(self, scorer: Scorer, copies: Sequence[Sample]) -> None:
        with self._phase("student_on"):
            self._rollout_awake = True  # released by `_fail`, whatever happens from here on
            await self._moved(self._lifecycle.begin_student_scoring(self.number))
            await self._moved(self._lifecycle.onload_rollout(self.number))
            await self._seen(Role.ROLLOUT)
        with self._phase("student"):
            await scorer.score(copies)
        with self._phase("student_off"):
            await self._release_rollout()

    async def _seen(self, role: Role) -> None:
        """Wait until requests find the role."""
        if self._ready is not None:
            await self._ready(role)

    async def _release_rollout(self) -> None:
        """Offload, and acknowledge only what is confirmed. Tried once: an offload that failed leaves doubt."""
        self._rollout_awake = False
        await self._released(self._offload_and_acknowledge())

    async def _moved(self, work: Awaitable[None], *, begins: bool = False) -> None:
        """Wait for a role to come, cancelled or not: who is on the way cannot be sent back before it is there."""
        _, error, cancelled = await settled(work)
        if error is not None:
            raise error
        if begins:
            self._rollout_awake = True
        if cancelled and begins:
            await self.abandon(asyncio.CancelledError())
        if cancelled:
            raise asyncio.CancelledError

    async def _released(self, work: Awaitable[None]) -> None:
        """Wait for a role to go, whatever happens; one that does not leaves doubt."""
        _, error, cancelled = await settled(work)
        if error is not None:
            self._unconfirmed = True
            raise error
        if cancelled:
            raise asyncio.CancelledError

    async def _offload_and_acknowledge(self) -> None:
        await self._lifecycle.offload_rollout(self.number)
        await self._lifecycle.acknowledge_rollout_offloaded(self.number)

    async def _fail(self, error: BaseException) -> NoReturn:
        """Release, clear, tell; then raise what the caller shall see."""
        where = self._where
        if (self.stage, Step.FAIL) in stages.TABLE:
            self._take(Step.FAIL)
        if self._rollout_awake:
            self._rollout_awake = False
            await self._quietly(self._offload_and_acknowledge(), "rollout is not released")
            self._confirmed = not self._unconfirmed
        if self._published and where != "commit":
            await self._quietly(self._publisher.clear(self.partition), f"{self.partition} is not cleared", gpu=False)
        failure = self._failure(error, where)
        await self._quietly(
            self._lifecycle.fail_batch(self.number, failure.message), "the coordinator does not know of it", gpu=False
        )
        task = asyncio.current_task()
        if not isinstance(error, Exception):
            raise error  # cancelled, or the process is being ended
        if task is not None and task.cancelling():
            raise asyncio.CancelledError(failure.message) from error
        raise self._failure(error, where) from error

    def _failure(self, error: BaseException, where: str) -> BatchNotMade:
        reason = f"took longer than {self._timeout_seconds:g} s" if isinstance(error, TimeoutError) else _text(error)
        if self._unconfirmed:
            self._note("release unconfirmed")
        message = "; ".join([f"batch {self.number} failed at {where}: {reason}", *self._notes])
        detail = {"batch": self.number, "at": where, "cause": getattr(error, "code", type(error).__name__)}
        kind: type[BatchNotMade] = type(error) if isinstance(error, BatchNotMade) else BatchNotMade
        # A role that did not come is no doubt any more once its release is confirmed.
        doubtful = getattr(error, "exit_code", 0) == NotReleased.exit_code and not self._confirmed
        if self._unconfirmed or doubtful:
            kind = NotReleased
        elif where == "publish":
            kind = PublishFailed
        return kind(message, detail=detail)

    async def _quietly(self, work: Awaitable[None], otherwise: str, *, gpu: bool = True) -> None:
        """Clean-up whose own failure must not hide the first one: it is noted."""
        _, error, _ = await settled(work)
        if error is not None:
            self._note(f"{otherwise}: {_text(error)}")
            self._unconfirmed = self._unconfirmed or gpu

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _phase(self, name: str) -> Any:
        self._where = name
        return self.timing.phase(name)

    def _take(self, step: Step) -> None:
        self.stage = stages.after(self.stage, step, self.number)


def _text(error: BaseException) -> str:
    if isinstance(error, asyncio.CancelledError):
        return "it was cancelled"
    return error.message if isinstance(error, RelaxError) else f"{type(error).__name__}: {error}"
