"""The local backend: the supervisor as a process of its own session on this machine, behind `slurm.backend.Backend`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from relax_slurm.control.logs import open_log
from relax_slurm.errors import SubmissionRefused
from relax_slurm.slurm.job import ComponentView, JobRef, JobState, JobView
from relax_slurm.slurm.submit import Submission
from relax_slurm.wire.parent import PARENT_VARIABLE

CANCEL_SECONDS = (90.0, 10.0)
"""How long a supervisor may take after TERM (it ends engines, and a coordinator that hangs) and after KILL."""


class LocalBackend:
    """Starts, looks at and ends supervisors. A job id is `PID@START`, so that a reused pid is never ours."""

    def __init__(self) -> None:
        self._children: dict[int, subprocess.Popen[bytes]] = {}

    def submit(self, submission: Submission) -> JobRef:
        """See `Backend.submit`."""
        log = submission.run_dir / "logs" / "head_supervisor.log"
        try:
            with open_log(log) as output:
                child = subprocess.Popen(
                    submission.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            raise SubmissionRefused(f"cannot start {submission.command[0]}: {error.strerror}") from None
        self._children[child.pid] = child
        return JobRef(f"{child.pid}@{_start_ticks(child.pid) or 0}")

    def poll(self, job: JobRef, budget_seconds: float | None = None) -> JobView:
        """See `Backend.poll`. The job is over when the supervisor and everything it had started are gone."""
        pid, start = _parts(job)
        if pid in self._children:
            self._children[pid].poll()  # so that it does not stay a zombie
        if _start_ticks(pid) == start:
            return JobView(JobState.RUNNING, (ComponentView(0, str(JobState.RUNNING)),))
        left = _tied_to(pid)
        if left:
            reason = f"the supervisor is gone, {len(left)} of its processes are ending"
            return JobView(JobState.RUNNING, (ComponentView(0, str(JobState.RUNNING)),), reason)
        return JobView(JobState.GONE, (ComponentView(0, str(JobState.GONE)),))

    def cancel(self, job: JobRef, budget_seconds: float | None = None) -> None:
        """See `Backend.cancel`: first asked, and after a while ended; its children are tied to its life.

        Takes at most `budget_seconds` (default: what `CANCEL_SECONDS` gives), shared out in the same proportion.
        """
        pid, start = _parts(job)
        scale = 1.0 if budget_seconds is None else min(1.0, budget_seconds / sum(CANCEL_SECONDS))
        for number, limit in zip((signal.SIGTERM, signal.SIGKILL), CANCEL_SECONDS, strict=True):
            seconds = limit * scale
            if _start_ticks(pid) == start:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + seconds
            while not self.poll(job).over and time.monotonic() < deadline:
                time.sleep(0.05)


def _parts(job: JobRef) -> tuple[int, int]:
    pid, _, start = job.job_id.partition("@")
    if not (pid.isdigit() and start.isdigit() and int(pid) > 1):
        raise SubmissionRefused(f"{job.job_id!r} is no local job id, wanted PID@START")
    return int(pid), int(start)


def _start_ticks(pid: int) -> int | None:
    """Start time of a live process; None when it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _tied_to(pid: int) -> list[int]:
    """Live processes of this user that a supervisor with this pid has started, by the mark in their environment."""
    mark = f"{PARENT_VARIABLE}={pid}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                marked = mark in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue  # somebody else's, or gone meanwhile
            if marked and _start_ticks(int(entry.name)) is not None:
                found.append(int(entry.name))
    return found
