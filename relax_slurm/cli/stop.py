"""`relax-slurm stop [RUN]`: ask the coordinator, wait for the outcome and for the job's end, cancel what is left."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from relax_slurm.cli.common import LAG_SECONDS, add_run_argument, ask, outcome_of, root_of
from relax_slurm.cli.interrupted import told
from relax_slurm.cli.progress import Progress
from relax_slurm.config.load import from_resolved
from relax_slurm.control.backends import BackendKind, backend_for
from relax_slurm.control.replica_commands import ENDING_SECONDS
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.runs import choose_to_end, job_of
from relax_slurm.errors import RecoveryRequired, Unavailable
from relax_slurm.slurm.backend import Backend, CancelFailed
from relax_slurm.slurm.command import SECONDS
from relax_slurm.slurm.job import JobRef, JobState, JobView
from relax_slurm.wire.client import RemoteError

FORCE_SECONDS = 30.0
"""The part of the time (half of a short one) that is kept for ending what did not end when it was asked."""
KILL_SECONDS = 1.0
"""A local supervisor gets at least this long to be seen to end, also where the time is shorter or up."""
COMMAND_SHARE = 3.0
"""One command of the backend gets at most this part of the time that is left: one that hangs leaves time for others."""
AGAIN_SECONDS = 2.0
"""A job that waits or runs a new attempt so long after it was cancelled was requeued meanwhile: cancelled once more."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long everything may take, a forced end included "
        "(default: what requests and engines are given, and a minute)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 when nothing of the run is left; 9 when the end of something is not proven."""
    run_dir, others = choose_to_end(root_of(args), args.run)
    progress = Progress(sys.stderr)
    if args.run is None:
        beside = f"; also alive: {', '.join(others[:8])}" if others else ""
        progress.say(f"no run was named: stopping {run_dir.run} (attempt {run_dir.attempt}){beside}")
    outcome = stop(run_dir, progress, _default_seconds(run_dir) if args.timeout is None else args.timeout)
    if args.json:
        print(json.dumps(outcome, indent=2))
    else:
        print(f"run {run_dir.run} is {outcome['state']}")
    unproven = outcome.get("unproven") or []
    if unproven:
        raise RecoveryRequired(
            f"run {run_dir.run!r} ended, but the end of {', '.join(unproven)} is not proven; "
            f"look at their nodes before the GPUs are used again ({run_dir.path / 'events.jsonl'})"
        )
    return 0


def _default_seconds(run_dir: RunDir) -> float:
    """Requests may drain, a sidecar ends its engines, the supervisor ends the sidecars; then an end may be forced."""
    config = from_resolved((run_dir.path / "config.json").read_text())
    return config.control.drain_seconds + ENDING_SECONDS + 30.0 + FORCE_SECONDS


def stop(run_dir: RunDir, progress: Progress, timeout_seconds: float) -> dict[str, Any]:
    """End the run and answer its outcome. A borrowed allocation stays; only our supervisor and steps end.

    `timeout_seconds` covers everything; the last part of it is kept for ending what did not end when asked.
    """
    began = time.monotonic()
    with told(lambda: f"nothing of run {run_dir.run} was asked to end; `relax-slurm stop {run_dir.run}` ends it"):
        job = job_of(run_dir, seconds=min(SECONDS, max(timeout_seconds / COMMAND_SHARE, KILL_SECONDS)))
    if job is None:
        return {"run": run_dir.run, "state": "UNSUBMITTED"}
    ending = _Stop(run_dir, backend_for(job[0]), *job, progress, timeout_seconds, began)
    with told(ending.so_far):
        return ending.to_the_end()


