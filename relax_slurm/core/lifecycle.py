"""The lifecycle coordinator's rules: who gets which GPUs when, and which batch training may have.

One writer calls `ask`, `settle` and `tick`; nothing here waits, sends or reads a clock. A request either is done at
once or starts one `Work` (moving a holder's engines), whose end comes back through `settle`. An end that comes after
its deadline changes nothing: only `recover`, with evidence, does.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.core.batch import Batch, BatchEvent, BatchState
from relax_slurm.core.lease import TRAINING, Holder, Lease, LeaseEvent, LeaseState, Sharing
from relax_slurm.core.lifecycle_errors import (
    BatchFailed,
    BatchPending,
    MoveFailed,
    MoveTimedOut,
    NoSuchBatch,
    NoSuchHolder,
    NotRecovered,
    NotSleeping,
    OperationUnderWay,
    OutOfOrder,
    ReleaseUnconfirmed,
)
from relax_slurm.core.operations import Ask, Method, Operation, Operations, Progress
from relax_slurm.core.plan import Role
from relax_slurm.errors import RelaxError

OPERATION_SECONDS = 180.0
"""How long an onload or offload may take before its GPUs are in doubt."""
MAX_COMMITTED = 1_024
"""Committed batches that are remembered."""

MAX_TRAINERS = 4_096
"""Processes that may be inside training's lease at a time."""

ROLLOUT = str(Role.ROLLOUT)
Unproven = Mapping[str, Sequence[str]]
"""Holder to its replicas whose release is not proven now."""


class Move(StrEnum):
    """Which way a holder's engines go."""

    ONLOAD = "onload"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Work:
    """Move all engines of a holder; answer with `settle(operation)`."""

    operation: str
    holder: str
    move: Move


@dataclass(frozen=True, slots=True)
class Verdict:
    """What training may know of a batch."""

    state: BatchState
    error: str = ""


