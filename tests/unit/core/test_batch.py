"""The commit gate's table."""

from __future__ import annotations

import itertools

import pytest

from relax_slurm.core.batch import TABLE, Batch, BatchEvent, BatchState, IllegalBatchEvent


@pytest.mark.parametrize(("state", "event"), list(itertools.product(BatchState, BatchEvent)))
def test_the_table_is_all_there_is(state: BatchState, event: BatchEvent) -> None:
    batch = Batch(3, state)
    after = TABLE.get((state, event))
    if after is None:
        with pytest.raises(IllegalBatchEvent, match=f"batch 3 is {state}, so it cannot {event}"):
            batch.apply(event)
        assert batch.state is state
    else:
        assert batch.apply(event) == (after is not state)
        assert batch.state is after


def test_the_first_reason_stays() -> None:
    batch = Batch(0)
    batch.apply(BatchEvent.FAIL, "the judge is gone")
    batch.apply(BatchEvent.FAIL, "asked again")
    assert batch.error == "the judge is gone"
    with pytest.raises(IllegalBatchEvent, match="the judge is gone"):
        batch.apply(BatchEvent.COMMIT)
