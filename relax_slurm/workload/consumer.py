"""The training side: wait until a batch is committed, then read it. Any number of processes on any nodes may do so.

    async for batch in Consumer(lifecycle, root).batches(first=0, count=20):
        async with lifecycle.training(batch.number):
            step(batch)

Only `wait_committed` gives permission: a partition that is there may belong to a batch that is never committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from relax_slurm.workload.lifecycle import Lifecycle
from relax_slurm.workload.publishers.base import partition_name
from relax_slurm.workload.publishers.reader import read_partition
from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
from relax_slurm.workload.training_batch import TrainingBatch


class Consumer:
    """One reader of committed partitions."""

    def __init__(self, lifecycle: Lifecycle, root: Path, *, timeout_seconds: float = 7200.0) -> None:
        self._lifecycle = lifecycle
        self._root = root
        self._timeout_seconds = timeout_seconds

    async def read(self, number: int) -> TrainingBatch:
        """Wait for the batch, then read it: the coordinator's error, PartitionMissing or PartitionDamaged."""
        await self._lifecycle.wait_committed(number, self._timeout_seconds)
        return await asyncio.to_thread(read_partition, self._root, partition_name(number))

    async def batches(self, first: int = 0, count: int | None = None) -> AsyncIterator[TrainingBatch]:
        """Batch after batch from `first` on; without `count` until one fails."""
        number = first
        while count is None or number < first + count:
            yield await self.read(number)
            number += 1

    async def clear(self, number: int) -> None:
        """Take the partition away, when every reader is done with it."""
        await SharedFilesystem(self._root).clear(partition_name(number))
