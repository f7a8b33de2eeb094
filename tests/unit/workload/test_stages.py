"""The stage table against what it must mean, whatever is tried in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.workload.failures import IllegalStage
from relax_slurm.workload.stages import TABLE, Stage, Step, after

WAY = [Step.SCORE, Step.WRITE_BACK, Step.PUBLISH, Step.COMMIT]


@given(st.lists(st.sampled_from(Step), max_size=12))
def test_a_batch_is_committed_by_the_whole_way_only(steps: list[Step]) -> None:
    stage, taken = Stage.GENERATED, []
    for step in steps:
        if (stage, step) in TABLE:
            stage = after(stage, step, 1)
            taken.append(step)
            continue
        with pytest.raises(IllegalStage, match="batch 1 is"):
            after(stage, step, 1)
    assert (stage is Stage.COMMITTED) == (taken == WAY)
    assert (stage is Stage.FAILED) == (Step.FAIL in taken)
    assert taken[: len(WAY)] == WAY[: len(taken)] or taken[-1] is Step.FAIL


@pytest.mark.parametrize("end", [Stage.COMMITTED, Stage.FAILED])
def test_the_ends_are_ends(end: Stage) -> None:
    for step in Step:
        with pytest.raises(IllegalStage, match="possible: nothing"):
            after(end, step, 3)


def test_every_stage_before_the_end_can_fail() -> None:
    for stage in set(Stage) - {Stage.COMMITTED, Stage.FAILED}:
        assert after(stage, Step.FAIL, 0) is Stage.FAILED
