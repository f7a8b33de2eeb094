"""What releases a GPU and what never does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.evidence import (
    DOUBT,
    NEUTRAL,
    PROOF,
    Evidence,
    Fact,
    Proctrack,
    Release,
    StepProof,
    judge,
    step_fact,
    step_proof,
    what_it_means,
)

FACTS = st.lists(st.builds(Evidence, st.sampled_from(list(Fact)), st.integers(1, 3)), max_size=12)


def verdict(*facts: Fact) -> Release:
    return judge([Evidence(fact, 1) for fact in facts], 1).release


def test_every_fact_has_exactly_one_weight() -> None:
    assert sorted([*PROOF, *DOUBT, *NEUTRAL]) == sorted(Fact)


@pytest.mark.parametrize("fact", list(PROOF))
def test_proof_releases(fact: Fact) -> None:
    assert verdict(Fact.STARTED, fact) is Release.RELEASED
    assert verdict(Fact.STARTED, Fact.SILENCE, fact, Fact.SILENCE) is Release.RELEASED


@pytest.mark.parametrize("fact", [*NEUTRAL, *DOUBT])
def test_nothing_else_releases(fact: Fact) -> None:
    assert verdict(fact) is Release.FENCED
    assert verdict(*[fact] * 50) is Release.FENCED


def test_a_200_from_release_is_not_a_measurement() -> None:
    assert verdict(Fact.STARTED, Fact.RELEASE_REPLIED) is Release.FENCED
    assert verdict(Fact.STARTED, Fact.RELEASE_REPLIED, Fact.RELEASE_MEASURED) is Release.RELEASED


@pytest.mark.parametrize("doubt", list(DOUBT))
def test_later_doubt_takes_the_release_back_until_the_next_proof(doubt: Fact) -> None:
    assert verdict(Fact.WORKER_EXITED, doubt) is Release.FENCED
    assert verdict(Fact.WORKER_EXITED, doubt, Fact.SWEPT) is Release.RELEASED


def test_an_onload_that_timed_out_fences_a_slot_that_was_asleep() -> None:
    assert verdict(Fact.STARTED, Fact.RELEASE_MEASURED, Fact.ONLOADED, Fact.TIMEOUT) is Release.FENCED


def test_a_late_exit_of_an_older_worker_says_nothing_about_the_new_one() -> None:
    late = [Evidence(Fact.STARTED, 2), Evidence(Fact.WORKER_EXITED, 1)]
    assert judge(late, 2).release is Release.FENCED
    assert judge(late, 1).release is Release.RELEASED
    assert "nothing is known" in judge(late, 3).reason


def test_end_of_a_step_counts_by_proctrack_and_by_whether_the_node_answered() -> None:
    for proctrack in Proctrack:
        live = step_proof(proctrack, node_answered=True)
        assert (live is StepProof.CGROUP) == (proctrack is Proctrack.CGROUP)
        assert step_proof(proctrack, node_answered=False) is StepProof.NONE
        assert step_proof(proctrack, node_answered=False, swept=True) is StepProof.SWEPT
    assert verdict(Fact.STARTED, step_fact(StepProof.CGROUP)) is Release.RELEASED
    assert verdict(Fact.STARTED, step_fact(StepProof.SWEPT)) is Release.RELEASED
    assert verdict(Fact.STARTED, step_fact(StepProof.NONE)) is Release.FENCED


def test_proctrack_is_read_from_the_site() -> None:
    assert Proctrack.parse("proctrack/cgroup") is Proctrack.CGROUP
    assert Proctrack.parse(" Proctrack/LinuxProc ") is Proctrack.LINUXPROC
    assert Proctrack.parse("proctrack/cray_aries") is Proctrack.UNKNOWN
    assert Proctrack.parse(None) is Proctrack.UNKNOWN
    assert "cgroup makes recovery automatic" in what_it_means(Proctrack.LINUXPROC)
    assert all(what_it_means(proctrack).startswith(proctrack.value) for proctrack in Proctrack)


def test_a_fence_says_why_and_what_would_lift_it() -> None:
    history = [Evidence(Fact.STARTED, 1), Evidence(Fact.ORPHAN_FOUND, 1, "pid 4242"), Evidence(Fact.SILENCE, 1)]
    found = judge(history, 1, Proctrack.CGROUP)
    assert "pid 4242" in found.reason
    assert "silent" in found.reason
    assert "the end of the step" in found.missing
    assert "the end of the step" not in judge(history, 1, Proctrack.LINUXPROC).missing
    assert judge([Evidence(Fact.SWEPT, 1)], 1).missing == ""
    assert judge([Evidence(Fact.EXIT_UNCONFIRMED, 1)], 1).reason.startswith("the worker's descendants")


@given(FACTS)
def test_without_proof_nothing_is_released(history: list[Evidence]) -> None:
    weak = [entry for entry in history if entry.fact not in PROOF]
    assert judge(weak, 2).release is Release.FENCED


@given(FACTS, st.lists(st.builds(Evidence, st.sampled_from(list(NEUTRAL)), st.integers(1, 3)), max_size=5), st.data())
def test_silence_and_timeouts_never_change_a_verdict(
    history: list[Evidence], noise: list[Evidence], data: st.DataObject
) -> None:
    mixed = list(history)
    for entry in noise:
        mixed.insert(data.draw(st.integers(0, len(mixed))), entry)
    assert judge(mixed, 2).release is judge(history, 2).release


@given(FACTS, st.sampled_from(list(Proctrack)))
def test_the_plugin_alone_never_releases(history: list[Evidence], proctrack: Proctrack) -> None:
    found = judge(history, 1, proctrack)
    assert found.release is judge(history, 1).release
    assert found.reason
    assert bool(found.missing) == (found.release is Release.FENCED)
