from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.slurm import explain
from relax_slurm.slurm.command import Done
from relax_slurm.slurm.job import JobState, JobView
from relax_slurm.slurm.watch import ENDED, WAITING, JobRow, fold, parse_rows, squeue, view_of


def rows_of(*lines: str) -> tuple[JobRow, ...]:
    return parse_rows("\n".join(lines))


@pytest.mark.parametrize(
    ("lines", "state", "reason"),
    [
        (["93+0|PENDING||Resources", "93+1|PENDING||Priority"], JobState.PENDING, "Resources; Priority"),
        (["93+0|RUNNING|n1|None", "93+1|RUNNING|n[2-3]|None"], JobState.RUNNING, ""),
        (["93+0|RUNNING|n1|None", "93+1|CONFIGURING|n2|None"], JobState.PENDING, "CONFIGURING"),
        (["93+0|RUNNING|n1|None", "93+1|CANCELLED by 1000|n2|None"], JobState.DEGRADED, "CANCELLED"),
        (["93+0|PENDING||BeginTime", "93+1|FAILED|n2|NonZeroExitCode"], JobState.DEGRADED, "NonZeroExitCode"),
        (["93+0|COMPLETING|n1|None", "93+1|COMPLETING|n2|None"], JobState.RUNNING, ""),
        (["93+0|COMPLETED|n1|None", "93+1|COMPLETED|n2|None"], JobState.ENDED, "COMPLETED"),
        (["93+0|COMPLETED|n1|None", "93+1|NODE_FAIL|n2|None"], JobState.ENDED, "NODE_FAIL"),
        (["93+0|TIMEOUT|n1|TimeLimit", "93+1|TIMEOUT|n2|TimeLimit"], JobState.ENDED, "TIMEOUT TimeLimit"),
        (["93+0|SUSPENDED|n1|None"], JobState.RUNNING, ""),
        (["93|RUNNING|n1|None"], JobState.RUNNING, ""),
        (["93+0|SOMETHING_NEW|n1|None"], JobState.RUNNING, ""),
        (["93.batch|RUNNING|n1|None", "93.extern|RUNNING|n1|"], JobState.GONE, "no record"),
        ([], JobState.GONE, "no record"),
        (["94+0|RUNNING|n1|None"], JobState.GONE, "no record"),
    ],
)
def test_components_fold_to_one_state(lines: list[str], state: JobState, reason: str) -> None:
    view = fold(rows_of(*lines), "93")
    assert view.state is state
    assert reason in view.reason


def test_rows_keep_their_details() -> None:
    text = """
        93+0|RUNNING
        93+1|CANCELLED by 1000
        20_[2-7,12-17,22%56]|PENDING
        20_3|RUNNING|n1|None
        67767+1.batch|RUNNING
        67767.extern|COMPLETED
        site notice: maintenance | on friday
        5|CANCELLED+|n1|a|b
        6|
    """
    assert parse_rows(text) == (
        JobRow("93", 0, None, "RUNNING", "", ""),
        JobRow("93", 1, None, "CANCELLED", "", ""),
        JobRow("20", None, "[2-7,12-17,22%56]", "PENDING", "", ""),
        JobRow("20", None, "3", "RUNNING", "n1", ""),
        JobRow("5", None, None, "CANCELLED", "n1", "a|b"),
    )


def test_components_are_listed_in_order() -> None:
    view = fold(rows_of("9+2|RUNNING|c|", "9+0|RUNNING|a|", "9+1|RUNNING|b|"), "9")
    assert [(component.index, component.nodes) for component in view.components] == [(0, "a"), (1, "b"), (2, "c")]


