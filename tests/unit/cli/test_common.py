"""What all verbs share: errors on two streams, where runs and jobs are found, a run seen from outside."""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.cli import common
from relax_slurm.control import backends
from relax_slurm.errors import BindingMismatch, ConfigError, Unavailable
from relax_slurm.slurm import submit
from relax_slurm.slurm.command import Done
from relax_slurm.slurm.job import JobRef, JobState
from tests.unit.cli.stage import FakeBackend, prepared, state_of

ROW = {"node": "n1", "gpu": "3", "source": "SLURM_STEP_GPUS", "seen": "0,1", "wanted": "0,1,2", "problem": "too few"}


def test_an_error_is_one_sentence_and_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    common.say_error(ConfigError("x:y: seen 1, wanted 2; correct it"), as_json=False)
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: x:y: seen 1, wanted 2; correct it\n")
    common.say_error(BindingMismatch("refused", rows=[ROW] * 20), as_json=True)
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["exit_code"] == 5
    assert len(document["error"]["detail"]["rows"]) == 20
    assert "SLURM_STEP_GPUS" in err
    assert "and 12 more rows" in err


def test_tables_are_aligned_and_bounded() -> None:
    text = common.table([{"a": "1", "b": "long value"}, {"a": "22"}], ("a", "b"))
    assert text == "  a   b\n  1   long value\n  22"


def test_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    parser = argparse.ArgumentParser()
    common.add_run_argument(parser)
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    assert common.the_run(parser.parse_args([])) == run_dir
    assert common.the_run(parser.parse_args(["demo"])) == run_dir
    monkeypatch.setenv("RELAX_RUNS_ROOT", "/nowhere")
    assert common.the_run(parser.parse_args(["--runs-root", str(tmp_path / "root")])) == run_dir
    with pytest.raises(ConfigError):
        common.the_run(parser.parse_args([]))


def test_the_job_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    assert common.job_of(prepared(root, tmp_path)) == ("slurm", JobRef("7"))
    assert common.job_of(prepared(root, tmp_path, {})) is None
    asked: list[str] = []

    def search(tag: str, **_: Any) -> Any:
        asked.append(tag)
        return JobRef("9"), Done((), 0, "", "")

    monkeypatch.setattr(submit, "search", search)
    cut_off = prepared(root, tmp_path, {"backend": "slurm", "tag": "relax-demo-3-abc"})
    assert common.job_of(cut_off) == ("slurm", JobRef("9"))
    assert asked == ["relax-demo-3-abc"]
    monkeypatch.setattr(submit, "search", lambda tag, **_: (None, Done((), 0, "", "")))
    assert common.job_of(cut_off) is None
    assert common.job_of(prepared(root, tmp_path, {"backend": "local", "tag": "x"})) is None


