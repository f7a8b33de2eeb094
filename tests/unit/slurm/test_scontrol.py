from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.scontrol import end_time, parse_config, parse_jobs, show_job, step_end_is_proof

RECORDED = (Path(__file__).parent / "golden" / "scontrol-het.txt").read_text()


def test_a_recorded_het_job() -> None:
    records = parse_jobs(RECORDED)
    assert [record.job_id for record in records] == ["17", "18", "19"]
    assert [record.offset for record in records] == [0, 1, 2]
    assert {record.leader for record in records} == {"17"}
    assert [record.nodes for record in records] == [("node1",), ("node2", "node3"), ("node4",)]
    head, policy, judge = records
    assert head.gpus == {"node1": ()}
    assert policy.gpus == {"node2": (2, 3, 4, 5), "node3": (0, 1, 2, 3)}
    assert judge.gpus == {"node4": (0, 1)}
    assert head.state == "RUNNING"
    assert head.comment == "team a, relax-1"
    assert head.fields["TimeLimit"] == "00:05:00"
    assert end_time(head) == int(datetime(2026, 11, 30, 3, 30, 47).timestamp())


def test_identical_nodes_share_a_line() -> None:
    text = "JobId=5 JobName=x\n   NodeList=n[1-3]\n     Nodes=n[1-3] CPU_IDs=0 Mem=0 GRES=gpu:2(IDX:0-1)\n"
    assert parse_jobs(text)[0].gpus == {"n1": (0, 1), "n2": (0, 1), "n3": (0, 1)}
    assert parse_jobs(text)[0].leader == "5"


@pytest.mark.parametrize(
    ("gres", "indexes"),
    [("", ()), ("(null)", ()), ("gpu:2(IDX:N/A)", None), ("N/A", None), ("gpu!odd", None)],
)
def test_what_slurm_does_not_tell_is_unknown(gres: str, indexes: tuple[int, ...] | None) -> None:
    text = f"JobId=5 JobName=x\n   NodeList=n1\n     Nodes=n1 CPU_IDs=0 Mem=0 GRES={gres}\n"
    assert parse_jobs(text)[0].gpus == {"n1": indexes}


def test_a_pending_job_has_no_nodes_and_no_end() -> None:
    text = (
        "JobId=5 JobName=x\n   JobState=PENDING Reason=Resources Dependency=(null)\n   EndTime=Unknown\n   NodeList=\n"
    )
    (record,) = parse_jobs(text)
    assert (record.nodes, record.gpus, record.reason) == ((), {}, "Resources")
    assert end_time(record) is None


def test_a_comment_cannot_pretend_to_be_slurm() -> None:
    text = "JobId=5 JobName=x\n   JobState=RUNNING Reason=None\n   Comment=a JobState=COMPLETED NodeList=evil\n"
    (record,) = parse_jobs(text)
    assert record.state == "RUNNING"


def test_no_record_and_a_broken_node_list() -> None:
    assert parse_jobs("") == ()
    assert parse_jobs("slurm_load_jobs error: Invalid job id specified\n") == ()
    with pytest.raises(ConfigError, match="node list"):
        parse_jobs("JobId=5\n   NodeList=n[3-1]\n")


@pytest.mark.parametrize(
    ("kind", "proof"),
    [
        ("proctrack/cgroup", True),
        ("proctrack/linuxproc", False),
        ("proctrack/pgid", False),
        ("(null)", None),
        (None, None),
    ],
)
def test_what_the_end_of_a_step_proves(kind: str | None, proof: bool | None) -> None:
    text = "Configuration data as of x\nAccountingStorageHost   = localhost\nBOOT_TIME = 2026-01-01\n"
    if kind:
        text += f"ProctrackType           = {kind}\n"
    config = parse_config(text)
    assert config["AccountingStorageHost"] == "localhost"
    assert step_end_is_proof(config) is proof


def test_the_command_asks_for_details() -> None:
    assert show_job("7") == ["scontrol", "show", "job", "--detail", "7"]


@given(st.lists(st.sampled_from([*RECORDED.splitlines(), "", "JobId=3", "   Nodes= GRES="]), max_size=40))
def test_shuffled_lines_are_read_or_refused(lines: list[str]) -> None:
    with contextlib.suppress(ConfigError):
        parse_jobs("\n".join(lines))


@given(st.text("JobId=1 \n=NodesGRES[]-,:()", max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_jobs(text)
        parse_config(text)
    except ConfigError:
        pass
