"""How a run gets its nodes. Two backends with the same three verbs: Slurm here, this machine in `control`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from relax_slurm.errors import RecoveryRequired
from relax_slurm.slurm.command import SECONDS, run
from relax_slurm.slurm.job import JobRef, JobView
from relax_slurm.slurm.submit import Submission, answer_lost
from relax_slurm.slurm.watch import Tracker


class Backend(Protocol):
    """Starts the supervisor of one attempt somewhere, tells its state, ends it. All calls block, for a bounded time."""

    def submit(self, submission: Submission) -> JobRef:
        """Start an attempt. SubmissionRefused when the backend does not take it."""
        ...

    def poll(self, job: JobRef, budget_seconds: float | None = None) -> JobView:
        """Look at a job now, for at most `budget_seconds` where less than usual.

        Never raises because the backend could not be asked: that is JobState.UNKNOWN.
        """
        ...

    def cancel(self, job: JobRef, budget_seconds: float | None = None) -> None:
        """Ask for the end of a job; look with `poll` whether it came. A job that is not there is no error.

        CancelFailed when the backend did not take the request.
        """
        ...


class CancelFailed(RecoveryRequired):
    """The request to end a job was not taken, so the job may still run. `silent`: the backend did not answer."""

    code = "cancel_failed"

    def __init__(self, message: str, *, silent: bool) -> None:
        super().__init__(message)
        self.silent = silent


class SlurmBackend:
    """The Slurm of this machine's SLURM_CONF. Submits through submitit, looks with squeue, cancels with scancel."""

    def __init__(self, *, seconds: float = SECONDS, environ: Mapping[str, str] | None = None) -> None:
        self._seconds = seconds
        self._environ = environ
        self._trackers: dict[str, Tracker] = {}

    def submit(self, submission: Submission) -> JobRef:
        """See `Backend.submit`."""
        from relax_slurm.slurm.executor import HetSlurmExecutor

        environ = os.environ if self._environ is None else self._environ
        executor = HetSlurmExecutor(submission, environ=environ, seconds=self._seconds)
        job = executor.submit_job()
        return JobRef(job.job_id, executor.cluster)

    def poll(self, job: JobRef, budget_seconds: float | None = None) -> JobView:
        """See `Backend.poll`."""
        tracker = self._trackers.get(str(job))
        if tracker is None:
            tracker = self._trackers[str(job)] = Tracker(job, seconds=self._seconds, env=self._environ)
        return tracker.poll(self._within(budget_seconds))

    def cancel(self, job: JobRef, budget_seconds: float | None = None) -> None:
        """See `Backend.cancel`. Cancelling the leader cancels every component."""
        argv = ["scancel", *([] if job.cluster is None else [f"--clusters={job.cluster}"]), job.job_id]
        done = run(argv, seconds=self._within(budget_seconds), env=self._environ)
        if not done.ok and not done.no_such_job:
            raise CancelFailed(
                f"scancel {job} failed: {done.words}; the job may still run, so try `relax-slurm stop` again",
                silent=answer_lost(done),
            )

    def _within(self, budget_seconds: float | None) -> float:
        return self._seconds if budget_seconds is None else min(self._seconds, budget_seconds)
