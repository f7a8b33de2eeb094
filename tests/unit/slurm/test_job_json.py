"""Recordings of two real versions, and forms that nobody has seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.job_json import parse_jobs_json, show_job_json
from relax_slurm.slurm.scontrol import JobRecord, parse_jobs
from relax_slurm.slurm.watch import fold, parse_rows

RECORDINGS = Path(__file__).parent / "recordings"


def recording(version: str, name: str) -> str:
    return (RECORDINGS / version / name).read_text(encoding="utf-8")


def essence(record: JobRecord) -> tuple[Any, ...]:
    return record.job_id, record.leader, record.offset, record.state, record.nodes, record.gpus, record.gpu_types


@pytest.mark.parametrize(
    ("version", "name"), [("22.05", "squeue.json"), ("24.11", "squeue.json"), ("24.11", "scontrol-job.json")]
)
def test_json_and_text_of_one_moment_say_the_same(version: str, name: str) -> None:
    found = [record for record in parse_jobs_json(recording(version, name)) if record.leader == "1"]
    text = parse_jobs(recording(version, "scontrol-job.txt"))
    assert [essence(record) for record in found] == [essence(record) for record in text]
    assert [record.comment for record in found] == ["relax-mark", "relax-mark"]
    assert found[1].gpus == {"node3": (0, 1, 2, 3)}
    assert found[0].gpu_types == {"node1": "h100", "node2": "h100"}


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_json_and_squeue_of_one_moment_say_the_same(version: str) -> None:
    rows = parse_rows(recording(version, "squeue.txt"))
    states = {
        (record.leader, record.offset): record.state for record in parse_jobs_json(recording(version, "squeue.json"))
    }
    assert states == {(row.job_id, row.offset or 0): row.state for row in rows}
    assert fold(rows, "1").state == "RUNNING"


def test_a_notice_before_the_document_is_skipped() -> None:
    text = "Welcome to the cluster.\n" + recording("22.05", "squeue.json")
    assert len(parse_jobs_json(text)) == 4


def test_what_does_not_fit_together_is_unknown() -> None:
    job = {"job_id": 5, "nodes": "n[1-3]", "gres_detail": ["gpu:2(IDX:0-1)"], "job_state": "RUNNING"}
    (record,) = parse_jobs_json(json.dumps({"jobs": [job]}))
    assert (record.nodes, record.gpus) == (("n1", "n2", "n3"), {})
    (record,) = parse_jobs_json(json.dumps({"jobs": [job | {"nodes": "n[3-1]"}]}))
    assert (record.nodes, record.gpus) == ((), {})
    (record,) = parse_jobs_json(json.dumps({"jobs": [job | {"nodes": "n1", "gres_detail": ["gpu:2(IDX:N/A)"]}]}))
    assert record.gpus == {"n1": None}


def test_unset_and_infinite_numbers_are_no_numbers() -> None:
    nothing = {"set": False, "infinite": False, "number": 7}
    for value in (nothing, {"set": True, "infinite": True, "number": 7}, 0, None):
        (record,) = parse_jobs_json(json.dumps({"jobs": [{"job_id": 5, "het_job_id": value, "het_job_offset": value}]}))
        assert (record.leader, record.offset) == ("5", 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "{",
        "[" * 100_000,
        '{"a":' * 100_000,
        "{}",
        '{"jobs": {}}',
        '{"jobs": [{"job_id": 0}]}',
        '{"jobs": [{"job_id": "x"}]}',
        '{"jobs": [{"job_id": ' + "9" * 5000 + "}]}",
        '{"jobs": [{"job_id": 1, "gres_detail": 3}]}',
    ],
    ids=lambda text: text[:30],
)
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="JSON"):
        parse_jobs_json(text)


def test_the_question() -> None:
    assert show_job_json("7") == ["scontrol", "show", "job", "--detail", "--json", "7"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("n[1-2]") | st.just("gpu:2(IDX:0-1)"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["set", "infinite", "number", "list", "nodes"]), inner, max_size=4)
    ),
    max_leaves=8,
)
keys = st.sampled_from(
    ["job_id", "het_job_id", "het_job_offset", "job_state", "nodes", "gres_detail", "job_resources", "comment"]
)


@given(st.lists(st.dictionaries(keys, values, max_size=8), max_size=4))
def test_any_values_are_read_or_refused(jobs: list[dict[str, Any]]) -> None:
    refusal = ""
    try:
        parse_jobs_json(json.dumps({"jobs": jobs}))
    except ConfigError as error:
        refusal = error.message
    assert "\n" not in refusal
