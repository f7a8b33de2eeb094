"""Which run a verb means: the one that is named, else the newest that was submitted and is not over.

A folder alone is no run: `launch --dry-run` and a launch that Slurm refused leave one too. What was submitted has a
`job.json` that does not say `refused`; whether it is over is the backend's to say, and silence is not "over".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from relax_slurm.control.backends import BackendKind, backend_for
from relax_slurm.control.run_dir import RunDir, attempts_of, find
from relax_slurm.errors import ConfigError, Preempted, RecoveryRequired
from relax_slurm.slurm import submit
from relax_slurm.slurm.command import SECONDS, Done
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.slurm.watch import ENDED


class JobUnknown(RecoveryRequired):
    """Nobody could say whether a job exists, or what became of it."""

    code = "job_unknown"


class Life(StrEnum):
    """Whether a submitted run goes on."""

    ALIVE = "alive"
    """The backend has its job, waiting or running."""
    UNKNOWN = "unknown"
    """It left no outcome and the backend could not be asked: not a reason to take it for over."""
    OVER = "over"
    """Its job is gone."""


@dataclass(frozen=True, slots=True)
class Found:
    """A submitted attempt and whether it goes on."""

    run_dir: RunDir
    life: Life


def was_submitted(run_dir: RunDir) -> bool:
    """Whether a backend took (or may have taken) this attempt."""
    body = run_dir.read("job.json")
    return body is not None and "refused" not in body


def job_of(run_dir: RunDir, *, seconds: float = SECONDS) -> tuple[str, JobRef] | None:
    """Backend kind and job of an attempt; None when it was never submitted.

    A launch that was cut off between submission and writing down the job's id has left the job's mark, by which Slurm
    knows it. `JobUnknown` when Slurm cannot be asked for it.
    """
    body = run_dir.read("job.json")
    if body is None or "refused" in body:
        return None
    kind = str(body["backend"])
    if body.get("job_id"):
        return kind, _reference(body)
    if kind != BackendKind.SLURM:
        return None
    found, asked = submit.search(str(body.get("tag")), seconds=seconds)
    if found is None and not asked.ok:
        raise JobUnknown(
            f"Slurm could not be asked whether the job of run {run_dir.run!r} (attempt {run_dir.attempt}) exists: "
            f"{asked.words}; try again when `squeue` answers"
        )
    return None if found is None else (kind, found)


def submitted(root: Path, run: str | None = None) -> list[RunDir]:
    """The newest submitted attempt of every run (or of one), newest first."""
    found: list[tuple[float, RunDir]] = []
    for parent in [root / run] if run else [entry.parent for entry in root.glob("*/latest")]:
        for attempt in attempts_of(parent):
            if was_submitted(attempt):
                found.append(((attempt.path / "job.json").stat().st_mtime, attempt))
                break
    return [attempt for _, attempt in sorted(found, key=lambda pair: pair[0], reverse=True)]


def survey(candidates: Sequence[RunDir], *, seconds: float = SECONDS) -> list[Found]:
    """Whether each goes on. Slurm is asked at most once for all of this user's jobs."""
    bodies = {entry.path: entry.read("job.json") or {} for entry in candidates}
    outcomes = {entry.path: entry.read("outcome.json") for entry in candidates}
    asked: tuple[tuple[submit.UserJob, ...], Done] | None = None
    found = []
    for entry in candidates:
        body, outcome = bodies[entry.path], outcomes[entry.path]
        if outcome is not None and not may_come_back(outcome):
            life = Life.OVER
        elif body.get("backend") != BackendKind.SLURM or body.get("cluster"):
            life = _poll(body, outcome, seconds)
        else:
            asked = asked or submit.user_jobs(seconds=seconds)
            life = _among(body, outcome, *asked)
        found.append(Found(entry, life))
    return found


def choose(root: Path, run: str | None) -> RunDir:
    """The attempt that RUN means; without RUN the newest submitted run that is not over, else the newest submitted."""
    if run:
        return _named(root, run)
    candidates = _candidates(root)
    if len(candidates) == 1:
        return candidates[0]
    return _first(survey(candidates))


def choose_to_end(root: Path, run: str | None) -> tuple[RunDir, list[str]]:
    """`choose` for a verb that ends a run, and without RUN also the names of the other runs that are alive."""
    if run:
        return _named(root, run), []
    candidates = _candidates(root)
    if len(candidates) == 1:
        return candidates[0], []
    found = survey(candidates)
    chosen = _first(found)
    return chosen, [entry.run_dir.run for entry in found if entry.life is Life.ALIVE and entry.run_dir != chosen]


def may_come_back(outcome: dict[str, Any]) -> bool:
    """Whether the attempt was only told to end, as Slurm does before it starts the job again."""
    return outcome.get("exit_code") in (0, Preempted.exit_code)


def _named(root: Path, run: str) -> RunDir:
    latest = find(root, run)
    if "/" in run or was_submitted(latest):
        return latest
    # The newest folder was only prepared. An earlier attempt whose launch nobody saw end may still have a job.
    earlier = survey(submitted(root, run))
    return next((entry.run_dir for entry in earlier if entry.life is not Life.OVER), latest)


def _candidates(root: Path) -> list[RunDir]:
    found = submitted(root)
    if not found:
        prepared = sorted(entry.parent.name for entry in root.glob("*/latest"))
        if prepared:
            raise ConfigError(
                f"no run of this user under {root} was submitted (only prepared or refused: "
                f"{', '.join(prepared[:8])}); name one of them, or start one with `relax-slurm launch CONFIG`"
            )
        raise ConfigError(f"no run of this user under {root}; start one with `relax-slurm launch CONFIG`")
    return found


def _first(found: list[Found]) -> RunDir:
    return next((entry.run_dir for entry in found if entry.life is not Life.OVER), found[0].run_dir)


def _reference(body: dict[str, Any]) -> JobRef:
    return JobRef(str(body["job_id"]), body.get("cluster"))


def _poll(body: dict[str, Any], outcome: dict[str, Any] | None, seconds: float) -> Life:
    if not body.get("job_id"):
        return Life.OVER  # only Slurm knows a job by its mark
    view = backend_for(str(body["backend"])).poll(_reference(body), seconds)
    if view.state is JobState.UNKNOWN:
        return _silent(outcome)
    return Life.OVER if view.over else Life.ALIVE


def _among(body: dict[str, Any], outcome: dict[str, Any] | None, jobs: tuple[submit.UserJob, ...], done: Done) -> Life:
    if not done.ok:
        return _silent(outcome)
    tag = str(body.get("tag"))
    mine = [job for job in jobs if (job.job_id == str(body["job_id"]) if body.get("job_id") else job.marked(tag))]
    return Life.ALIVE if any(job.state not in ENDED for job in mine) else Life.OVER


def _silent(outcome: dict[str, Any] | None) -> Life:
    return Life.UNKNOWN if outcome is None else Life.OVER