@pytest.mark.parametrize(
    "failure",
    [
        Done(("squeue",), 1, "", "slurm_load_jobs error: Socket timed out on send/recv operation"),
        Done(("squeue",), 1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"),
        Done(("squeue",), None, "", "squeue did not answer within 30 s", timed_out=True),
        Done(("squeue",), None, "", "cannot run squeue: No such file"),
        Done(("squeue",), 1, "93+0|COMPLETED|n|", ""),
        Done(("squeue",), -9, "", ""),
    ],
)
def test_a_failing_squeue_tells_nothing(failure: Done) -> None:
    running = fold(rows_of("93+0|RUNNING|n1|None"), "93")
    first = view_of(failure, "93", running)
    again = view_of(failure, "93", first)
    for view in (first, again):
        assert view.state is JobState.UNKNOWN
        assert view.last is JobState.RUNNING
        assert view.components == running.components
        assert not view.over
        assert view.reason
    assert view_of(failure, "93", None) == JobView(JobState.UNKNOWN, (), failure.words, None)


def test_an_unknown_job_id_means_gone() -> None:
    done = Done(("squeue",), 1, "", "slurm_load_jobs error: Invalid job id specified")
    view = view_of(done, "93", None)
    assert view.state is JobState.GONE
    assert view.over


def test_the_question() -> None:
    assert squeue(["1", "2"]) == [
        "squeue",
        "--all",
        "--noheader",
        "--states=all",
        "--format=%i|%T|%N|%r",
        "--jobs=1,2",
    ]


def test_advice_for_reasons_that_do_not_pass() -> None:
    assert "ask for less" in (explain.pending("PartitionConfig") or "")
    assert explain.pending("ReqNodeNotAvail, UnavailableNodes:n3")
    assert explain.pending("Resources") is None
    assert explain.pending("Priority") is None


states = st.sampled_from([*sorted(WAITING), *sorted(ENDED), "RUNNING", "COMPLETING", "SUSPENDED"])


@given(st.lists(states, min_size=1, max_size=6))
def test_the_fold_is_total_and_over_only_when_all_are(found: list[str]) -> None:
    view = fold([JobRow("1", index, None, state, "", "") for index, state in enumerate(found)], "1")
    assert view.over == all(state in ENDED for state in found)
    assert (view.state is JobState.DEGRADED) == (
        any(state in ENDED for state in found) and not all(state in ENDED for state in found)
    )
    assert len(view.components) == len(found)


@given(st.text("0123456789+_[]|%.,RUNING\n ", max_size=80))
def test_any_text_is_parsed(text: str) -> None:
    rows = parse_rows(text)
    fold(rows, rows[0].job_id if rows else "1")


NEVER = {
    "PartitionNodeLimit": "fewer",
    "PartitionTimeLimit": "slurm.time",
    "BadConstraints": "slurm.constraint",
    "AccountNotAllowed": "slurm.account",
    "QOSNotAllowed": "slurm.qos",
    "InvalidAccount": "slurm.account",
    "InvalidQOS": "slurm.qos",
    "AssocMaxNodePerJobLimit": "ask for less",
    "QOSMaxWallDurationPerJobLimit": "ask for less",
    "QOSMaxCpuPerNode": "ask for less",
    "QOSMinGRES": "ask for more",
    "ReservationDeleted": "slurm.reservation",
    "DependencyNeverSatisfied": "extra_sbatch",
    "launch failed requeued held": "scontrol show job",
}
MAYBE = {
    "PartitionConfig": "ask for less",
    "PartitionDown": "wait",
    "PartitionInactive": "wait",
    "JobHeldUser": "scontrol release",
    "JobHeldAdmin": "administrator",
    "ReqNodeNotAvail, UnavailableNodes:n3": "drained",
}
FINE = ("Resources", "Priority", "BeginTime", "Licenses", "QOSMaxJobsPerUserLimit", "AssocGrpNodeLimit", "None", "")


@pytest.mark.parametrize("reason", [*NEVER, *MAYBE, *FINE])
def test_which_reasons_can_clear_by_themselves(reason: str) -> None:
    assert explain.never_starts(reason) == (reason in NEVER)
    wanted = NEVER.get(reason) or MAYBE.get(reason)
    assert (explain.pending(reason) is None) == (wanted is None)
    assert (wanted or "") in (explain.pending(reason) or "")


def test_every_row_has_a_test_and_the_worst_reason_of_several_counts() -> None:
    for pattern, clears, _ in explain.PENDING:
        tried = NEVER if clears is explain.Clears.NEVER else MAYBE
        assert any(re.match(pattern, reason) for reason in tried), pattern
    assert explain.never_starts("Resources; PartitionDown; InvalidQOS")
    assert not explain.never_starts("Resources; PartitionDown")


def test_pending_alone_is_no_reason() -> None:
    assert fold(rows_of("9|PENDING||None"), "9").reason == ""
    assert fold(rows_of("9|CONFIGURING||None"), "9").reason == "CONFIGURING"
