"""Samples and groups."""

from __future__ import annotations

from typing import Any

import pytest

from relax_slurm.workload.failures import IncompleteGroup
from relax_slurm.workload.samples import GENERATED, WRITE_BACK, SampleStatus, check_group
from tests.unit.workload.stage import sample


@pytest.mark.parametrize(
    ("statuses", "match"),
    [
        (["completed", "aborted"], "1 finished samples, wanted 2 .sample 1 aborted"),
        (["failed", "pending"], "0 finished samples, wanted 2"),
        (["completed"], "1 finished samples, wanted 2; look"),
        (["completed"] * 3, "3 finished samples, wanted 2; look"),
        ([], "group None: 0 finished"),
    ],
)
def test_an_incomplete_group(statuses: list[str], match: str) -> None:
    group = [sample(0, index, status=SampleStatus(status)) for index, status in enumerate(statuses)]
    with pytest.raises(IncompleteGroup, match=match):
        check_group(group, 2)


def test_whole_groups() -> None:
    check_group([sample(), sample(0, 1, status=SampleStatus.TRUNCATED)], 2)
    with pytest.raises(IncompleteGroup, match="one prompt makes one group"):
        check_group([sample(), sample(1, 1)], 2)


def test_lengths_and_equality() -> None:
    one: Any = sample(length=2)
    assert (one.prompt_length, one.response_length, one.scored) == (4, 2, True)
    assert not sample(length=0).scored
    assert not sample(remove_sample=True).scored
    assert sample() != sample()
    assert not set(WRITE_BACK) & set(GENERATED)
