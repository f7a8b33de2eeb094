"""Operations of the lifecycle coordinator: who asked for what under which id, and how it ended.

The same id with the same fingerprint is the same operation and has one result, however often it is asked for. An id
that came for something else is refused, also long after its operation was forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.core.lifecycle_errors import OperationRetired, OperationReused
from relax_slurm.errors import RelaxError

MAX_OPERATIONS = 4_096
"""Operations that are kept at a time: of the current batch, and those under way. Beyond, the oldest are retired."""
MAX_RETIRED = 8_192
"""Ids of earlier operations that are still recognised."""


class Method(StrEnum):
    """What can be asked of the lifecycle coordinator."""

    BEGIN_BATCH = "begin_batch"
    """Open a batch and give rollout its GPUs."""
    OFFLOAD_ROLLOUT = "offload_rollout"
    """Take rollout's engines off their GPUs; its lease stays until the release is acknowledged."""
    ONLOAD_ROLLOUT = "onload_rollout"
    """Bring rollout's engines back for student scoring."""
    ACKNOWLEDGE_ROLLOUT_OFFLOADED = "acknowledge_rollout_offloaded"
    """Give rollout's lease back, if its release is proven."""
    BEGIN_STUDENT_SCORING = "begin_student_scoring"
    """Give rollout its GPUs a second time."""
    ACTIVATE = "activate"
    """Give a holder its GPUs."""
    DEACTIVATE = "deactivate"
    """Take them back."""
    COMMIT_BATCH = "commit_batch"
    """Let training have the batch."""
    FAIL_BATCH = "fail_batch"
    """Say that the batch will never be complete."""
    RECOVER = "recover"
    """Look at the evidence after a failure and let the run go on where it suffices."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `error` says why a batch fails and is no part of the fingerprint."""

    operation: str
    method: Method
    batch: int | None = None
    holder: str | None = None
    error: str = ""
    member: str | None = None
    """Which process of a training job asks; None for a job that is one process, or to speak for all of them."""

    @property
    def fingerprint(self) -> tuple[int | None, Method, str | None, str | None]:
        """What the id stands for."""
        return self.batch, self.method, self.holder, self.member

    def __str__(self) -> str:
        holder = f" {self.holder}" if self.holder is not None else ""
        return f"{self.method}{holder}{f' of batch {self.batch}' if self.batch is not None else ''}"


class Progress(StrEnum):
    """How far an operation is."""

    RUNNING = "running"
    """Engines are being moved."""
    DONE = "done"
    """It did what it is for."""
    FAILED = "failed"
    """It did not, and never will."""


@dataclass(slots=True)
class Operation:
    """One operation, shared by everyone who asked for it."""

    ask: Ask
    deadline: float = 0.0
    """On the caller's clock; for a running one."""
    progress: Progress = Progress.DONE
    error: RelaxError | None = None

    @property
    def id(self) -> str:
        """The id it was first asked under."""
        return self.ask.operation


class Operations:
    """Ids and what became of them. Bounded."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Ask, Operation]] = {}
        self._retired: OrderedDict[str, None] = OrderedDict()

    def find(self, ask: Ask) -> Operation | None:
        """The operation that this request repeats; None for a new id. Refuses an id that is taken."""
        known = self._known.get(ask.operation)
        if known is not None:
            if known[0].fingerprint == ask.fingerprint:
                return known[1]
            raise OperationReused(
                f"operation id {ask.operation!r} was {known[0]}, now it is {ask}; use an id of its own"
            )
        if ask.operation in self._retired:
            raise OperationRetired(
                f"operation id {ask.operation!r} for {ask} belongs to an earlier batch; use a new id"
            )
        return None

    def add(self, ask: Ask, operation: Operation) -> None:
        """From now on the id stands for this operation, which may be one that somebody else asked for."""
        self._known[ask.operation] = (ask, operation)
        if len(self._known) > MAX_OPERATIONS:
            ended = (name for name, (_, each) in self._known.items() if each.progress is not Progress.RUNNING)
            self._retire(next(ended, None))

    def running(self) -> list[Operation]:
        """Operations under way, each once."""
        found = {id(each): each for _, each in self._known.values() if each.progress is Progress.RUNNING}
        return list(found.values())

    def retire(self) -> None:
        """Forget what has ended; its ids stay taken for a while."""
        for name in [name for name, (_, each) in self._known.items() if each.progress is not Progress.RUNNING]:
            self._retire(name)

    def _retire(self, name: str | None) -> None:
        if name is not None:
            del self._known[name]
            self._retired[name] = None
            if len(self._retired) > MAX_RETIRED:
                self._retired.popitem(last=False)

    def get(self, name: str) -> Operation | None:
        """The operation that an id stands for."""
        known = self._known.get(name)
        return None if known is None else known[1]

    def __len__(self) -> int:
        return len(self._known)
