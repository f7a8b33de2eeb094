"""Partitions in a TransferQueue (0.1.11), for trainers that read from one. Extra `transferqueue`; brings Ray and torch.

Rows of a TransferQueue can be read as soon as they are put, and it has no word for "this was the last one". So two
things stand between a row and a trainer: the commit gate, and a flag of our own, which is put after the last row and
taken away before the first. It is a key in the partition `relax_complete` whose tag says what the partition holds.

The queue is the one that `transfer_queue.init()` finds or makes in this process's Ray. Its sockets ask for no
password: whoever reaches them can read and write.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from relax_slurm.errors import ConfigError
from relax_slurm.workload.failures import PartitionDamaged, PartitionExists, PartitionMissing
from relax_slurm.workload.training_batch import Kind, TrainingBatch

FLAGS = "relax_complete"
"""Partition with a key per complete partition."""
_FLAT = frozenset({Kind.INT, Kind.FLOAT})
_WIDE = frozenset({Kind.INT_ROWS, Kind.FLOAT_ROWS})


def require_packages() -> None:
    """ConfigError when the extra is not installed."""
    missing = [name for name in ("transfer_queue", "torch", "tensordict") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"batch.publisher.kind: transferqueue needs {', '.join(missing)}, which is not installed; "
            "install relax-slurm[transferqueue] or use shared_fs"
        )


class TransferQueuePublisher:
    """Puts partitions. The package's own client keeps one event loop in a thread, so calls go through threads here."""

    def __init__(self) -> None:
        require_packages()
        self._ready = False

    async def publish(self, partition: str, batch: TrainingBatch) -> None:
        """Part of Publisher."""
        await asyncio.to_thread(self.put, partition, batch)

    async def clear(self, partition: str) -> None:
        """Part of Publisher."""
        await asyncio.to_thread(self.remove, partition)

    def put(self, partition: str, batch: TrainingBatch) -> None:
        """`publish`, blocking."""
        queue = self._queue()
        if partition in flags(queue):
            raise PartitionExists(
                f"TransferQueue partition {partition}: is complete already; clear it if nobody needs it"
            )
        keys = _keys(partition, batch.rows)
        if keys:
            queue.kv_batch_put(keys=keys, partition_id=partition, fields=to_tensors(batch))
        tag = {
            "rows": batch.rows,
            "batch": batch.number,
            "columns": json.dumps(dict(batch.kinds)),
            "widths": json.dumps(
                {name: _width(batch.columns[name]) for name in batch.kinds if batch.kinds[name] in _WIDE}
            ),
            "facts": json.dumps(dict(batch.facts)),
        }
        queue.kv_batch_put(keys=[partition], partition_id=FLAGS, tags=[tag])

    def remove(self, partition: str) -> None:
        """`clear`, blocking. The flag goes first."""
        queue = self._queue()
        if partition in flags(queue):
            queue.kv_clear(keys=[partition], partition_id=FLAGS)
        client = queue.get_client()
        if partition in client.get_partition_list():
            client.clear_partition(partition)

    def read(self, partition: str) -> TrainingBatch:
        """A complete partition as a batch. PartitionMissing when it is not complete; PartitionDamaged."""
        queue = self._queue()
        tag = flags(queue).get(partition)
        if tag is None:
            raise PartitionMissing(f"TransferQueue partition {partition}: is not complete, or was cleared")
        try:
            kinds = {name: Kind(kind) for name, kind in json.loads(tag["columns"]).items()}
            rows, widths = int(tag["rows"]), json.loads(tag["widths"])
            empty: dict[str, Any] = dict.fromkeys(kinds, ())
            data = queue.kv_batch_get(keys=_keys(partition, rows), partition_id=partition) if rows else empty
            columns = {name: from_tensor(kind, data[name], widths.get(name, 0)) for name, kind in kinds.items()}
            facts = json.loads(tag["facts"])
        except (KeyError, ValueError, TypeError) as error:
            raise PartitionDamaged(f"TransferQueue partition {partition}: {error}; make the batch again") from error
        if any(len(values) != rows for values in columns.values()):
            raise PartitionDamaged(f"TransferQueue partition {partition}: has other rows than {rows}; make it again")
        return TrainingBatch(int(tag["batch"]), kinds, columns, facts)

    def _queue(self) -> Any:
        import transfer_queue

        if not self._ready:
            transfer_queue.init()
            self._ready = True
        return transfer_queue


def flags(queue: Any) -> dict[str, dict[str, Any]]:
    """Complete partitions and what their flags say."""
    return dict(queue.kv_list(FLAGS).get(FLAGS, {}))


def to_tensors(batch: TrainingBatch) -> Any:
    """A TensorDict with one entry per row: [N, 1] for numbers, jagged for lists, text for everything else."""
    import torch
    from tensordict import NonTensorStack, TensorDict

    fields: dict[str, Any] = {}
    for name, kind in batch.kinds.items():
        values = batch.columns[name]
        if kind is Kind.JSON:
            fields[name] = NonTensorStack(*(json.dumps(value) for value in values))
            continue
        number = torch.int64 if kind in (Kind.INT, Kind.INTS, Kind.INT_ROWS) else torch.float64
        if kind in _FLAT:
            fields[name] = torch.tensor(values, dtype=number).unsqueeze(1)
            continue
        rows = [[value for entry in row for value in entry] if kind in _WIDE else row for row in values]
        fields[name] = torch.nested.nested_tensor(
            [torch.tensor(row, dtype=number) for row in rows], layout=torch.jagged
        )
    return TensorDict(fields, batch_size=[batch.rows])


def from_tensor(kind: Kind, values: Any, width: int) -> list[Any]:
    """The column of a TensorDict's entry."""
    if kind is Kind.JSON:
        listed = values.tolist() if hasattr(values, "tolist") else list(values)
        return [json.loads(value) for value in listed]
    rows = [row.reshape(-1).tolist() for row in (values.unbind(0) if hasattr(values, "unbind") else values)]
    if kind in _FLAT:
        return [row[0] for row in rows]
    if kind not in _WIDE:
        return rows
    return [[row[place : place + width] for place in range(0, len(row), width or 1)] for row in rows]


def _width(rows: Sequence[Sequence[Sequence[Any]]]) -> int:
    return next((len(row[0]) for row in rows if row), 0)


def _keys(partition: str, rows: int) -> list[str]:
    return [f"{partition}/{number}" for number in range(rows)]
