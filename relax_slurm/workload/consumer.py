"""The training side: wait until a batch is committed, then read it. Any number of processes on any nodes may do so.

    consumer = Consumer(lifecycle, root, "actor")
    async for batch in consumer.batches(first=0, count=20):
        async with lifecycle.training(batch.number):
            step(batch)
        await consumer.done(batch.number)

`done` is for producers that wait for their consumers (`batch.consumers`): the next batch then begins with the weights
that this one has made. Only `wait_committed` gives permission: a partition that is there may belong to a batch that is
never committed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from relax_slurm.workload.failures import NotConsumed
from relax_slurm.workload.lifecycle import Lifecycle
from relax_slurm.workload.publishers.base import partition_name
from relax_slurm.workload.publishers.reader import read_partition
from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
from relax_slurm.workload.training_batch import TrainingBatch

CONSUMED = "consumed"
"""Folder beside the partitions with an empty file per partition and consumer that is done with it."""
LOOK_SECONDS = 0.1
"""Pause between two looks for such a file: shared file systems tell nobody of changes."""


class Consumer:
    """One reader of committed partitions."""

    def __init__(
        self, lifecycle: Lifecycle, root: Path, name: str = "trainer", *, timeout_seconds: float = 7200.0
    ) -> None:
        self._lifecycle = lifecycle
        self._root = root
        self._name = name
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

    async def done(self, number: int) -> None:
        """Say that this consumer needs no more of the batch."""
        await asyncio.to_thread(_mark, _marker(self._root, number, self._name))

    async def clear(self, number: int) -> None:
        """Take the partition away, when every reader is done with it."""
        await SharedFilesystem(self._root).clear(partition_name(number))


async def wait_consumed(root: Path, number: int, names: Sequence[str], timeout_seconds: float) -> None:
    """Return when every named consumer is done with the batch; NotConsumed names those that are not in time."""
    deadline = time.monotonic() + timeout_seconds
    while missing := await asyncio.to_thread(_missing, root, number, names):
        if time.monotonic() > deadline:
            raise NotConsumed(
                f"batch {number} was not consumed by {', '.join(missing)} within {timeout_seconds:g} s; look at those "
                "processes, or change batch.consumers and batch.consume_seconds"
            )
        await asyncio.sleep(LOOK_SECONDS)


def _marker(root: Path, number: int, name: str) -> Path:
    return root / CONSUMED / f"{partition_name(number)}.{name}"


def _mark(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.touch(mode=0o600)


def _missing(root: Path, number: int, names: Sequence[str]) -> list[str]:
    return [name for name in names if not _marker(root, number, name).exists()]
