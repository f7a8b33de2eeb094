"""The wait of `launch`: from a submitted job to a run that serves, or to the error it failed with."""

from __future__ import annotations

import time
from typing import Any

from relax_slurm.cli.common import ask, outcome_of
from relax_slurm.cli.progress import Progress
from relax_slurm.control.run_dir import RunDir, why_not_writable
from relax_slurm.control.runs import may_come_back
from relax_slurm.errors import (
    BindingMismatch,
    ConfigError,
    EngineFailed,
    PlanRefused,
    Preempted,
    RecoveryRequired,
    RelaxError,
    StartupFailed,
    SubmissionRefused,
    Unavailable,
)
from relax_slurm.slurm import explain
from relax_slurm.slurm.backend import Backend
from relax_slurm.slurm.job import JobRef, JobState, JobView
from relax_slurm.wire.client import RemoteError

LOOK_SECONDS = (0.1, 5.0)
"""Shortest and longest pause between two questions to the coordinator."""
POLL_SECONDS = (1.0, 10.0)
"""The same for the backend: Slurm's controller has other users."""
NEVER_SECONDS = 60.0
"""So long a reason that cannot clear by itself is watched before the job is given up: a controller may be reading its
configuration just then."""
_SHARE = 4.0
"""A pause is at least this many times as long as the answer took: a big run must not be kept busy by who waits."""
_BY_EXIT_CODE = {
    error.exit_code: error
    for error in (ConfigError, PlanRefused, BindingMismatch, StartupFailed, EngineFailed, Preempted, RecoveryRequired)
}


class ReadyWait:
    """Follows one job. `limit_seconds` counts while the job runs, `queue_seconds` while it is pending."""

    def __init__(
        self,
        run_dir: RunDir,
        backend: Backend,
        job: JobRef,
        progress: Progress,
        *,
        limit_seconds: float,
        queue_seconds: float | None,
    ) -> None:
        self.run_dir = run_dir
        """The attempt that the job runs in; a job that Slurm starts again runs in a new one."""
        self._backend, self._job, self._progress = backend, job, progress
        self._limit_seconds, self._queue_seconds = limit_seconds, queue_seconds
        self._pending_since = self._start = time.monotonic()
        self._running_since: float | None = None
        self._next_poll = self._start
        self._over = False
        self._never_since: float | None = None
        """Since when the job waits for something that does not come."""

    def wait(self) -> dict[str, Any]:
        """The state document of the run that serves; raises what the run failed with."""
        while True:
            self.run_dir = self.run_dir.newest()
            outcome = self.run_dir.read("outcome.json")
            if outcome is not None and (self._over or not may_come_back(outcome)):
                raise failure(self.run_dir, outcome)
            began = time.monotonic()
            state = self._state() if outcome is None else None
            if state is not None:
                self._progress.state(state)
                if state["state"] in ("READY", "DEGRADED") and state.get("gateway_url"):
                    return state
            took = time.monotonic() - began
            self._look_at_job()
            time.sleep(min(max(LOOK_SECONDS[0], _SHARE * took), LOOK_SECONDS[1]))

    def _state(self) -> dict[str, Any] | None:
        try:
            return ask(self.run_dir, "get_state", timeout_seconds=2.0)
        except (Unavailable, RemoteError):
            return None

    def _look_at_job(self) -> None:
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + min(max(POLL_SECONDS[0], (now - self._start) / 30), POLL_SECONDS[1])
        view = self._backend.poll(self._job)
        self._progress.job(view)
        self._over = view.over
        if view.over:
            if outcome_of(self.run_dir) is None:
                broken = why_not_writable(self.run_dir.path)
                raise StartupFailed(
                    f"job {self._job} is over ({view.reason or view.state}) and left no outcome: " + broken
                    if broken
                    else f"job {self._job} is over ({view.reason or view.state}) and left no outcome; "
                    f"see {self.run_dir.logs}"
                )
        elif view.state is JobState.PENDING:
            if self._running_since is not None:  # started again: its time begins again
                self._running_since, self._pending_since = None, now
        elif view.state is not JobState.UNKNOWN and self._running_since is None:
            self._running_since = now
        self._check_reason(now, view)
        self._check_limits(now, view.reason)

    def _check_reason(self, now: float, view: JobView) -> None:
        """A job that waits for what cannot come is given up; silence in between changes nothing."""
        if view.state is JobState.UNKNOWN:
            return
        if view.state is not JobState.PENDING or not explain.never_starts(view.reason):
            self._never_since = None
            return
        self._never_since = now if self._never_since is None else self._never_since
        if now - self._never_since >= NEVER_SECONDS:
            raise SubmissionRefused(
                f"job {self._job} of run {self.run_dir.run!r} can never start: Slurm has said {view.reason} for "
                f"{NEVER_SECONDS:g} s; {explain.pending(view.reason)}"
            )

    def _check_limits(self, now: float, reason: str) -> None:
        run, files = self.run_dir.run, f"{self.run_dir.path / 'events.jsonl'} and {self.run_dir.logs}"
        if self._running_since is not None:
            if now - self._running_since > self._limit_seconds:
                raise StartupFailed(
                    f"run {run!r} was not READY within {self._limit_seconds:g} s after its job started; see {files}"
                )
        elif self._queue_seconds is not None and now - self._pending_since > self._queue_seconds:
            raise StartupFailed(
                f"job {self._job} of run {run!r} did not start within slurm.queue_seconds "
                f"({self._queue_seconds:g} s): {reason or 'Slurm names no reason'}"
            )


def failure(run_dir: RunDir, outcome: dict[str, Any], before: str = "") -> RelaxError:
    """The outcome of a run that failed, as the error it failed with; its sentence stands behind `before`."""
    body = outcome.get("error") or {}
    message = before + str(
        body.get("message") or f"run {run_dir.run!r} ended before it was READY: {outcome.get('reason')}"
    )
    error = _BY_EXIT_CODE.get(int(outcome.get("exit_code", 6)), StartupFailed)
    if error is BindingMismatch:
        return BindingMismatch(message, rows=(body.get("detail") or {}).get("rows"))
    return error(message)