class Lifecycle:
    """Leases, the pending batch and the operations of a run."""

    def __init__(self, sharing: Sharing, *, operation_seconds: float = OPERATION_SECONDS) -> None:
        self.sharing = sharing
        self.leases = {holder.name: Lease(holder.name, _first(holder)) for holder in sharing.holders}
        self.current: Batch | None = None
        self.trainers: dict[str, None] = {}
        """Processes that are inside training's lease, in the order in which they came."""
        self.failure = ""
        """Why no batch may begin; empty while all is well."""
        self._seconds = operation_seconds
        self._operations = Operations()
        self._committed: OrderedDict[int, None] = OrderedDict()
        self._rules: Mapping[Method, Callable[[Ask, Unproven], Move | Operation | None]] = {
            Method.BEGIN_BATCH: self._begin_batch,
            Method.OFFLOAD_ROLLOUT: self._offload_rollout,
            Method.ONLOAD_ROLLOUT: self._onload_rollout,
            Method.ACKNOWLEDGE_ROLLOUT_OFFLOADED: self._acknowledge,
            Method.BEGIN_STUDENT_SCORING: self._begin_student_scoring,
            Method.ACTIVATE: self._activate,
            Method.DEACTIVATE: self._deactivate,
            Method.COMMIT_BATCH: self._commit_batch,
            Method.FAIL_BATCH: self._fail_batch,
            Method.RECOVER: self._recover,
        }

    # --- what others ask ------------------------------------------------------------------------------------

    def ask(self, ask: Ask, now: float, unproven: Unproven | None = None) -> tuple[Operation, Work | None]:
        """Take one request: its operation, and the work that it starts. A refusal raises and changes nothing.

        `unproven` is the evidence of this moment. A repeated request gets the operation that it repeats.
        """
        known = self._operations.find(ask)
        if known is not None:
            return known, None
        answer = self._rules[ask.method](ask, unproven or {})
        if isinstance(answer, Operation):
            self._operations.add(ask, answer)
            return answer, None
        operation = Operation(ask)
        self._operations.add(ask, operation)
        if answer is None:
            return operation, None
        operation.progress, operation.deadline = Progress.RUNNING, now + self._seconds
        return operation, Work(ask.operation, ask.holder or ROLLOUT, answer)

    def settle(self, operation_id: str, failure: str = "") -> bool:
        """The work of an operation has ended, well unless `failure` says why not. False when it comes too late."""
        operation = self._operations.get(operation_id)
        if operation is None or operation.progress is not Progress.RUNNING:
            return False
        if failure:
            self._give_up(operation, MoveFailed(f"{operation.ask} failed: {failure}"))
            return True
        operation.progress = Progress.DONE
        method, lease = operation.ask.method, self.leases[operation.ask.holder or ROLLOUT]
        if method is Method.ACTIVATE:
            lease.apply(LeaseEvent.ONLOADED)
        elif method is Method.DEACTIVATE:
            lease.apply(LeaseEvent.OFFLOADED)
        return True

    def tick(self, now: float) -> list[Operation]:
        """Give up what is past its deadline; answers those operations."""
        late = [operation for operation in self._operations.running() if operation.deadline <= now]
        for operation in late:
            error = MoveTimedOut(
                f"{operation.ask} did not end within {self._seconds:g} s; its GPUs stay fenced until"
                " `recover` finds evidence of release"
            )
            self._give_up(operation, error)
        return late

    def verdict(self, number: int) -> Verdict:
        """What training may know of a batch now. A failed run commits nothing more."""
        if number in self._committed:
            return Verdict(BatchState.COMMITTED)
        return Verdict(BatchState.FAILED, self.failure) if self.failure else Verdict(BatchState.PENDING)

    def end(self, reason: str) -> None:
        """The run is over: nothing begins and nothing is committed any more."""
        if self.current is not None and self.current.state is BatchState.PENDING:
            self._fail(self.current, reason)
        self.failure = self.failure or reason

    @property
    def shown_batch(self) -> str:
        """Number and state, as events name the batch; `none` before the first and after a recovery."""
        batch = self.current
        if batch is None or (batch.state is BatchState.FAILED and not self.failure):
            return "none"
        return f"{batch.number} {batch.state}"

    @property
    def next_deadline(self) -> float | None:
        """When `tick` is due; None while nothing is under way."""
        return min((operation.deadline for operation in self._operations.running()), default=None)

    @property
    def moving(self) -> frozenset[str]:
        """Holders whose engines are being moved."""
        return frozenset(operation.ask.holder or ROLLOUT for operation in self._operations.running())

    def may_run(self, holder: str) -> bool:
        """Whether engines of the holder may be on their GPUs (or be started again there)."""
        return self.leases[holder].state in (LeaseState.ACTIVE, LeaseState.ONLOADING)

    # --- batches --------------------------------------------------------------------------------------------

    def _begin_batch(self, ask: Ask, unproven: Unproven) -> Move | Operation | None:
        number = _number(ask)
        if number in self._committed:
            return None
        if self.current is not None and self.current.number == number and self.current.state is BatchState.PENDING:
            if self.current.producer != ask.member:
                raise BatchPending(f"batch {number} is being made by somebody else; wait for it")
            return self._repeated(ask)
        if self.failure:
            raise BatchFailed(f"batch {number} cannot begin: {self.failure}; `recover` comes first")
        if self.current is not None and self.current.state is BatchState.PENDING:
            raise BatchPending(f"batch {number} cannot begin while batch {self.current.number} is pending")
        awake = [holder.name for holder in self.sharing.holders if holder.deferred and not self._sleeps(holder.name)]
        self._want_sleeping(f"batch {number} cannot begin", awake)
        lease = self.leases.get(ROLLOUT)
        if lease is not None and lease.state is not LeaseState.ACTIVE:
            self._want_free(ROLLOUT, f"batch {number} cannot begin", unproven)
        self._operations.retire()
        self.current = Batch(number, producer=ask.member)
        if lease is None or lease.state is LeaseState.ACTIVE:
            return None
        lease.apply(LeaseEvent.GRANT)
        return Move.ONLOAD

    def _commit_batch(self, ask: Ask, _: Unproven) -> None:
        number = _number(ask)
        if number in self._committed:
            return
        batch = self._pending(number)
        awake = [holder.name for holder in self.sharing.holders if holder.deferred and not self._sleeps(holder.name)]
        self._want_sleeping(f"batch {number} cannot be committed", awake)
        batch.apply(BatchEvent.COMMIT)
        self._committed[number] = None
        if len(self._committed) > MAX_COMMITTED:
            self._committed.popitem(last=False)

    def _fail_batch(self, ask: Ask, _: Unproven) -> None:
        batch = self._open(_number(ask))
        self._fail(batch, ask.error or "no reason given")

    def _recover(self, _: Ask, unproven: Unproven) -> None:
        if self.current is not None and self.current.state is BatchState.PENDING:
            raise OutOfOrder(f"batch {self.current.number} is pending; there is nothing to recover from")
        moving = self.moving
        missing: list[str] = []
        for holder in self.sharing.holders:
            lease = self.leases[holder.name]
            if lease.state is LeaseState.SLEEPING or (lease.state is LeaseState.ACTIVE and not holder.deferred):
                if holder.name == TRAINING and lease.state is LeaseState.ACTIVE:
                    missing.append(f"training has its lease ({self._inside()}); it ends with deactivate")
                continue
            if holder.name in moving:
                missing.append(f"{holder.name} is being moved")
            elif proofs := tuple(unproven.get(holder.name, ())):
                missing.append(f"{holder.name} is {lease.state}, no release is proven of {', '.join(proofs[:8])}")
            else:
                lease.apply(LeaseEvent.RECOVER)
        if missing:
            raise NotRecovered(f"not every GPU is known to be free: {'; '.join(missing)}")
        self.failure = ""

    # --- rollout, which moves by its own word -----------------------------------------------------------------

    def _offload_rollout(self, ask: Ask, _: Unproven) -> Move | Operation | None:
        self._open(_number(ask))
        lease = self._lease(ROLLOUT)
        if lease.state is LeaseState.SLEEPING or not self.sharing[ROLLOUT].deferred:
            return None
        if (same := self._same_work(ask)) is not None:
            return same
        return Move.OFFLOAD

    def _onload_rollout(self, ask: Ask, _: Unproven) -> Move | Operation | None:
        batch = self._pending(_number(ask))
        lease = self._lease(ROLLOUT)
        if not self.sharing[ROLLOUT].deferred:
            return None
        if lease.state is not LeaseState.ACTIVE or not batch.student_scoring:
            raise OutOfOrder(
                f"onload_rollout of batch {batch.number}: the lease of rollout is {lease.state}; it comes after"
                " begin_student_scoring"
            )
        if (same := self._same_work(ask)) is not None:
            return same
        batch.rollout_released = False
        return Move.ONLOAD

    def _acknowledge(self, ask: Ask, unproven: Unproven) -> None:
        batch = self._open(_number(ask))
        lease = self._lease(ROLLOUT)
        if lease.state is LeaseState.SLEEPING or not self.sharing[ROLLOUT].deferred:
            batch.rollout_released = True
            return
        if ROLLOUT in self.moving:
            raise OperationUnderWay(f"rollout is being moved; batch {batch.number} cannot acknowledge its release yet")
        if proofs := tuple(unproven.get(ROLLOUT, ())):
            raise ReleaseUnconfirmed(
                f"rollout of batch {batch.number}: release unconfirmed of {', '.join(proofs[:8])}; its lease stays"
            )
        lease.apply(LeaseEvent.RELEASE)
        batch.rollout_released = True

    def _begin_student_scoring(self, ask: Ask, unproven: Unproven) -> None:
        batch = self._pending(_number(ask))
        lease = self._lease(ROLLOUT)
        if batch.student_scoring and lease.state is LeaseState.ACTIVE:
            return
        if batch.student_scoring or not batch.rollout_released:
            seen = "was done already" if batch.student_scoring else "comes after rollout's release is acknowledged"
            raise OutOfOrder(f"student scoring of batch {batch.number} {seen}")
        if lease.state is not LeaseState.ACTIVE:
            self._want_free(ROLLOUT, f"student scoring of batch {batch.number} cannot begin", unproven)
            lease.apply(LeaseEvent.GRANT)
        batch.student_scoring, batch.rollout_released = True, False

    # --- roles and training ------------------------------------------------------------------------------------

    def _activate(self, ask: Ask, unproven: Unproven) -> Move | Operation | None:
        lease = self._lease(ask.holder)
        holder = self.sharing[lease.holder]
        if lease.state is LeaseState.ACTIVE and not holder.deferred and holder.name != TRAINING:
            return None
        if self.failure:
            raise BatchFailed(f"{ask} is refused: {self.failure}; `recover` comes first")
        if holder.name == TRAINING:
            if self.verdict(_number(ask)).state is not BatchState.COMMITTED:
                raise NoSuchBatch(f"{ask} is refused: batch {ask.batch} is not committed; wait_committed comes first")
        elif holder.deferred:
            self._pending(_number(ask))
            if holder.name == ROLLOUT:
                raise OutOfOrder(f"{ask} is refused: rollout gets its GPUs with begin_batch or begin_student_scoring")
        if (same := self._same_work(ask)) is not None:
            return same
        if lease.state is not LeaseState.ACTIVE:
            self._want_free(holder.name, f"{ask} is refused", unproven)
        if holder.name == TRAINING:
            self._train(lease, ask.member or "")
            return None
        if lease.state is LeaseState.ACTIVE:
            return None
        lease.apply(LeaseEvent.ACTIVATE)
        return Move.ONLOAD

    def _deactivate(self, ask: Ask, _: Unproven) -> Move | Operation | None:
        lease = self._lease(ask.holder)
        holder = self.sharing[lease.holder]
        if holder.name == TRAINING:
            self._leave(lease, ask.member)
            return None
        pending = self.current is not None and self.current.state is BatchState.PENDING
        if holder.deferred:
            self._open(_number(ask))
            if holder.name == ROLLOUT:
                raise OutOfOrder(f"{ask} is refused: rollout leaves with offload_rollout and acknowledges it")
        elif pending or not self.sharing.rivals(holder.name):
            return None  # its GPUs are its own, at least until training wants them
        if lease.state is LeaseState.SLEEPING:
            return None
        if (same := self._same_work(ask)) is not None:
            return same
        if lease.state is not LeaseState.ACTIVE:
            raise NotSleeping(f"{ask} is refused: its lease is {lease.state} ({lease.reason})")
        lease.apply(LeaseEvent.DEACTIVATE)
        return Move.OFFLOAD

    def _train(self, lease: Lease, member: str) -> None:
        """One more process is inside training's lease."""
        if member not in self.trainers and len(self.trainers) >= MAX_TRAINERS:
            raise OutOfOrder(f"{len(self.trainers)} processes train already, which is as many as are kept")
        if lease.state is not LeaseState.ACTIVE:
            lease.apply(LeaseEvent.GRANT)
        self.trainers[member] = None

    def _inside(self) -> str:
        return ", ".join(name or "one process" for name in list(self.trainers)[:8])

    def _leave(self, lease: Lease, member: str | None) -> None:
        """A process has left, or all have; the lease ends with the last."""
        if member is None:
            self.trainers.clear()
        else:
            self.trainers.pop(member, None)
        if not self.trainers and lease.state is LeaseState.ACTIVE:
            lease.apply(LeaseEvent.RELEASE)

    # --- small things ------------------------------------------------------------------------------------------

    def _lease(self, holder: str | None) -> Lease:
        lease = self.leases.get(holder or "")
        if lease is None:
            raise NoSuchHolder(f"there is no holder {holder!r} in this run; there are {', '.join(self.leases)}")
        return lease

    def _sleeps(self, holder: str) -> bool:
        return self.leases[holder].state is LeaseState.SLEEPING

    def _want_free(self, holder: str, what: str, unproven: Unproven) -> None:
        """Whoever shares a GPU with the holder must sleep, by the book and by the evidence."""
        own = self.leases[holder]
        if own.state is not LeaseState.SLEEPING:
            raise NotSleeping(f"{what}: the lease of {holder} is {own.state}{f' ({own.reason})' if own.reason else ''}")
        rivals = self.sharing.rivals(holder)
        self._want_sleeping(what, [rival for rival in rivals if not self._sleeps(rival)])
        held = {rival: tuple(unproven.get(rival, ())) for rival in rivals if unproven.get(rival)}
        if held:
            raise NotSleeping(
                f"{what}: no release is proven of {', '.join(name for of in held.values() for name in of)}"
            )

    def _want_sleeping(self, what: str, awake: Sequence[str]) -> None:
        if awake:
            seen = ", ".join(f"{name} is {self.leases[name].state}" for name in awake)
            raise NotSleeping(f"{what}: {seen}, wanted SLEEPING")

    def _pending(self, number: int) -> Batch:
        batch = self._open(number)
        if batch.state is BatchState.FAILED:
            raise BatchFailed(_failed(number, batch.error))
        return batch

    def _open(self, number: int) -> Batch:
        """The batch, which may have failed; refuses any other."""
        if number in self._committed:
            raise OutOfOrder(f"batch {number} is committed; nothing of it can be changed")
        if self.current is None or self.current.number != number:
            seen = "none" if self.current is None else f"batch {self.current.number} ({self.current.state})"
            raise NoSuchBatch(f"batch {number} was not begun; the current one is {seen}")
        return self.current

    def _same_work(self, ask: Ask) -> Operation | None:
        """The work under way for the same end; refuses when the holder's engines are moved for another one."""
        for operation in self._operations.running():
            if (operation.ask.holder or ROLLOUT) == (ask.holder or ROLLOUT):
                if operation.ask.fingerprint == ask.fingerprint:
                    return operation
                raise OperationUnderWay(f"{ask} has to wait: {operation.ask} is under way")
        return None

    def _repeated(self, ask: Ask) -> Operation | None:
        """The operation under way with the same fingerprint, if there is one."""
        return next((each for each in self._operations.running() if each.ask.fingerprint == ask.fingerprint), None)

    def _give_up(self, operation: Operation, error: RelaxError) -> None:
        operation.progress, operation.error = Progress.FAILED, error
        if operation.ask.method in (Method.ACTIVATE, Method.DEACTIVATE):
            self.leases[operation.ask.holder or ROLLOUT].apply(LeaseEvent.DOUBT, error.message)
        if self.current is not None and self.current.state is not BatchState.COMMITTED:
            self._fail(self.current, error.message)
        self.failure = self.failure or error.message

    def _fail(self, batch: Batch, error: str) -> None:
        if batch.apply(BatchEvent.FAIL, error):
            self.failure = self.failure or _failed(batch.number, error)


def _first(holder: Holder) -> LeaseState:
    """After the start: who shares with other roles sleeps, who does not serves, and training has nothing."""
    return LeaseState.SLEEPING if holder.deferred or holder.name == TRAINING else LeaseState.ACTIVE


def _failed(number: int, error: str) -> str:
    """One sentence; who makes a batch says in its error already which one failed."""
    return error if error.startswith(f"batch {number} failed") else f"batch {number} failed: {error}"


def _number(ask: Ask) -> int:
    if ask.batch is None or ask.batch < 0:
        raise NoSuchBatch(f"{ask.method} needs a batch number from 0 on, got {ask.batch!r}")
    return ask.batch
