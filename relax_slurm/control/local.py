"""The local backend: the supervisor as a process of its own session on this machine, behind `slurm.backend.Backend`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

from relax_slurm.errors import SubmissionRefused
from relax_slurm.slurm.job import ComponentView, JobRef, JobState, JobView
from relax_slurm.slurm.submit import Submission


class LocalBackend:
    """Starts, looks at and ends supervisors. A job id is `PID@START`, so that a reused pid is never ours."""

    def submit(self, submission: Submission) -> JobRef:
        """See `Backend.submit`."""
        log = submission.run_dir / "logs" / "head_supervisor.log"
        try:
            with log.open("ab") as output:
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
        return JobRef(f"{child.pid}@{_start_ticks(child.pid) or 0}")

    def poll(self, job: JobRef) -> JobView:
        """See `Backend.poll`."""
        pid, start = _parts(job)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # when it is our own child, so that it does not stay a zombie
        alive = _start_ticks(pid) == start
        state = JobState.RUNNING if alive else JobState.GONE
        return JobView(state, (ComponentView(0, str(state)),))

    def cancel(self, job: JobRef) -> None:
        """See `Backend.cancel`: first asked, and after a while ended; its children are tied to its life."""
        pid, start = _parts(job)
        for number, seconds in ((signal.SIGTERM, 20.0), (signal.SIGKILL, 5.0)):
            if _start_ticks(pid) != start:
                return
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
