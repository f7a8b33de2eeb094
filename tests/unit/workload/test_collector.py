"""Capture: each sample once, no more than fits, in the order of first samples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.workload.collector import MAX_SAMPLES, DeferredTransferCollector
from relax_slurm.workload.failures import StagingRefused
from tests.unit.workload.stage import groups, sample


@given(st.permutations(range(5)))
def test_the_order_of_arrival_does_not_matter(order: list[int]) -> None:
    collector, made = DeferredTransferCollector(), groups(5)
    for number in order:
        collector.put(made[number])
    assert collector.seal() == made
    assert len(collector) == 10


def test_refusals_take_nothing() -> None:
    assert MAX_SAMPLES == 65_536
    collector = DeferredTransferCollector(max_samples=3)
    one, two = sample(), sample(0, 1)
    collector.put([one])
    with pytest.raises(StagingRefused, match="sample 0 of group 0 is there already"):
        collector.put([two, one])
    with pytest.raises(StagingRefused, match="is there already"):
        collector.put([two, two])
    with pytest.raises(StagingRefused, match="more than 3 samples: 1 are staged and 3 came"):
        collector.put([two, sample(), sample()])
    with pytest.raises(StagingRefused, match="an empty group"):
        collector.put([])
    assert collector.seal() == [[one]]
    with pytest.raises(StagingRefused, match="after the batch was sealed"):
        collector.put([two])
