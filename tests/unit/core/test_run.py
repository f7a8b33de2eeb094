"""The run's state machine."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.run import (
    MAX_HISTORY,
    SERVING,
    TERMINAL,
    TRANSITIONS,
    IllegalRunEvent,
    Run,
    RunEvent,
    RunState,
    mermaid,
)

EVENTS = st.lists(st.sampled_from(list(RunEvent)), max_size=30)


def walk(*events: RunEvent) -> Run:
    run = Run()
    for event in events:
        run.apply(event, event.value)
    return run


UP = (RunEvent.ALL_REPORTED, RunEvent.BOUND, RunEvent.ALL_READY)


def test_a_good_run() -> None:
    run = walk(*UP, RunEvent.STOP, RunEvent.ENDED)
    assert run.state is RunState.STOPPED
    assert [change.after for change in run.history] == [
        RunState.BINDING,
        RunState.STARTING,
        RunState.READY,
        RunState.STOPPING,
        RunState.STOPPED,
    ]


def test_case_13_signals_that_come_twice_drain_once() -> None:
    run = walk(*UP, RunEvent.DRAIN)
    run.apply(RunEvent.DRAIN, "again")
    assert (run.state, run.reason) == (RunState.DRAINING, "drain")
    assert len(run.history) == 4
    assert run.apply(RunEvent.DRAINED) is RunState.STOPPING
    assert run.apply(RunEvent.DRAIN) is RunState.STOPPING


def test_a_failed_binding_never_starts_an_engine() -> None:
    run = walk(RunEvent.ALL_REPORTED)
    run.apply(RunEvent.FAIL, "binding mismatch")
    assert run.state is RunState.FAILED
    with pytest.raises(IllegalRunEvent, match="bound cannot happen in FAILED"):
        run.apply(RunEvent.BOUND)
    run.apply(RunEvent.FAIL, "and then the disk")
    assert run.reason == "binding mismatch"  # the first reason stays


def test_degraded_recovers() -> None:
    run = walk(*UP, RunEvent.PART_LOST, RunEvent.PART_LOST)
    assert run.state is RunState.DEGRADED
    assert run.apply(RunEvent.ALL_READY) is RunState.READY


def test_an_end_that_could_not_be_confirmed_is_a_failure() -> None:
    assert walk(RunEvent.STOP, RunEvent.FAIL).state is RunState.FAILED


@pytest.mark.parametrize("state", list(RunState))
@pytest.mark.parametrize("event", list(RunEvent))
def test_what_the_table_does_not_know_raises_and_changes_nothing(state: RunState, event: RunEvent) -> None:
    run = Run(state, "before")
    known = (state, event) in TRANSITIONS
    assert run.can(event) is known
    if known:
        assert run.apply(event, "after") is TRANSITIONS[state, event]
        return
    before = copy.deepcopy(run)
    with pytest.raises(IllegalRunEvent, match="cannot happen in"):
        run.apply(event, "after")
    assert run == before


@pytest.mark.parametrize("state", [state for state in RunState if state is not RunState.STOPPED])
def test_stop_is_accepted_everywhere_and_fail_until_the_end(state: RunState) -> None:
    assert (state, RunEvent.STOP) in TRANSITIONS
    assert TRANSITIONS[state, RunEvent.FAIL] is RunState.FAILED


def test_terminal_states_are_never_left() -> None:
    for (before, _), after in TRANSITIONS.items():
        if before in TERMINAL:
            assert after is before


def test_every_state_is_reachable_and_can_end() -> None:
    def reach(start: RunState) -> set[RunState]:
        seen = {start}
        while more := {after for (before, _), after in TRANSITIONS.items() if before in seen} - seen:
            seen |= more
        return seen

    assert reach(RunState.BOOTING) == set(RunState)
    assert all(reach(state) & TERMINAL for state in RunState)


@given(EVENTS)
def test_serving_only_after_a_binding(events: list[RunEvent]) -> None:
    run = Run()
    bound = False
    for event in events:
        try:
            run.apply(event)
        except IllegalRunEvent:
            continue
        bound = bound or event is RunEvent.BOUND
        if run.state in SERVING or run.state is RunState.DRAINING:
            assert bound


def test_history_is_bounded() -> None:
    run = walk(*UP)
    for _ in range(MAX_HISTORY):
        run.apply(RunEvent.PART_LOST)
        run.apply(RunEvent.ALL_READY)
    assert len(run.history) == MAX_HISTORY


def test_the_diagram_shows_every_change_of_the_table() -> None:
    text = mermaid()
    assert text.startswith("stateDiagram-v2\n    [*] --> BOOTING\n")
    for (before, event), after in TRANSITIONS.items():
        assert (f"    {before.value} --> {after.value}: {event.value}\n" in text) == (before is not after)
    assert "FAILED --> [*]" in text