def test_an_outcome_that_a_file_system_shows_late_is_waited_for(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    assert common.outcome_of(run_dir, 0.0) is None
    thread = threading.Thread(
        target=lambda: (time.sleep(0.2), run_dir.write_json("outcome.json", {"state": "STOPPED"}))
    )
    thread.start()
    assert common.outcome_of(run_dir, 10.0) == {"state": "STOPPED"}
    thread.join()


def test_a_run_without_a_coordinator_is_seen_from_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    monkeypatch.setattr(backends, "backend_for", lambda kind, **_: FakeBackend(JobState.PENDING, reason="Resources"))
    state = common.state_of(prepared(root, tmp_path))
    assert state["state"] == "JOB_PENDING"
    assert "has no coordinator yet" in state["reason"]
    assert common.state_of(prepared(root, tmp_path, {}))["state"] == "UNSUBMITTED"
    run_dir = prepared(root, tmp_path)
    error = {"message": "no", "code": "binding_mismatch"}
    run_dir.write_json("outcome.json", {"state": "FAILED", "exit_code": 5, "reason": "", "error": error})
    run_dir.write_json("endpoint.json", {"epoch": "e", "control": "tcp://x:1", "gateway_url": "http://h:1"})
    monkeypatch.setattr(backends, "backend_for", lambda kind, **_: FakeBackend(JobState.ENDED))
    state = common.state_of(run_dir)
    assert (state["state"], state["exit_code"], state["error"]) == ("FAILED", 5, error)
    for key in ("run", "attempt", "epoch", "gateway_url", "token_file", "run_dir", "roles", "leases", "batch"):
        assert key in state


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (JobState.PENDING, "requeued (BeginTime); attempt 1 ended with STOPPED (signal SIGTERM)"),
        (JobState.RUNNING, "attempt 1 ended with STOPPED (signal SIGTERM); its job is not over"),
        (
            JobState.UNKNOWN,
            "attempt 1 ended with STOPPED (signal SIGTERM); "
            "Slurm could not be asked whether its job is over (BeginTime)",
        ),
    ],
)
def test_an_outcome_is_final_only_when_the_job_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: JobState, reason: str
) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    run_dir.write_json("outcome.json", {"state": "STOPPED", "exit_code": 0, "reason": "signal SIGTERM"})
    run_dir.write_json("endpoint.json", {"epoch": "e", "control": "tcp://x:1", "gateway_url": "http://h:1"})
    monkeypatch.setattr(backends, "backend_for", lambda kind, **_: FakeBackend(job, reason="BeginTime"))
    state = common.state_of(run_dir)
    assert (state["state"], state["reason"], state["gateway_url"]) == (f"JOB_{job}", reason, None)
    assert "exit_code" not in state
    again = run_dir.next_attempt()
    monkeypatch.setattr(common, "ask", lambda run_dir, kind, **_: state_of(run_dir, "STARTING"))
    state = common.state_of(run_dir)
    assert (state["state"], state["attempt"]) == ("STARTING", again.attempt)


def test_a_coordinator_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    monkeypatch.setattr(common, "ask", lambda run_dir, kind, **_: state_of(run_dir))
    assert common.state_of(run_dir)["state"] == "READY"
    again = run_dir.next_attempt()
    assert common.state_of(run_dir)["attempt"] == again.attempt  # a job that was started again


def test_nobody_to_ask(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    with pytest.raises(Unavailable, match=r"endpoint\.json is missing"):
        common.ask(run_dir, "ping")
    run_dir.write_json("endpoint.json", {"control": "tcp://127.0.0.1:1"})
    with pytest.raises(Unavailable, match="no answer to 'ping'"):
        common.ask(run_dir, "ping", timeout_seconds=0.2)


def test_a_waiting_run_says_what_to_do_and_a_refused_one_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "root"
    pending = FakeBackend(JobState.PENDING, reason="AccountNotAllowed")
    monkeypatch.setattr(backends, "backend_for", lambda kind, **_: pending)
    reason = common.state_of(prepared(root, tmp_path))["reason"]
    assert reason.startswith("AccountNotAllowed: slurm.account may not use this partition")
    pending.states, pending.reason = [JobState.ENDED], "CANCELLED"
    reason = common.state_of(prepared(root, tmp_path))["reason"]
    assert reason == "the job is over (CANCELLED) and left no outcome"
    refused = prepared(root, tmp_path, {"backend": "slurm", "tag": "x", "refused": "sbatch refused the job: no"})
    state = common.state_of(refused)
    assert (state["state"], state["reason"]) == ("UNSUBMITTED", "sbatch refused the job: no")


def test_a_job_that_slurm_cannot_be_asked_for_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Done(("squeue",), None, "", "squeue did not answer within 30 s", timed_out=True)
    monkeypatch.setattr(submit, "search", lambda tag, **_: (None, silent))
    state = common.state_of(prepared(tmp_path / "root", tmp_path, {"backend": "slurm", "tag": "x"}))
    assert state["state"] == "JOB_UNKNOWN"
    assert "squeue did not answer within 30 s" in state["reason"]


def test_a_run_that_serves_has_a_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    answers = [state_of(run_dir, gateway_url=None), state_of(run_dir, gateway_url=None), state_of(run_dir)]
    monkeypatch.setattr(common, "ask", lambda run_dir, kind, **_: answers.pop(0))
    assert common.state_of(run_dir)["gateway_url"] == "http://h:29999"
