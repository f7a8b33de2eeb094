"""One closed batch as the commit gate sees it: a literal table.

The finer stages of the data (generated, scoring, publishing) belong to the workload. Here only one question is
answered: may training have it?
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.errors import RelaxError


class BatchState(StrEnum):
    """What training may know of a batch."""

    PENDING = "PENDING"
    """It is being made."""
    COMMITTED = "COMMITTED"
    """Every score is in, it is published, and training may have it."""
    FAILED = "FAILED"
    """It will never be complete."""


class BatchEvent(StrEnum):
    """What can happen to a batch."""

    COMMIT = "commit"
    """It is published and every deferred role sleeps."""
    FAIL = "fail"
    """A stage of it, or a lease that it needs, failed."""


TABLE: Mapping[tuple[BatchState, BatchEvent], BatchState] = {
    (BatchState.PENDING, BatchEvent.COMMIT): BatchState.COMMITTED,
    (BatchState.PENDING, BatchEvent.FAIL): BatchState.FAILED,
    (BatchState.COMMITTED, BatchEvent.COMMIT): BatchState.COMMITTED,  # asked again
    (BatchState.FAILED, BatchEvent.FAIL): BatchState.FAILED,  # the first reason stays
}
"""Everything that may happen. What is not here raises `IllegalBatchEvent` and changes nothing."""


class IllegalBatchEvent(RelaxError):
    """An event that the table does not know in this state; nothing was changed."""

    code = "illegal_batch_event"


@dataclass(slots=True)
class Batch:
    """One batch. Change its state through `apply` only."""

    number: int
    state: BatchState = BatchState.PENDING
    error: str = ""
    """Why it failed."""
    producer: str | None = None
    """Who makes it; None when that was not said."""
    rollout_released: bool = False
    """Whether rollout has left its GPUs since it last had them."""
    student_scoring: bool = False
    """Whether rollout was given its GPUs a second time, to score."""

    def apply(self, event: BatchEvent, error: str = "") -> bool:
        """Take one event; answers whether the state changed."""
        after = TABLE.get((self.state, event))
        if after is None:
            raise IllegalBatchEvent(
                f"batch {self.number} is {self.state}{f' ({self.error})' if self.error else ''}, so it cannot {event}"
            )
        changed = after is not self.state
        self.state = after
        if changed:
            self.error = error
        return changed


def mermaid() -> str:
    """The table as a mermaid state diagram; repeated requests are left out."""
    changes = [(source, event, target) for (source, event), target in TABLE.items() if source is not target]
    edges = [f"    {source} --> {target}: {event}" for source, event, target in changes]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {BatchState.PENDING}", *edges])
