"""The state of a job from squeue: works without accounting, knows het components, never mistakes silence for the end.

`fold` turns rows into one state; `Tracker` asks squeue and remembers the last good answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from relax_slurm.slurm.command import SECONDS, Done, run
from relax_slurm.slurm.job import ComponentView, JobRef, JobState, JobView

FORMAT = "%i|%T|%N|%r"
WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""Slurm's final states; everything else that is not WAITING still holds nodes (RUNNING, COMPLETING, SUSPENDED, …)."""

_ROW_ID = re.compile(r"(?P<job>\d+)(?:\+(?P<offset>\d+)|_(?P<task>\d+|\[[^\]]*\]))?(?P<step>\.\w+)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class JobRow:
    """One line of squeue or sacct. `offset` is the het component; `task` the array part, if any."""

    job_id: str
    offset: int | None
    task: str | None
    state: str
    nodes: str
    reason: str


def squeue(job_ids: Iterable[str]) -> list[str]:
    """squeue for jobs in every state and partition, finished ones included while the controller remembers them."""
    return [
        "squeue",
        "--all",
        "--noheader",
        "--states=all",
        f"--format={FORMAT}",
        f"--jobs={','.join(job_ids)}",
    ]


def parse_rows(text: str) -> tuple[JobRow, ...]:
    """Rows of `squeue`, or of sacct as `JobID|State|…`. Steps and lines that are no rows are left out."""
    rows = []
    for line in text.splitlines():
        fields = [word.strip() for word in line.split("|")]
        match = _ROW_ID.fullmatch(fields[0])
        if match is None or match["step"] or len(fields) < 2 or not fields[1]:
            continue
        offset = match["offset"]
        rows.append(
            JobRow(
                job_id=match["job"],
                offset=None if offset is None else int(offset),
                task=match["task"],
                state=fields[1].split()[0].rstrip("+"),  # "CANCELLED by 1000"; sacct cuts words with a plus
                nodes=_none(fields[2] if len(fields) > 2 else ""),
                reason=_none("|".join(fields[3:])),
            )
        )
    return tuple(rows)


def fold(rows: Iterable[JobRow], job_id: str) -> JobView:
    """One view of the job with this (leader's) id. No row of it gives GONE."""
    mine = sorted((row for row in rows if row.job_id == job_id), key=lambda row: row.offset or 0)
    if not mine:
        return JobView(JobState.GONE, reason="Slurm has no record of the job")
    components = tuple(
        ComponentView(row.offset or 0, row.state, row.nodes, row.reason if row.state not in ENDED else "")
        for row in mine
    )
    ended = [row for row in mine if row.state in ENDED]
    waiting = [row for row in mine if row.state in WAITING]
    if len(ended) == len(mine):
        state, telling = JobState.ENDED, [row for row in ended if row.state != "COMPLETED"] or ended
    elif ended:
        state, telling = JobState.DEGRADED, ended
    elif waiting:
        state, telling = JobState.PENDING, waiting
    else:
        return JobView(JobState.RUNNING, components)
    return JobView(state, components, reason=_reason(telling))


def view_of(done: Done, job_id: str, last: JobView | None) -> JobView:
    """What an ended `squeue` command says about a job.

    Only a good answer and "Invalid job id" tell anything; every other failure is UNKNOWN with what was known
    before.
    """
    if done.ok:
        return fold(parse_rows(done.out), job_id)
    if done.no_such_job:
        return JobView(JobState.GONE, reason="Slurm has no record of the job")
    known = None if last is None else (last.last if last.state is JobState.UNKNOWN else last.state)
    return JobView(JobState.UNKNOWN, () if last is None else last.components, done.words, known)


class Tracker:
    """Asks squeue about one job and keeps the last answer."""

    def __init__(self, job: JobRef, *, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> None:
        self.job = job
        self._seconds = seconds
        self._env = env
        self.view: JobView | None = None

    def poll(self, seconds: float | None = None) -> JobView:
        """Look now. Blocks for at most the time limit (or `seconds`); never raises for a failing command."""
        self.view = view_of(self._ask(self._seconds if seconds is None else seconds), self.job.job_id, self.view)
        return self.view

    def _ask(self, seconds: float) -> Done:
        argv = squeue([self.job.job_id])
        if self.job.cluster is not None:
            argv.append(f"--clusters={self.job.cluster}")
        return run(argv, seconds=seconds, env=self._env)


def _none(text: str) -> str:
    return "" if text in {"None", "(null)", "N/A"} else text


def _reason(rows: list[JobRow]) -> str:
    said = []
    for row in rows:
        words = row.reason if row.state in WAITING else " ".join(filter(None, (row.state, row.reason)))
        words = words or ("" if row.state == "PENDING" else row.state)  # PENDING alone is no reason
        if words and words not in said:
            said.append(words)
    return "; ".join(said)
