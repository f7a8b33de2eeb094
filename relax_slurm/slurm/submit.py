"""Handing a script to sbatch: what its output means, what its refusals mean, and what a lost answer means.

A time-out or a socket error says nothing about whether the job exists. Then the controller is asked for the
run's unique comment; a second submission is never made.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from relax_slurm.errors import SubmissionRefused
from relax_slurm.slurm import explain
from relax_slurm.slurm.command import SECONDS, Done, run
from relax_slurm.slurm.environment import scrubbed
from relax_slurm.slurm.job import JobRef

SEARCH_TRIES = 5
SEARCH_PAUSE_SECONDS = 1.0

_BARE = re.compile(r"(?P<id>\d+)(?:;(?P<cluster>[\w.-]+))?", re.ASCII)
_SENTENCE = re.compile(r"Submitted batch job (?P<id>\d+)(?: (?:on|in) cluster (?P<cluster>[\w.-]+))?", re.ASCII)
_COMMENTED = re.compile(r"(?P<id>\d+)(?:\+\d+)?\|(?P<end>\w+\|[^|]*)\|(?P<comment>.*)", re.ASCII)
_NEVER_WAS = re.compile(r"CANCELLED\||FAILED\|BadConstraints")
"""State and reason of what a refused het job leaves behind: the part that was refused and the parts before it."""
_LOST = re.compile(
    r"Socket timed out|Zero Bytes were transmitted|Unable to contact slurm controller|Connection reset"
    r"|Connection timed out|Transport endpoint|Message receive failure|Unexpected message received",
    re.IGNORECASE,
)
"""Complaints after which the job may exist all the same."""


class AnswerLost(SubmissionRefused):
    """Nobody can say whether Slurm took the job; it may still appear."""

    code = "submission_unknown"


@dataclass(frozen=True, slots=True)
class Submission:
    """All that a backend needs to start one attempt of a run."""

    run: str
    attempt: int
    tag: str
    """Unique mark of run and attempt; the job's comment contains it."""
    run_dir: Path
    """The attempt's folder (private, shared with the compute nodes)."""
    script: str
    """Text of the sbatch script; a backend without Slurm ignores it."""
    command: tuple[str, ...]
    """The supervisor's command line; the script runs the same one."""


def parse_sbatch(text: str) -> JobRef | None:
    """The job in sbatch's output, with or without --parsable and with site notices around it; None if there is none."""
    for line in reversed(text.splitlines()):
        match = _BARE.fullmatch(line.strip()) or _SENTENCE.search(line)
        if match is not None and int(match["id"]) > 0:
            return JobRef(match["id"], match["cluster"])
    return None


def refusal(done: Done) -> SubmissionRefused:
    """sbatch's own words, and what to do about them."""
    advice = explain.refusal(done.words)
    return SubmissionRefused(
        f"sbatch refused the job: {done.words}" + (f"; {advice}" if advice else ""),
        detail={"exit_code": done.rc, "words": done.words},
    )


def answer_lost(done: Done) -> bool:
    """True when the job may exist although sbatch did not say so."""
    return done.timed_out or (not done.ok and _LOST.search(done.err) is not None)


@dataclass(frozen=True, slots=True)
class UserJob:
    """One component of a job of this user, as squeue lists it."""

    job_id: str
    """Id of the job (of its leader, for a heterogeneous one)."""
    state: str
    comment: str

    def marked(self, tag: str) -> bool:
        """Whether the comment is the tag or ends with `,TAG`."""
        return self.comment == tag or self.comment.endswith(f",{tag}")


def user_jobs(*, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> tuple[tuple[UserJob, ...], Done]:
    """All jobs of this user that the controller remembers, and how the question went.

    What a refused heterogeneous job leaves behind is left out: it never was a job.
    """
    argv = ["squeue", "--all", "--noheader", "--me", "--states=all", "--format=%i|%T|%r|%k"]
    done = run(argv, seconds=seconds, env=env)
    found = []
    for line in done.out.splitlines() if done.ok else ():
        match = _COMMENTED.fullmatch(line.strip())
        if match is not None and not _NEVER_WAS.match(match["end"]):
            found.append(UserJob(match["id"], match["end"].partition("|")[0], match["comment"]))
    return tuple(found), done


def search(tag: str, *, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> tuple[JobRef | None, Done]:
    """The newest job of this user whose comment is the tag or ends with `,TAG`, and how the question went."""
    jobs, done = user_jobs(seconds=seconds, env=env)
    found = [int(job.job_id) for job in jobs if job.marked(tag)]
    return (JobRef(str(max(found))) if found else None), done


def submit_script(
    script: Path,
    tag: str,
    *,
    environ: Mapping[str, str],
    seconds: float = SECONDS,
    pause: Callable[[float], None] = time.sleep,
) -> JobRef:
    """Submit a script file once.

    SubmissionRefused when Slurm says no, or when nobody can say whether it said yes.
    """
    env = scrubbed(environ).env
    done = run(["sbatch", "--parsable", str(script)], seconds=seconds, env=env)
    if done.ok:
        job = parse_sbatch(done.out)
        if job is not None:
            return job
    elif not answer_lost(done):
        raise refusal(done)
    for attempt in range(SEARCH_TRIES):
        if attempt:
            pause(SEARCH_PAUSE_SECONDS)
        found, asked = search(tag, seconds=seconds, env=env)
        if found is not None:
            return found
    raise AnswerLost(
        f"sbatch gave no job id ({done.words}) and no job with the comment {tag!r} was found "
        f"({'squeue answered without it' if asked.ok else asked.words}); it may still appear, so look with "
        f"`squeue --me -o '%i %T %k'` and cancel it there before launching again",
        detail={"tag": tag, "words": done.words},
    )
