"""The local backend: a process of its own session, known by pid and start, over when everything it started is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_slurm.control import local
from relax_slurm.control.backends import BackendKind, backend_for, choose
from relax_slurm.control.local import LocalBackend
from relax_slurm.errors import ConfigError, SubmissionRefused
from relax_slurm.slurm.backend import SlurmBackend
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.slurm.submit import Submission
from relax_slurm.wire.parent import PARENT_VARIABLE
from tests.harness.wait import until

CHILD = (
    "import os, subprocess, sys, time\n"
    "env = dict(os.environ, RELAX_PARENT_PID=str(os.getpid()))\n"
    "if sys.argv[1] == 'child': subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], env=env)\n"
    "print('up', flush=True)\n"
    "if sys.argv[1] == 'deaf': __import__('signal').signal(15, 1)\n"
    "time.sleep(60 if sys.argv[1] != 'short' else 0)\n"
)


@pytest.fixture
def backend() -> Iterator[LocalBackend]:
    made = LocalBackend()
    yield made
    for pid, child in made._children.items():
        for left in local._tied_to(pid):
            os.kill(left, signal.SIGKILL)
        child.kill()
        child.wait()


def submit(backend: LocalBackend, tmp_path: Path, what: str = "plain") -> JobRef:
    (tmp_path / "logs").mkdir(exist_ok=True)
    command = (sys.executable, "-u", "-c", CHILD, what)
    job = backend.submit(Submission("r", 1, "tag", tmp_path, "", command))
    until(lambda: "up" in (tmp_path / "logs" / "head_supervisor.log").read_text(), 10, "not started")
    return job


def test_from_submit_to_cancel(backend: LocalBackend, tmp_path: Path) -> None:
    job = submit(backend, tmp_path)
    pid = int(job.job_id.partition("@")[0])
    assert os.getsid(pid) == pid
    assert backend.poll(job).state is JobState.RUNNING
    assert LocalBackend().poll(job).state is JobState.RUNNING  # another process looks, for instance `status`
    backend.cancel(job)
    assert backend.poll(job).state is JobState.GONE
    backend.cancel(job)  # again is no error


def test_the_end_is_seen_and_no_zombie_stays(backend: LocalBackend, tmp_path: Path) -> None:
    job = submit(backend, tmp_path, "short")
    until(lambda: backend.poll(job).over, 10, "still there")


def test_one_that_does_not_listen_is_killed(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "CANCEL_SECONDS", (0.3, 5.0))
    job = submit(backend, tmp_path, "deaf")
    time.sleep(0.1)
    backend.cancel(job)
    assert backend.poll(job).over


def test_it_is_not_over_while_something_it_started_lives(backend: LocalBackend, tmp_path: Path) -> None:
    job = submit(backend, tmp_path, "child")
    pid = int(job.job_id.partition("@")[0])
    until(lambda: len(local._tied_to(pid)) == 1, 10, "no child")
    os.kill(pid, signal.SIGKILL)
    until(lambda: backend.poll(job).reason, 10, "not seen")
    view = backend.poll(job)
    assert (view.state, view.over) == (JobState.RUNNING, False)
    assert "1 of its processes" in view.reason
    os.kill(local._tied_to(pid)[0], signal.SIGKILL)
    until(lambda: backend.poll(job).over, 10, "still there")


def test_a_pid_that_is_somebody_elses_now_is_not_ours() -> None:
    backend = LocalBackend()
    other = JobRef(f"{os.getpid()}@1")
    assert backend.poll(other).state is JobState.GONE
    backend.cancel(other)  # would have been the end of this test
    for wrong in ("7", "x@y", "1@5", "-3@5", ""):
        with pytest.raises(SubmissionRefused, match="wanted PID@START"):
            backend.poll(JobRef(wrong))


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(SubmissionRefused, match="cannot start /none"):
        LocalBackend().submit(Submission("r", 1, "tag", tmp_path, "", ("/none",)))


def test_which_backend(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\n")
    (tmp_path / "sbatch").chmod(0o755)
    slurm, none = {"PATH": str(tmp_path)}, {"PATH": "/nowhere"}
    assert choose("auto", slurm) is BackendKind.SLURM
    assert choose("auto", none) is BackendKind.LOCAL
    assert choose("slurm", slurm) is BackendKind.SLURM
    assert choose("slurm", slurm | {"SLURM_JOB_ID": "7"}) is BackendKind.BORROWED
    assert choose("auto", none | {"SLURM_JOB_ID": "7"}) is BackendKind.BORROWED
    assert choose("local", slurm | {"SLURM_JOB_ID": "7"}) is BackendKind.LOCAL
    with pytest.raises(ConfigError, match="no sbatch on the PATH"):
        choose("slurm", none)
    assert isinstance(backend_for("slurm"), SlurmBackend)
    for kind in ("local", "borrowed"):
        assert isinstance(backend_for(kind), LocalBackend)


def test_a_child_is_tied_to_the_parent_that_is_named(tmp_path: Path) -> None:
    program = "from relax_slurm.wire.parent import end_with_parent; end_with_parent(); print('tied')"
    env = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    argv = [sys.executable, "-c", program]
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout == "tied\n"
    gone = subprocess.run(argv, env=env | {PARENT_VARIABLE: "1"}, capture_output=True, text=True, check=False)
    assert gone.returncode == 1
    assert "was gone before" in gone.stderr
