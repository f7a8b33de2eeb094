"""`launch`: what is written and when, how it waits, how failures become exit codes, and that GPUs are given back."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.__main__ import main
from relax_slurm.cli import launch, ready
from relax_slurm.cli.progress import Progress
from relax_slurm.cli.ready import ReadyWait, failure
from relax_slurm.config.load import load
from relax_slurm.control import run_dir as run_dir_module
from relax_slurm.control.backends import BackendKind
from relax_slurm.control.run_dir import RunDir, find, launch_lock
from relax_slurm.control.runs import was_submitted
from relax_slurm.errors import (
    BindingMismatch,
    EngineFailed,
    RecoveryRequired,
    RelaxError,
    StartupFailed,
    SubmissionRefused,
    Unavailable,
)
from relax_slurm.slurm import submit as submit_module
from relax_slurm.slurm.command import Done
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.slurm.submit import AnswerLost
from tests.harness.wait import until
from tests.unit.cli.stage import FakeBackend, prepared, run_file, state_of


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "LOOK_SECONDS", (0.01, 0.05))
    monkeypatch.setattr(ready, "POLL_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(launch, "RELEASE_SECONDS", 0.3)
    monkeypatch.setattr(launch, "SILENT_SECONDS", 0.3)
    monkeypatch.setattr("relax_slurm.cli.common.LAG_SECONDS", 0.2)


class Stage:
    """A root of runs, a backend, and the answers of the coordinator."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.config = tmp_path / "root", run_file(tmp_path)
        self.backend = FakeBackend()
        self.answers: list[dict[str, Any] | Exception] = []
        self.asked: list[RunDir] = []
        monkeypatch.setenv("RELAX_RUNS_ROOT", str(self.root))
        monkeypatch.setattr(launch, "choose", lambda wanted, environ: BackendKind.SLURM)
        monkeypatch.setattr(launch, "backend_for", lambda kind, **_: self.backend)
        monkeypatch.setattr(ready, "ask", self.ask)

    def ask(self, run_dir: RunDir, kind: str, **_: Any) -> dict[str, Any]:
        self.asked.append(run_dir)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer | {"run_dir": str(run_dir.path), "attempt": run_dir.attempt}

    def launch(self, *words: str) -> int:
        return main(["launch", str(self.config), *words])

    @property
    def run_dir(self) -> RunDir:
        return find(self.root, "demo")


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    made = Stage(tmp_path, monkeypatch)
    made.answers = [Unavailable("not yet"), state_of(prepared(tmp_path / "elsewhere", tmp_path))]
    return made


