"""Captures the groups of one batch in this process's memory instead of passing them on."""

from __future__ import annotations

from relax_slurm.workload.failures import StagingRefused
from relax_slurm.workload.samples import Group

MAX_SAMPLES = 65_536
"""Most samples of one batch: they and their scores are held in memory at once."""


class DeferredTransferCollector:
    """Takes groups until it is sealed. A sample may be in it once."""

    def __init__(self, max_samples: int = MAX_SAMPLES) -> None:
        self._max_samples = max_samples
        self._groups: list[Group] = []
        self._seen: set[int] = set()
        self._sealed = False

    def __len__(self) -> int:
        """Samples so far."""
        return len(self._seen)

    def put(self, group: Group) -> None:
        """Capture one whole group. StagingRefused takes none of it."""
        if self._sealed:
            raise StagingRefused("a group came after the batch was sealed; a batch is closed once it is generated")
        if not group:
            raise StagingRefused("an empty group came; a group has at least one sample")
        ids = {id(sample) for sample in group}
        twice = ids & self._seen
        if twice or len(ids) != len(group):
            name = next((sample.index for sample in group if id(sample) in twice), group[0].index)
            raise StagingRefused(f"sample {name} of group {group[0].group_index} is there already; capture it once")
        if len(self._seen) + len(ids) > self._max_samples:
            raise StagingRefused(
                f"batch of more than {self._max_samples} samples: {len(self._seen)} are staged and {len(ids)} came; "
                "make smaller batches (batch.batch_size times batch.n_samples_per_prompt)"
            )
        self._seen |= ids
        self._groups.append(list(group))

    def seal(self) -> list[Group]:
        """All groups, ordered by their first sample's index, however they arrived. Nothing can be put afterwards."""
        self._sealed = True
        return sorted(self._groups, key=lambda group: group[0].index)
