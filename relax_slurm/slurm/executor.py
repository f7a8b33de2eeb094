"""The submitit side: an executor that submits our own script, and a watcher that needs no accounting.

Used of submitit (1.5, pinned below 2 and by a contract test): `SlurmExecutor` with its hooks for script text,
command, job id and number of tasks; `JobPaths`; `SlurmJob` with its class-wide `watcher`;
`InfoWatcher.update`. Nothing is pickled and no process of ours runs inside submitit's: its signal handlers
would swallow TERM.

Importing this module imports submitit (about a tenth of a second), so the rest of the room imports it late.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor, SlurmInfoWatcher, SlurmJob

from relax_slurm.slurm.command import SECONDS, run
from relax_slurm.slurm.job import JobState, JobView
from relax_slurm.slurm.submit import Submission, parse_sbatch, submit_script
from relax_slurm.slurm.watch import squeue, view_of

SCRIPT_NAME = "job.sbatch"


class SqueueWatcher(SlurmInfoWatcher):
    """Job states by squeue. Its own schedule backs off to `delay_s`, so it is no liveness signal."""

    def __init__(self, delay_s: int = 60, seconds: float = SECONDS) -> None:
        super().__init__(delay_s=delay_s)
        self.seconds = seconds
        self.env: Mapping[str, str] | None = None
        self._views: dict[str, JobView] = {}

    def view(self, job_id: str, mode: str = "force") -> JobView:
        """What is known about a job; `mode` as in submitit (`force`, `standard`, `cache`)."""
        self.get_info(job_id, mode=mode)
        return self._views.get(job_id, JobView(JobState.UNKNOWN, reason="not asked yet"))

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """submitit's word for the state: Slurm's own for an ended job, UNKNOWN when squeue told nothing."""
        self.get_info(job_id, mode=mode)
        return self._info_dict.get(job_id, {}).get("State", "UNKNOWN")

    def update(self) -> None:
        """One bounded squeue per registered job that is not over; an unknown id would spoil a common one."""
        for job_id in sorted(self._registered - self._finished):
            self._num_calls += 1
            done = run(squeue([job_id]), seconds=self.seconds, env=self.env)
            self._output = done.out.encode()
            view = view_of(done, job_id, self._views.get(job_id))
            self._views[job_id] = view
            self._info_dict[job_id] = _info(job_id, view)
            if view.over:
                self._finished.add(job_id)
        self._last_status_check = time.time()  # submitit's own schedule is in this clock

    def clear(self) -> None:
        """Forget everything that was seen."""
        super().clear()
        self._views = {}


class HetSlurmJob(SlurmJob[Any]):
    """A submitit job that is followed by squeue."""

    watcher = SqueueWatcher()


class HetSlurmExecutor(SlurmExecutor):
    """Submits one ready-made script. `folder` is the attempt's run directory: never shared by two
    submissions.

    submitit keys its files by job id, and a new cluster starts again at 1; a folder per run and attempt keeps
    them apart.
    """

    job_class = HetSlurmJob

    def __init__(
        self,
        submission: Submission,
        *,
        environ: Mapping[str, str] | None = None,
        seconds: float = SECONDS,
    ) -> None:
        super().__init__(folder=submission.run_dir)
        self._submission = submission
        self._environ = dict(os.environ if environ is None else environ)
        self._seconds = seconds
        self.cluster: str | None = None

    @classmethod
    def affinity(cls) -> int:
        """Always offered: whether Slurm is there is found out by asking it, with a clear refusal."""
        return 2

    def submit_job(self) -> HetSlurmJob:
        """Write `job.sbatch` and submit it. SubmissionRefused as in `submit.submit_script`."""
        job: HetSlurmJob = self._submit_command("")
        return job

    def _submit_command(self, command: str) -> Any:
        # submitit would call sbatch here without a time limit and with this process's Slurm variables.
        script = self.folder / SCRIPT_NAME
        script.write_text(self._make_submission_file_text(command, self._submission.tag), encoding="utf-8")
        reference = submit_script(
            script,
            self._submission.tag,
            environ=self._environ,
            seconds=self._seconds,
        )
        self.cluster = reference.cluster
        job = self.job_class(folder=self.folder, job_id=reference.job_id, tasks=list(range(self._num_tasks())))
        link = job.paths.submission_file
        if not link.is_symlink():
            link.symlink_to(script.name)  # where submitit's tools look for it
        return job

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self._submission.script

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["sbatch", "--parsable", str(submission_file_path)]

    def _num_tasks(self) -> int:
        return 1

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        text = string.decode(errors="replace") if isinstance(string, bytes) else string
        job = parse_sbatch(text)
        if job is None:
            raise FailedSubmissionError(f"sbatch printed no job id: {text!r}")
        return job.job_id


def _info(job_id: str, view: JobView) -> dict[str, str]:
    if view.state is JobState.UNKNOWN:
        state = view.last.value if view.last is not None else "UNKNOWN"
        state = "UNKNOWN" if state in {JobState.ENDED, JobState.GONE} else state
    elif view.state is JobState.ENDED:
        bad = [component.state for component in view.components if component.state != "COMPLETED"]
        state = bad[0] if bad else "COMPLETED"
    elif view.state is JobState.DEGRADED:
        state = "RUNNING"
    elif view.state is JobState.GONE:
        state = "GONE"
    else:
        state = view.state.value
    nodes = ",".join(component.nodes for component in view.components if component.nodes)
    return {"JobID": job_id, "State": state, "NodeList": nodes, "Reason": view.reason}
