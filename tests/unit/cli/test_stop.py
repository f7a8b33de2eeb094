"""`stop`: asked first, ended when that does not help, and never told to be over while it is not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.__main__ import main
from relax_slurm.cli import stop as verb
from relax_slurm.control.local import _start_ticks
from relax_slurm.control.run_dir import RunDir
from relax_slurm.errors import Unavailable
from relax_slurm.slurm import submit
from relax_slurm.slurm.backend import CancelFailed
from relax_slurm.slurm.command import Done
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.slurm.submit import UserJob
from relax_slurm.wire.client import RemoteError
from tests.unit.cli.stage import FakeBackend, prepared


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    made = FakeBackend(JobState.RUNNING)
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    monkeypatch.setattr(verb, "backend_for", lambda kind, **_: made)
    monkeypatch.setattr(verb, "LAG_SECONDS", 0.1)
    return made


def answering(monkeypatch: pytest.MonkeyPatch, run_dir: RunDir, backend: FakeBackend, **outcome: Any) -> list[str]:
    """A coordinator that stops when asked."""
    asked: list[str] = []

    def ask(run_dir: RunDir, kind: str, **fields: Any) -> dict[str, Any]:
        asked.append(f"{kind} {fields['reason']}")
        run_dir.write_json("outcome.json", {"run": "demo", "state": "STOPPED", "unproven": []} | outcome)
        backend.states = [JobState.RUNNING, JobState.ENDED]
        return {"state": "STOPPING"}

    monkeypatch.setattr(verb, "ask", ask)
    return asked


def test_an_orderly_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    asked = answering(monkeypatch, run_dir, backend)
    assert main(["stop", "demo", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["state"] == "STOPPED"
    assert asked == ["stop relax-slurm stop"]
    assert "asked the coordinator to stop" in err
    assert backend.cancelled == []
    assert main(["stop"]) == 0  # again: nothing to do
    assert asked == ["stop relax-slurm stop"]


def test_an_end_in_doubt_is_exit_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    answering(monkeypatch, run_dir, backend, unproven=["m/replica-0"])
    assert main(["stop"]) == 9
    assert "m/replica-0 is not proven" in capsys.readouterr().err


@pytest.mark.parametrize("error", [Unavailable("nobody"), RemoteError("cannot", "internal")])
def test_without_a_coordinator_the_job_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, error: Exception
) -> None:
    prepared(tmp_path / "root", tmp_path)
    monkeypatch.setattr(verb, "ask", lambda *_, **__: (_ for _ in ()).throw(error))
    assert main(["stop"]) == 0
    assert backend.cancelled == ["7"]


def test_a_coordinator_that_says_yes_and_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path / "root", tmp_path)
    monkeypatch.setattr(verb, "ask", lambda *_, **__: {"state": "STOPPING"})
    assert main(["stop", "--timeout", "0.1"]) == 0
    assert backend.cancelled == ["7"]
    assert "not over after 0.05 s; ending the job" in capsys.readouterr().err


def test_a_job_that_does_not_go_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path / "root", tmp_path)
    monkeypatch.setattr(verb, "ask", lambda *_, **__: {"state": "STOPPING"})
    backend.after_cancel = JobState.UNKNOWN
    assert main(["stop", "--timeout", "0.1"]) == 9
    said = capsys.readouterr().err
    assert "the end of slurm job 7 of run 'demo' is not confirmed: Slurm could not be asked" in said
    assert "still UNKNOWN" not in said


def test_a_cancel_that_is_refused_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path / "root", tmp_path)
    monkeypatch.setattr(verb, "ask", lambda *_, **__: (_ for _ in ()).throw(Unavailable("nobody")))

    def refuse(job: JobRef, budget_seconds: float | None = None) -> None:
        raise CancelFailed("scancel 7 failed: not yours", silent=False)

    monkeypatch.setattr(backend, "cancel", refuse)
    assert main(["stop"]) == 9
    assert "not yours" in capsys.readouterr().err


def test_what_was_never_submitted(tmp_path: Path, backend: FakeBackend, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(tmp_path / "root", tmp_path, {})
    assert main(["stop"]) == 2
    assert "was submitted (only prepared or refused: demo)" in capsys.readouterr().err
    assert main(["stop", "demo"]) == 0
    assert "UNSUBMITTED" in capsys.readouterr().out
    assert backend.polls == 0


def test_an_orderly_end_may_take_what_the_config_gives(tmp_path: Path) -> None:
    assert verb._default_seconds(prepared(tmp_path / "root", tmp_path)) == 30.0 + 60.0 + 30.0 + 30.0


def ended(run_dir: RunDir) -> None:
    run_dir.write_json("outcome.json", {"run": "demo", "state": "STOPPED", "unproven": []})


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_a_requeued_job_is_cancelled_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, state: JobState
) -> None:
    ended(prepared(tmp_path / "root", tmp_path))
    monkeypatch.setattr(verb, "ask", lambda *_, **__: pytest.fail("nobody is there to be asked"))
    backend.states = [state]
    assert main(["stop"]) == 0
    assert (backend.cancelled, backend.polls) == (["7"], 2)
    assert main(["stop"]) == 0  # again: nothing to do
    assert backend.cancelled == ["7"]


def test_a_job_that_waits_has_nobody_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend
) -> None:
    prepared(tmp_path / "root", tmp_path)
    monkeypatch.setattr(verb, "ask", lambda *_, **__: pytest.fail("nobody is there to be asked"))
    backend.states = [JobState.PENDING]
    assert main(["stop"]) == 0
    assert backend.cancelled == ["7"]


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RUNNING])
def test_a_job_that_is_requeued_after_it_was_cancelled_is_cancelled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, state: JobState
) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    ended(run_dir)
    monkeypatch.setattr(verb, "AGAIN_SECONDS", 0.0)
    cancel = backend.cancel

    def too_early(job: JobRef, budget_seconds: float | None = None) -> None:
        cancel(job)
        if len(backend.cancelled) == 1:
            backend.states = [JobState.RUNNING, state]
            if state is JobState.RUNNING:
                run_dir.next_attempt()

    monkeypatch.setattr(backend, "cancel", too_early)
    assert main(["stop"]) == 0
    assert backend.cancelled == ["7", "7"]


def test_nobody_acts_on_a_job_of_which_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend
) -> None:
    ended(prepared(tmp_path / "root", tmp_path))
    backend.states = [JobState.UNKNOWN, JobState.UNKNOWN, JobState.GONE]
    assert main(["stop"]) == 0
    assert backend.cancelled == []


def test_the_coordinator_of_a_newer_attempt_is_asked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path / "root", tmp_path)
    asked: list[int] = []

    def ask(run_dir: RunDir, kind: str, **_: Any) -> dict[str, Any]:
        asked.append(run_dir.attempt)
        run_dir.write_json("outcome.json", {"run": "demo", "state": "STOPPED", "attempt": run_dir.attempt})
        if run_dir.attempt == 1:
            run_dir.next_attempt()  # Slurm had put the job back just then
        else:
            backend.states = [JobState.ENDED]
        return {"state": "STOPPING"}

    monkeypatch.setattr(verb, "ask", ask)
    assert main(["stop", "--json"]) == 0
    assert asked == [1, 2]
    assert json.loads(capsys.readouterr().out)["attempt"] == 2
    assert backend.cancelled == []


def test_the_time_bounds_the_forced_end_of_a_local_supervisor_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        job = f"{process.pid}@{_start_ticks(process.pid)}"
        prepared(tmp_path / "root", tmp_path, {"backend": "local", "tag": "x", "job_id": job})
        monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
        monkeypatch.setattr(verb, "ask", lambda *_, **__: {"state": "STOPPING"})
        began = time.monotonic()
        assert main(["stop", "--timeout", "2"]) == 0
        assert time.monotonic() - began < 4.0
        assert process.wait(5) == -signal.SIGKILL
    finally:
        process.kill()
        process.communicate()


def test_a_slurm_that_hangs_is_bounded_by_the_timeout_and_never_a_refused_submission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("squeue", "scancel"):
        (folder / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    monkeypatch.setattr(verb, "KILL_SECONDS", 0.2)
    prepared(tmp_path / "root", tmp_path)
    began = time.monotonic()
    assert main(["stop", "--timeout", "3"]) == 9
    assert time.monotonic() - began < 30  # one hanging command alone may take 30 s otherwise
    said = capsys.readouterr().err
    assert "scancel 7 failed: scancel did not answer within" in said
    assert "Slurm could not be asked (squeue did not answer within" in said
    prepared(tmp_path / "root", tmp_path, {"backend": "slurm", "tag": "relax-demo-2"})
    assert main(["stop", "demo", "--timeout", "1"]) == 9
    assert "could not be asked whether the job of run 'demo' (attempt 2) exists" in capsys.readouterr().err


def test_the_newest_of_several_living_runs_is_meant_and_the_others_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: FakeBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(tmp_path / "root", tmp_path)
    (tmp_path / "root" / "demo").rename(tmp_path / "root" / "other")
    prepared(tmp_path / "root", tmp_path, {"backend": "slurm", "tag": "y", "job_id": "8", "cluster": None})
    done = Done(("squeue",), 0, "", "")
    rows = tuple(UserJob(job, "RUNNING", "") for job in ("7", "8"))
    monkeypatch.setattr(submit, "user_jobs", lambda **_: (rows, done))
    main(["stop"])
    assert "no run was named: stopping demo (attempt 1); also alive: other" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [False, True])
def test_an_interrupted_stop_says_how_far_it_got(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: FakeBackend,
    capsys: pytest.CaptureFixture[str],
    asked: bool,
) -> None:
    prepared(tmp_path / "root", tmp_path)

    def ask(*_: Any, **__: Any) -> dict[str, Any]:
        if not asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"state": "STOPPING"}

    monkeypatch.setattr(verb, "ask", ask)
    monkeypatch.setattr(verb.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["stop"]) == 143
    said = capsys.readouterr().err
    assert ("was asked to end and goes on ending" if asked else "was not asked to end yet") in said
    assert "its end is not confirmed, `relax-slurm stop demo` waits for it" in said
