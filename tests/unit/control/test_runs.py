"""Which run a verb means: what was submitted and goes on, before what is over, and never a folder that was prepared."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control import runs
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.runs import Life, choose, choose_to_end, job_of, submitted, survey, was_submitted
from relax_slurm.errors import ConfigError
from relax_slurm.slurm import submit
from relax_slurm.slurm.command import Done
from relax_slurm.slurm.job import JobRef, JobState, JobView

REFUSED = {"backend": "slurm", "tag": "t", "refused": "sbatch refused the job: no such partition"}


class Slurm:
    """squeue's list of this user's jobs, and how often it was asked for."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.comments: dict[str, str] = {}
        self.silent = False
        self.asked = 0

    def user_jobs(self, **_: Any) -> tuple[tuple[submit.UserJob, ...], Done]:
        self.asked += 1
        if self.silent:
            return (), Done(("squeue",), None, "", "squeue did not answer within 30 s", timed_out=True)
        rows = (submit.UserJob(job, state, self.comments.get(job, "")) for job, state in self.jobs.items())
        return tuple(rows), Done(("squeue",), 0, "", "")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm()
    monkeypatch.setattr(submit, "user_jobs", made.user_jobs)
    return made


def attempt(root: Path, run: str, job: dict[str, Any] | str | None, *, age: int, outcome: int | None = None) -> RunDir:
    """An attempt whose job was written down `age` seconds ago."""
    made = RunDir.create(root, run)
    made.write_json("plan.json", {})
    made.make_latest()
    if isinstance(job, str):
        job = {"backend": "slurm", "tag": f"relax-{run}", "job_id": job, "cluster": None}
    if job is not None:
        made.write_json("job.json", job)
        os.utime(made.path / "job.json", (1e9 - age, 1e9 - age))
    if outcome is not None:
        made.write_json("outcome.json", {"state": "STOPPED", "exit_code": outcome})
    return made


@pytest.mark.parametrize("later", [None, REFUSED], ids=["dry-run", "refused"])
@pytest.mark.parametrize("pick", [choose, lambda root, run: choose_to_end(root, run)[0]])
def test_what_was_never_submitted_is_never_meant(tmp_path: Path, slurm: Slurm, later: Any, pick: Any) -> None:
    real = attempt(tmp_path, "real", "7", age=100)
    other = attempt(tmp_path, "other", later, age=0)
    slurm.jobs["7"] = "RUNNING"
    assert pick(tmp_path, None) == real
    assert pick(tmp_path, "other") == other
    assert (was_submitted(real), was_submitted(other)) == (True, False)
    assert job_of(other) is None


@pytest.mark.parametrize("later", [None, REFUSED], ids=["dry-run", "refused"])
def test_an_attempt_that_lives_behind_a_prepared_one_of_its_name(tmp_path: Path, slurm: Slurm, later: Any) -> None:
    first = attempt(tmp_path, "demo", {"backend": "slurm", "tag": "relax-demo-1"}, age=100)
    second = attempt(tmp_path, "demo", later, age=0)
    slurm.jobs["9"], slurm.comments["9"] = "PENDING", "mine,relax-demo-1"
    assert choose(tmp_path, "demo") == first
    slurm.jobs["9"] = "CANCELLED"
    assert choose(tmp_path, "demo") == second


def test_what_goes_on_comes_before_what_is_over(tmp_path: Path, slurm: Slurm) -> None:
    attempt(tmp_path, "killed", "1", age=500)  # no outcome, and Slurm has forgotten the job
    old = attempt(tmp_path, "old", "2", age=400)
    attempt(tmp_path, "failed", "3", age=300, outcome=7)
    requeued = attempt(tmp_path, "requeued", "4", age=200, outcome=0)
    newest = attempt(tmp_path, "newest", "5", age=100, outcome=0)
    slurm.jobs = {"2": "RUNNING", "3": "COMPLETING", "5": "COMPLETED"}
    assert choose(tmp_path, None) == old
    assert slurm.asked == 1
    slurm.jobs["4"] = "PENDING"
    assert choose(tmp_path, None) == requeued
    assert choose_to_end(tmp_path, None) == (requeued, ["old"])
    slurm.jobs = {}
    assert (choose(tmp_path, None), []) == choose_to_end(tmp_path, None) == (newest, [])


def test_silence_is_not_over(tmp_path: Path, slurm: Slurm) -> None:
    lives = attempt(tmp_path, "lives", "1", age=200)
    attempt(tmp_path, "ended", "2", age=100, outcome=0)
    slurm.silent = True
    assert [(found.run_dir.run, found.life) for found in survey(submitted(tmp_path))] == [
        ("ended", Life.OVER),
        ("lives", Life.UNKNOWN),
    ]
    assert (choose(tmp_path, None), []) == choose_to_end(tmp_path, None) == (lives, [])


def test_other_backends_and_clusters_are_asked_one_by_one(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = {"11@1": JobState.GONE, "12@1": JobState.RUNNING, "13": JobState.UNKNOWN}

    class Backend:
        def poll(self, job: JobRef, seconds: float) -> JobView:
            return JobView(views[job.job_id])

    monkeypatch.setattr(runs, "backend_for", lambda kind: Backend())
    attempt(tmp_path, "gone", {"backend": "local", "tag": "x", "job_id": "11@1"}, age=1)
    attempt(tmp_path, "cut", {"backend": "local", "tag": "x"}, age=2)
    here = attempt(tmp_path, "here", {"backend": "borrowed", "tag": "x", "job_id": "12@1"}, age=3)
    attempt(tmp_path, "far", {"backend": "slurm", "tag": "x", "job_id": "13", "cluster": "alpha"}, age=4)
    lives = [found.life for found in survey(submitted(tmp_path))]
    assert lives == [Life.OVER, Life.OVER, Life.ALIVE, Life.UNKNOWN]
    assert choose(tmp_path, None) == here
    assert slurm.asked == 0


def test_one_run_alone_needs_no_question(tmp_path: Path, slurm: Slurm) -> None:
    with pytest.raises(ConfigError, match="no run of this user under"):
        choose(tmp_path, None)
    only = attempt(tmp_path, "only", "1", age=0)
    attempt(tmp_path, "dry", None, age=0)
    assert (choose(tmp_path, None), []) == choose_to_end(tmp_path, None) == (only, [])
    assert slurm.asked == 0
    with pytest.raises(ConfigError, match="known runs: dry, only"):
        choose(tmp_path, "other")
