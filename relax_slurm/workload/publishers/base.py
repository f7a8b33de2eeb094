"""The one interface of publishers. A partition is written whole, and nobody reads it before its batch is committed."""

from __future__ import annotations

from typing import Protocol

from relax_slurm.workload.training_batch import TrainingBatch

PREFIX = "train_"


def partition_name(batch: int) -> str:
    """Partition of a batch."""
    return f"{PREFIX}{batch}"


class Publisher(Protocol):
    """Writes partitions."""

    async def publish(self, partition: str, batch: TrainingBatch) -> None:
        """Write all of a batch. It is complete when this returns; PublishFailed or another error otherwise."""

    async def clear(self, partition: str) -> None:
        """Take a partition away, whatever is there of it; nothing to do when there is none."""