class _Stop:
    """The end of one job, whichever attempt it runs."""

    def __init__(
        self,
        run_dir: RunDir,
        backend: Backend,
        kind: str,
        job: JobRef,
        progress: Progress,
        timeout_seconds: float,
        began: float,
    ) -> None:
        self._run_dir, self._backend, self._kind, self._job = run_dir, backend, kind, job
        self._progress, self._timeout_seconds = progress, timeout_seconds
        self._deadline = began + timeout_seconds
        self._force_seconds = min(FORCE_SECONDS, timeout_seconds / 2)
        self._asked: int | None = None
        """The attempt whose coordinator took the request."""
        self._cancelled: float | None = None
        """When the job was cancelled last."""
        self._cancelled_attempt = run_dir.attempt
        self._refused_at: float | None = None
        """When the backend did not answer the last request to cancel."""

    def so_far(self) -> str:
        """What has been done, for somebody who does not want to wait for the end."""
        run = self._run_dir.run
        if self._cancelled is not None and self._refused_at is None:
            done = f"the {_noun(self._kind)} {self._job} of run {run} was told to end"
        elif self._asked is not None:
            done = f"run {run} was asked to end and goes on ending"
        else:
            done = f"run {run} was not asked to end yet"
        return f"{done}; its end is not confirmed, `relax-slurm stop {run}` waits for it"

    def to_the_end(self) -> dict[str, Any]:
        """Ask, look and cancel until the job is over; `RecoveryRequired` when it is not in time."""
        while True:
            self._run_dir = self._run_dir.newest()
            view = self._backend.poll(self._job, self._share())
            self._progress.job(view)
            if view.over:
                return self._outcome()
            left = self._deadline - time.monotonic()
            if left <= 0 and self._cancelled is not None:
                raise self._not_confirmed(view)
            if self._cancelled is None:
                self._end_in_good_order(view, left)
            elif self._refused_at is not None and time.monotonic() - self._refused_at > AGAIN_SECONDS:
                self._cancel("the request to end it was not answered")
            elif self._runs_again(view) and time.monotonic() - self._cancelled > AGAIN_SECONDS:
                self._cancel("it was put back into the queue")
            time.sleep(0.2)

    def _share(self) -> float:
        """Seconds that the next command of the backend may take."""
        return max((self._deadline - time.monotonic()) / COMMAND_SHARE, KILL_SECONDS)

    def _not_confirmed(self, view: JobView) -> RecoveryRequired:
        """Why the end is in doubt. Slurm's silence is said as that, never as a state of the job."""
        what = f"{self._kind} job {self._job} of run {self._run_dir.run!r}"
        outcome = self._run_dir.read("outcome.json")
        ended = (
            "" if outcome is None else f" (attempt {self._run_dir.attempt} itself ended with {outcome.get('state')})"
        )
        if view.state is JobState.UNKNOWN:
            return RecoveryRequired(
                f"the end of {what} is not confirmed{ended}: Slurm could not be asked ({view.reason}); "
                f"run `relax-slurm stop {self._run_dir.run}` again when `squeue` answers"
            )
        return RecoveryRequired(
            f"{what} is still {view.state} after it was cancelled{ended}; look at it with squeue and at its nodes"
        )

    def _runs_again(self, view: JobView) -> bool:
        return view.state is JobState.PENDING or self._run_dir.attempt > self._cancelled_attempt

    def _end_in_good_order(self, view: JobView, left: float) -> None:
        """The newest attempt is asked once; where nobody can be asked or time runs out, the job is cancelled."""
        attempt, ended = self._run_dir.attempt, self._run_dir.read("outcome.json") is not None
        if view.state is JobState.PENDING:
            self._cancel("the job waits in the queue")
        elif left <= self._force_seconds:
            self._cancel(f"not over after {self._timeout_seconds - self._force_seconds:g} s")
        elif self._asked == attempt or (ended and view.state is JobState.UNKNOWN):
            return
        elif ended:
            # Nobody asked this attempt to end: the job may be on its way back into the queue.
            self._cancel(f"attempt {attempt} has ended and its job has not")
        else:
            self._ask(attempt, left)

    def _ask(self, attempt: int, left: float) -> None:
        try:
            ask(self._run_dir, "stop", timeout_seconds=min(5.0, left), reason="relax-slurm stop")
        except (Unavailable, RemoteError) as error:
            self._cancel(f"no coordinator to ask ({error.message})")
        else:
            self._asked = attempt
            self._progress.say("asked the coordinator to stop")

    def _cancel(self, why: str) -> None:
        self._progress.say(f"{why}; ending the {_noun(self._kind)}")
        local = self._kind != BackendKind.SLURM  # a local cancel waits for the end; scancel does not
        budget = max(self._deadline - time.monotonic(), KILL_SECONDS) if local else self._share()
        self._refused_at = None
        try:
            self._backend.cancel(self._job, budget)
        except CancelFailed as error:
            if not error.silent:
                raise
            self._progress.say(error.message)
            self._refused_at = time.monotonic()
        self._cancelled, self._cancelled_attempt = time.monotonic(), self._run_dir.attempt

    def _outcome(self) -> dict[str, Any]:
        lag = LAG_SECONDS if self._cancelled is None else 0.0
        left = max(self._deadline - time.monotonic(), 0.0)
        return outcome_of(self._run_dir.newest(), min(lag, left)) or {
            "run": self._run_dir.run,
            "state": "STOPPED",
            "reason": "the job was ended",
        }


def _noun(kind: str) -> str:
    return "job" if kind == BackendKind.SLURM else "supervisor"
