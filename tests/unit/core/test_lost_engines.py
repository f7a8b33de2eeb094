"""Since when engines with requests are in doubt, and when that is long enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.lost_engines import DOUBTFUL, UNDECIDED, doubts, overdue
from relax_slurm.core.snapshot import EngineEntry, ReplicaState

AT = ("m/replica-0", 3)


def shown(state: ReplicaState, generation: int = 3) -> dict[str, EngineEntry]:
    return {AT[0]: EngineEntry(AT[0], "http://n:1", state, state is ReplicaState.READY, generation)}


@pytest.mark.parametrize("state", ReplicaState)
def test_which_states_let_the_time_run(state: ReplicaState) -> None:
    assert doubts([AT], shown(state), {}, 5.0) == ({AT: 5.0} if state in DOUBTFUL else {})
    kept = state in DOUBTFUL | UNDECIDED
    assert doubts([AT], shown(state), {AT: 1.0}, 5.0) == ({AT: 1.0} if kept else {})


def test_gone_and_replaced_engines_are_in_doubt() -> None:
    assert doubts([AT], {}, {}, 5.0) == {AT: 5.0}
    assert doubts([AT], shown(ReplicaState.READY, generation=4), {}, 5.0) == {AT: 5.0}


def test_engines_without_requests_are_forgotten() -> None:
    assert doubts([], shown(ReplicaState.UNKNOWN), {AT: 1.0}, 5.0) == {}


def test_how_long_is_long_enough() -> None:
    assert overdue({AT: 1.0}, 20.9, 20.0) == frozenset()
    assert overdue({AT: 1.0}, 21.0, 20.0) == {AT}


@given(st.lists(st.sampled_from(ReplicaState), max_size=20))
def test_an_engine_that_serves_again_starts_from_zero(states: list[ReplicaState]) -> None:
    since: dict[tuple[str, int], float] = {}
    served = 0.0
    for now, state in enumerate([ReplicaState.READY, *states]):
        since = doubts([AT], shown(state), since, float(now))
        if state not in DOUBTFUL | UNDECIDED:
            served = float(now)
        assert all(began > served for began in since.values())