def test_ready_is_printed_with_gateway_token_and_the_way_out(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.answers.insert(1, stage.answers[-1] | {"state": "STARTING"})  # type: ignore[operator]
    stage.answers.insert(1, stage.answers[-1] | {"gateway_url": None})  # type: ignore[operator]
    assert stage.launch() == 0
    out, err = capsys.readouterr()
    for text in ("demo  (READY)", "http://h:29999", str(stage.run_dir.token_file), "relax-slurm stop demo"):
        assert text in out
    assert "Slurm job 7 submitted" in err
    assert "STARTING: 1/2 nodes, replicas 1 READY, 1 STARTING" in err
    assert stage.run_dir.read("job.json") == {
        "backend": "slurm", "tag": stage.backend.submitted[0].tag, "job_id": "7", "cluster": None,
    }  # fmt: skip
    assert stage.backend.cancelled == []


def test_json_is_one_document_on_stdout(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.launch("--json") == 0
    document = json.loads(capsys.readouterr().out)
    for key in ("run", "attempt", "epoch", "state", "gateway_url", "token_file", "run_dir", "roles", "leases", "batch"):
        assert key in document


def test_a_dry_run_writes_and_submits_nothing(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.launch("--dry-run", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["state"] == "UNSUBMITTED"
    assert {"job.sbatch", "plan.json", "config.json"} <= set(document["files"])
    assert document["script"] == (stage.run_dir.path / "job.sbatch").read_text()
    assert stage.backend.submitted == []
    names = {path.name for path in stage.run_dir.path.iterdir()}
    assert {"config.json", "plan.json", "job.sbatch", "keys", "logs", "token"} <= names
    assert "job.json" not in names
    assert stage.launch("--dry-run") == 0  # no obstacle for the next one
    said = capsys.readouterr().out
    assert "#SBATCH --nodes=1" in said
    assert "stop" not in said


def test_detach_does_not_wait(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.launch("--detach", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["job_id"], document["state"]) == ("7", "PENDING")
    assert stage.asked == []


def test_the_jobs_mark_is_written_before_it_exists(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(submission: Any) -> JobRef:
        assert stage.run_dir.read("job.json") == {"backend": "slurm", "tag": submission.tag}
        raise KeyboardInterrupt

    monkeypatch.setattr(stage.backend, "submit", cut_off)
    assert stage.launch() == 130
    assert stage.run_dir.read("job.json")


def test_a_refusal_is_exit_4(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.backend.refusal = SubmissionRefused("sbatch refused the job: no such partition; look at sinfo")
    assert stage.launch() == 4
    assert "no such partition" in capsys.readouterr().err
    assert "no such partition" in (stage.run_dir.read("job.json") or {})["refused"]
    assert not was_submitted(stage.run_dir)


def test_a_lost_answer_leaves_the_mark_by_which_the_job_is_found(stage: Stage) -> None:
    stage.backend.refusal = AnswerLost("sbatch gave no job id")
    assert stage.launch() == 4
    assert was_submitted(stage.run_dir)


def test_plan_dry_run_and_launch_have_one_script(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    def planned() -> str:
        assert main(["plan", str(stage.config), "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["script"])

    first = planned()
    assert stage.launch("--dry-run") == 0
    assert (stage.run_dir.path / "job.sbatch").read_text() == first
    capsys.readouterr()
    second = planned()
    assert stage.launch("--detach") == 0
    assert stage.run_dir.attempt == 2
    assert (stage.run_dir.path / "job.sbatch").read_text() == second
    assert stage.backend.submitted[0].script == second


def test_a_job_that_can_never_start_is_refused_and_cancelled(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ready, "NEVER_SECONDS", 0.2)
    stage.answers = [Unavailable("nobody")]
    stage.backend.states, stage.backend.reason = [JobState.PENDING], "PartitionNodeLimit"
    assert stage.launch() == 4
    assert stage.backend.cancelled == ["7"]
    said = capsys.readouterr().err
    assert "job PENDING (PartitionNodeLimit): the partition does not give that many nodes" in said
    assert "can never start: Slurm has said PartitionNodeLimit for 0.2 s; the partition" in said


@pytest.mark.parametrize("reason", ["Resources", "PartitionDown", "ReqNodeNotAvail, UnavailableNodes:n3"])
def test_a_job_whose_reason_may_clear_is_waited_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reason: str
) -> None:
    monkeypatch.setattr(ready, "NEVER_SECONDS", 0.0)
    stage.answers = [Unavailable("nobody")]
    stage.backend.states, stage.backend.reason = [JobState.PENDING], reason
    waiting = wait(stage, prepared(stage.root, tmp_path))
    for _ in range(3):
        waiting._look_at_job()
    stage.backend.states, stage.backend.reason = [JobState.PENDING], "BadConstraints"
    with pytest.raises(SubmissionRefused, match="BadConstraints"):
        waiting._look_at_job()


def test_a_reason_that_passes_begins_anew(stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ready, "NEVER_SECONDS", 3600.0)
    waiting = wait(stage, prepared(stage.root, tmp_path))
    for state, reason, counted in (
        (JobState.PENDING, "AccountNotAllowed", True),
        (JobState.UNKNOWN, "timed out", True),
        (JobState.PENDING, "Priority", False),
        (JobState.PENDING, "None; AccountNotAllowed", True),
        (JobState.RUNNING, "", False),
    ):
        stage.backend.states, stage.backend.reason = [state], reason
        waiting._look_at_job()
        assert (waiting._never_since is not None) is counted, (state, reason)


def test_a_full_disk_is_said(stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stage.answers = [Unavailable("nobody")]
    stage.backend.states = [JobState.ENDED]
    real = run_dir_module.write_atomically
    monkeypatch.setattr(
        run_dir_module, "write_atomically", lambda path, text: (full if ".trial" in path.name else real)(path, text)
    )
    assert stage.launch() == 6
    said = capsys.readouterr().err
    assert "left no outcome: nothing can be written into" in said
    assert "No space left on device" in said


@pytest.mark.parametrize("nth", [1, 2])
def test_a_disk_that_is_full_when_the_job_is_written_down(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], nth: int
) -> None:
    real = RunDir.write_json
    written: list[str] = []

    def write(self: RunDir, name: str, value: Any) -> None:
        written.append(name)
        if written.count("job.json") == nth and name == "job.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, name, value)

    monkeypatch.setattr(RunDir, "write_json", write)
    assert stage.launch() == 2
    assert "No space left on device" in capsys.readouterr().err
    assert stage.backend.cancelled == ([] if nth == 1 else ["7"])  # no job that nobody knows


@pytest.mark.parametrize(
    ("outcome", "code", "text"),
    [
        ({"exit_code": 5, "error": {"message": "binding refused", "detail": {"rows": [{"node": "n7"}]}}}, 5, "n7"),
        ({"exit_code": 6, "error": {"message": "no model"}}, 6, "no model"),
        ({"exit_code": 7, "error": {"message": "engine failed"}}, 7, "engine failed"),
        ({"exit_code": 9, "error": {"message": "in doubt"}}, 9, "in doubt"),
        ({"exit_code": 0, "state": "STOPPED", "reason": "signal SIGTERM"}, 6, "signal SIGTERM"),
    ],
)
def test_an_outcome_becomes_an_exit_code_and_the_job_is_seen_to_end(
    stage: Stage, capsys: pytest.CaptureFixture[str], outcome: dict[str, Any], code: int, text: str
) -> None:
    stage.backend.states = [JobState.RUNNING, JobState.RUNNING, JobState.ENDED]
    submit = stage.backend.submit

    def submit_and_fail(submission: Any) -> JobRef:
        (submission.run_dir / "outcome.json").write_text(json.dumps(outcome))
        return submit(submission)

    stage.backend.submit = submit_and_fail  # type: ignore[method-assign]
    assert stage.launch() == code
    assert text in capsys.readouterr().err
    assert stage.backend.states == [JobState.ENDED]
    assert stage.backend.cancelled == []


def test_a_job_that_does_not_end_by_itself_is_ended(stage: Stage) -> None:
    submit = stage.backend.submit

    def submit_and_fail(submission: Any) -> JobRef:
        (submission.run_dir / "outcome.json").write_text(json.dumps({"exit_code": 5, "error": {"message": "x"}}))
        return submit(submission)

    stage.backend.submit = submit_and_fail  # type: ignore[method-assign]
    assert stage.launch() == 5
    assert stage.backend.cancelled == ["7"]


def test_not_ready_in_time_gives_the_job_back(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.answers = [Unavailable("nobody")]
    assert stage.launch("--timeout", "0.2") == 6
    assert stage.backend.cancelled == ["7"]
    assert "was not READY within 0.2 s" in capsys.readouterr().err


def test_a_job_that_is_over_without_an_outcome(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.answers = [Unavailable("nobody")]
    stage.backend.states, stage.backend.reason = [JobState.RUNNING, JobState.ENDED], "TIMEOUT"
    assert stage.launch() == 6
    assert "job 7 is over (TIMEOUT) and left no outcome" in capsys.readouterr().err


def test_ctrl_c_leaves_the_run_alone(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ready.time, "sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    assert stage.launch() == 130
    assert stage.backend.cancelled == []
    assert "interrupted (SIGINT); the run goes on (job 7)" in capsys.readouterr().err


def test_term_is_143_and_says_what_is_left(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ready.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert stage.launch() == 143
    assert "interrupted (SIGTERM); the run goes on (job 7)" in capsys.readouterr().err

    def in_submit(submission: Any) -> JobRef:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the signal comes first")

    monkeypatch.setattr(stage.backend, "submit", in_submit)
    stage.backend.states = [JobState.ENDED]
    assert stage.launch() == 143
    assert "the job was being submitted: `relax-slurm stop demo` ends it if there is one" in capsys.readouterr().err
    monkeypatch.setattr(launch, "prepare", in_submit_of(in_submit))
    assert stage.launch() == 143
    assert "interrupted (SIGTERM); nothing was submitted" in capsys.readouterr().err


def in_submit_of(work: Any) -> Any:
    return lambda *_: work(None)


def test_an_interrupt_while_a_failed_run_is_released(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.answers = [Unavailable("nobody")]

    def cancel(job: JobRef, budget_seconds: float | None = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stage.backend, "cancel", cancel)
    assert stage.launch("--timeout", "0.1") == 143
    said = capsys.readouterr().err
    assert "was not READY within 0.1 s" in said
    assert "job 7 may be there still, `relax-slurm stop demo` ends it" in said


def test_an_earlier_attempt_behind_a_dry_run_is_seen(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(stage.root, tmp_path)
    prepared(stage.root, tmp_path, {})
    assert stage.launch() == 2
    assert "exists already (attempt 1, slurm job 7)" in capsys.readouterr().err


def test_slurm_that_cannot_be_asked_for_a_mark(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(stage.root, tmp_path, {"backend": "slurm", "tag": "relax-demo-1-x"})
    silent = Done(("squeue",), None, "", "squeue did not answer within 20 s", timed_out=True)
    monkeypatch.setattr(submit_module, "search", lambda tag, **_: (None, silent))
    assert stage.launch() == 4
    assert "squeue did not answer within 20 s" in capsys.readouterr().err
    assert stage.backend.submitted == []


def test_a_second_run_of_that_name_is_refused_while_the_first_lives(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared(stage.root, tmp_path)
    assert stage.launch() == 2
    assert "exists already (attempt 1, slurm job 7)" in capsys.readouterr().err
    stage.backend.states, stage.backend.reason = [JobState.UNKNOWN], "squeue did not answer within 30 s"
    assert stage.launch() == 4  # nobody knows: not a reason to start a second one
    said = capsys.readouterr().err
    assert "Slurm does not answer (squeue did not answer within 30 s); asking it for 0.3 s" in said
    assert (
        "nothing was submitted: Slurm could not be asked whether slurm job 7 of run 'demo' (attempt 1) is over" in said
    )
    assert "its job is not over" not in said
    assert stage.backend.submitted == []
    stage.backend.states = [JobState.ENDED]
    assert stage.launch("--detach") == 0
    assert stage.run_dir.attempt == 2


def test_a_run_that_is_ending_is_waited_for(stage: Stage, tmp_path: Path) -> None:
    prepared(stage.root, tmp_path).write_json("outcome.json", {"state": "STOPPED"})
    stage.backend.states = [JobState.RUNNING, JobState.RUNNING, JobState.ENDED]
    assert stage.launch("--detach") == 0


def test_a_run_that_waits_to_run_again_is_not_waited_for(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "RELEASE_SECONDS", 60.0)
    first = prepared(stage.root, tmp_path)
    first.write_json("outcome.json", {"state": "STOPPED"})
    stage.backend.states, stage.backend.reason = [JobState.PENDING], "BeginTime"
    assert stage.launch() == 2
    said = capsys.readouterr().err
    assert "exists already (attempt 1, slurm job 7, requeued (BeginTime); attempt 1 ended with STOPPED)" in said
    first.next_attempt()
    stage.backend.states = [JobState.RUNNING]
    assert stage.launch() == 2
    assert "exists already (attempt 2, slurm job 7)" in capsys.readouterr().err


def test_a_run_that_is_started_again_while_it_is_waited_for(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "RELEASE_SECONDS", 60.0)
    first = prepared(stage.root, tmp_path)
    first.write_json("outcome.json", {"state": "STOPPED"})
    monkeypatch.setattr(launch.time, "sleep", lambda _: first.newest() is first and first.next_attempt())
    assert stage.launch() == 2
    assert "exists already (attempt 2, slurm job 7)" in capsys.readouterr().err


def test_two_launches_of_one_name_at_once(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    with launch_lock(stage.root, "demo"):
        assert stage.launch() == 2
    assert "another launch of run 'demo'" in capsys.readouterr().err
    assert stage.launch() == 0


def test_how_long_a_launch_waits(tmp_path: Path) -> None:
    args = argparse.Namespace(timeout=None)
    config = load(run_file(tmp_path))
    assert launch._limit(args, config) == 120.0 + 5.0 + 180.0 + 30.0
    assert launch._limit(argparse.Namespace(timeout=7), config) == 7.0


# --- the wait by itself --------------------------------------------------------------------------------------------


def wait(stage: Stage, run_dir: RunDir, **options: Any) -> ReadyWait:
    limits = {"limit_seconds": 30.0, "queue_seconds": None} | options
    return ReadyWait(run_dir, stage.backend, JobRef("7"), Progress(_Null()), **limits)


class _Null:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def test_time_in_the_queue_does_not_count(stage: Stage, tmp_path: Path) -> None:
    run_dir = prepared(stage.root, tmp_path)
    stage.answers = [Unavailable("x")] * 30 + [state_of(run_dir)]
    stage.backend.states = [JobState.PENDING] * 15 + [JobState.UNKNOWN] * 5 + [JobState.RUNNING]
    began = time.monotonic()
    assert wait(stage, run_dir, limit_seconds=0.6).wait()["state"] == "READY"
    assert time.monotonic() - began >= 0.3


def test_a_queue_that_is_too_long(stage: Stage, tmp_path: Path) -> None:
    stage.answers = [Unavailable("x")]
    stage.backend.states, stage.backend.reason = [JobState.PENDING], "Priority"
    with pytest.raises(StartupFailed, match=r"did not start within slurm.queue_seconds \(0.2 s\): Priority"):
        wait(stage, prepared(stage.root, tmp_path), queue_seconds=0.2).wait()


def test_a_job_that_slurm_starts_again_is_followed_into_its_new_attempt(stage: Stage, tmp_path: Path) -> None:
    first = prepared(stage.root, tmp_path)
    stage.answers = [Unavailable("x")]
    waiting = wait(stage, first)
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(waiting.wait()))
    thread.start()
    second = first.next_attempt()
    stage.answers = [state_of(second)]
    thread.join(10)
    assert found[0]["attempt"] == 2
    assert waiting.run_dir == second


def test_an_attempt_that_was_only_told_to_end_is_not_the_end_of_the_job(stage: Stage, tmp_path: Path) -> None:
    first = prepared(stage.root, tmp_path)
    first.write_json("outcome.json", {"exit_code": 0, "state": "STOPPED", "reason": "signal SIGTERM"})
    stage.backend.states = [JobState.RUNNING, JobState.PENDING]
    waiting = wait(stage, first)
    found: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: found.append(waiting.wait()))
    thread.start()
    until(lambda: stage.backend.polls > 3, 10, "the job is not looked at")
    assert stage.asked == []
    second = first.next_attempt()
    stage.answers = [state_of(second)]
    thread.join(10)
    assert found[0]["attempt"] == 2


def test_time_begins_again_with_the_job(stage: Stage, tmp_path: Path) -> None:
    stage.answers = [Unavailable("x")]
    waiting = wait(stage, prepared(stage.root, tmp_path))
    for state, running in (
        (JobState.PENDING, False),
        (JobState.RUNNING, True),
        (JobState.UNKNOWN, True),
        (JobState.PENDING, False),
        (JobState.DEGRADED, True),
    ):
        stage.backend.states = [state]
        waiting._look_at_job()
        assert (waiting._running_since is not None) is running, state


def test_a_slow_answer_makes_the_questions_rare(stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = prepared(stage.root, tmp_path)
    slept: list[float] = []
    now = [100.0]

    def ask(run_dir: RunDir, kind: str, **_: Any) -> dict[str, Any]:
        now[0] += 0.5  # what a coordinator of a thousand nodes may take
        return state_of(run_dir, "STARTING" if not slept else "READY")

    monkeypatch.setattr(ready, "ask", ask)
    monkeypatch.setattr(ready.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(ready.time, "sleep", slept.append)
    monkeypatch.setattr(ready, "LOOK_SECONDS", (0.1, 5.0))
    wait(stage, run_dir, limit_seconds=1e9).wait()
    assert slept == [2.0]


@pytest.mark.parametrize(
    ("code", "kind"), [(5, BindingMismatch), (7, EngineFailed), (9, RecoveryRequired), (99, StartupFailed)]
)
def test_the_class_of_a_failure(stage: Stage, tmp_path: Path, code: int, kind: type[RelaxError]) -> None:
    run_dir = prepared(stage.root, tmp_path)
    assert type(failure(run_dir, {"exit_code": code, "error": {"message": "m"}})) is kind
    assert failure(run_dir, {}).message == "run 'demo' ended before it was READY: None"
