"""`relax-slurm launch CONFIG`: plan, write the run directory, submit, wait until READY."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_slurm.cli.common import not_over
from relax_slurm.cli.interrupted import told
from relax_slurm.cli.progress import Progress
from relax_slurm.cli.ready import ReadyWait
from relax_slurm.cli.warn import warnings
from relax_slurm.config.load import load
from relax_slurm.config.models import RunConfig
from relax_slurm.control.backends import BackendKind, backend_for, choose
from relax_slurm.control.logs import open_log
from relax_slurm.control.prepare import prepare
from relax_slurm.control.run_dir import RunDir, cannot_write, launch_lock, runs_root
from relax_slurm.control.runs import JobUnknown, job_of, submitted
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.errors import ConfigError, RelaxError, SubmissionRefused
from relax_slurm.slurm.backend import Backend
from relax_slurm.slurm.job import JobRef, JobState, JobView
from relax_slurm.slurm.submit import AnswerLost, Submission
from relax_slurm.wire.host import ephemeral_range
from relax_slurm.workload import preflight

RELEASE_SECONDS = 60.0
"""How long a run that failed may take to end by itself before its job is ended."""
SILENT_SECONDS = 20.0
"""How long Slurm is asked about an earlier attempt when it does not answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="run file (YAML)")
    parser.add_argument("--backend", choices=("auto", "slurm", "local"), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="write the files of the run and submit nothing")
    parser.add_argument(
        "--allow-unverified", action="store_true", help="go on when a node's GPUs can be neither confirmed nor refuted"
    )
    parser.add_argument("--detach", action="store_true", help="do not wait until the run is READY")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the run file (repeatable)"
    )
    parser.add_argument(
        "--timeout", type=float, default=None, metavar="SECONDS", help="how long to wait for READY once the job runs"
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 when READY (or submitted, with --detach); the codes of the contract otherwise."""
    overrides = [*args.set, *(["control.allow_unverified=true"] if args.allow_unverified else [])]
    config = load(args.config, overrides)
    plan = make_plan(config, ephemeral=ephemeral_range())
    preflight.check(config, plan)
    kind = choose(args.backend, os.environ)
    root = runs_root(config.runs_root, os.environ)
    progress = Progress(sys.stderr)
    if kind is BackendKind.SLURM:
        for sentence in warnings(plan, config):
            progress.say(f"warning: {sentence}")
    backend = backend_for(kind, seconds=config.slurm.command_seconds)
    leaves = _Leaves(config.name)
    with told(leaves.sentence):
        with launch_lock(root, config.name):
            _refuse_second(root, config, progress)
            run_dir, submission = prepare(root, config, plan, kind)
            if args.dry_run:
                _dry_answer(args, run_dir, submission)
                return 0
            job = _submit(root, run_dir, kind, backend, submission, leaves)
        return _wait(args, config, progress, run_dir, kind, backend, job)


@dataclass(slots=True)
class _Leaves:
    """What an interrupted launch leaves behind: nothing, perhaps a job, or a run that goes on."""

    run: str
    submitting: bool = False
    job: JobRef | None = None

    def sentence(self) -> str:
        """For the user, with the way to end it."""
        if self.job is not None:
            shown = f"`relax-slurm status {self.run}` shows it, `relax-slurm stop {self.run}` ends it"
            return f"the run goes on (job {self.job}): {shown}"
        if self.submitting:
            return f"the job was being submitted: `relax-slurm stop {self.run}` ends it if there is one"
        return "nothing was submitted"


def _wait(
    args: argparse.Namespace,
    config: RunConfig,
    progress: Progress,
    run_dir: RunDir,
    kind: BackendKind,
    backend: Backend,
    job: JobRef,
) -> int:
    """From the submitted job to the answer; a run that does not come up gives its GPUs back."""
    progress.say(f"{config.name}: {_what(kind)} {job} submitted, files in {run_dir.path}")
    if args.detach:
        state = {"run": config.name, "run_dir": str(run_dir.path), "job_id": job.job_id, "state": "PENDING"}
        _answer(args, state, run_dir)
        return 0
    waiting = ReadyWait(
        run_dir,
        backend,
        job,
        progress,
        limit_seconds=_limit(args, config),
        queue_seconds=config.slurm.queue_seconds,
    )
    try:
        state = waiting.wait()
    except RelaxError as error:
        why = error.message
        with told(lambda: f"{why}; job {job} may be there still, `relax-slurm stop {config.name}` ends it"):
            _release(waiting.run_dir, backend, job, progress)
        raise
    _answer(args, state, waiting.run_dir)
    return 0


def _submit(
    root: Path, run_dir: RunDir, kind: BackendKind, backend: Backend, submission: Submission, leaves: _Leaves
) -> JobRef:
    """Submit, with the job's mark written down before and its id after, so that `stop` finds it whatever happens."""
    known = {"backend": str(kind), "tag": submission.tag}
    try:
        run_dir.write_json("job.json", known)
        open_log(run_dir.logs / "head_supervisor.log").close()  # private before sbatch appends to it
        leaves.submitting = True
        job = leaves.job = backend.submit(submission)
    except AnswerLost:
        raise  # the job may appear: it stays findable by its mark
    except SubmissionRefused as error:
        _write_refusal(run_dir, known, error)
        raise
    except OSError as error:
        raise cannot_write(root, error) from None
    try:
        run_dir.write_json("job.json", known | {"job_id": job.job_id, "cluster": job.cluster})
    except OSError as error:
        backend.cancel(job)  # without its id nobody would look for it
        raise cannot_write(root, error) from None
    return job


def _write_refusal(run_dir: RunDir, known: dict[str, str], error: SubmissionRefused) -> None:
    """So that nobody takes the attempt for a run. It is refused all the same when this cannot be written."""
    with contextlib.suppress(OSError):
        run_dir.write_json("job.json", known | {"refused": error.message})


def _release(run_dir: RunDir, backend: Backend, job: JobRef, progress: Progress) -> None:
    """A run that did not come up must not keep GPUs: what does not end by itself is ended."""
    if run_dir.read("outcome.json") is not None and _over(backend, job, RELEASE_SECONDS):
        return
    try:
        backend.cancel(job)
    except RelaxError as error:
        progress.say(error.message)
    if not _over(backend, job, RELEASE_SECONDS):
        progress.say(f"job {job} is still there after it was cancelled; look at it with squeue")


def _over(backend: Backend, job: JobRef, seconds: float) -> bool:
    """Whether the job is over within this time; answers at once for a job that waits in the queue."""
    deadline = time.monotonic() + seconds
    pause = 0.05
    while not (view := backend.poll(job)).over and time.monotonic() < deadline:
        if view.state is JobState.PENDING:
            return False  # it waits to run again: nothing of it ends by itself
        time.sleep(pause)
        pause = min(pause * 2, 1.0)
    return view.over


def _what(kind: BackendKind) -> str:
    return {
        BackendKind.SLURM: "Slurm job",
        BackendKind.BORROWED: "in this allocation, supervisor",
        BackendKind.LOCAL: "on this machine, supervisor",
    }[kind]


def _limit(args: argparse.Namespace, config: RunConfig) -> float:
    """Seconds from the job's start to READY: binding, then one start-up per phase, then the gateway."""
    if args.timeout is not None:
        return float(args.timeout)
    phases = len(config.roles) if config.placement == "defer" else 1
    per_phase = config.engine.startup_seconds + config.control.operation_seconds
    return config.control.bind_seconds + phases * per_phase + 30.0


def _refuse_second(root: Path, config: RunConfig, progress: Progress) -> None:
    """Two runs of one name at once would share a folder and a name in discovery.

    `ConfigError` while an earlier attempt lives; `SubmissionRefused` when Slurm cannot be asked whether it does.
    """
    name = config.name
    earlier = submitted(root, name)
    if not earlier:
        return
    before = earlier[0]
    seconds = min(config.slurm.command_seconds, SILENT_SECONDS)
    if (before.read("job.json") or {}).get("backend") == BackendKind.SLURM:
        progress.say(f"asking Slurm whether attempt {before.attempt} of {name} is over")
    try:
        job = job_of(before, seconds=seconds)
    except JobUnknown as error:
        raise SubmissionRefused(f"nothing was submitted: {error.message}") from None
    if job is None:
        return
    backend = backend_for(job[0], seconds=seconds)
    start = time.monotonic()
    deadline = start + RELEASE_SECONDS
    said = False
    while not (view := backend.poll(job[1])).over:
        newest = before.newest()
        outcome = newest.read("outcome.json")
        if view.state is JobState.UNKNOWN:
            if time.monotonic() - start >= SILENT_SECONDS:
                raise _silent(newest, job[0], job[1], view)
            if not said:
                progress.say(f"Slurm does not answer ({view.reason}); asking it for {SILENT_SECONDS:g} s")
                said = True
        elif outcome is None or view.state is JobState.PENDING or time.monotonic() > deadline:
            raise ConfigError(
                f"run {name!r} exists already (attempt {newest.attempt}, {job[0]} job {job[1]}"
                f"{'' if outcome is None else f', {not_over(newest, outcome, view)}'}); "
                f"stop it with `relax-slurm stop {name}` or choose another name"
            )
        time.sleep(0.2)  # it has an outcome and its job is about to end, or Slurm may answer yet


def _silent(run_dir: RunDir, kind: str, job: JobRef, view: JobView) -> SubmissionRefused:
    return SubmissionRefused(
        f"nothing was submitted: Slurm could not be asked whether {kind} job {job} of run {run_dir.run!r} (attempt "
        f"{run_dir.attempt}) is over, it said {view.reason!r}; "
        f"launch again when `squeue` answers, or choose another name"
    )


def _dry_answer(args: argparse.Namespace, run_dir: RunDir, submission: Submission) -> None:
    """What was written, and how the same is submitted: there is nothing to stop."""
    files = sorted(str(path.relative_to(run_dir.path)) for path in run_dir.path.rglob("*") if path.is_file())
    if args.json:
        body = {"run": run_dir.run, "run_dir": str(run_dir.path), "state": "UNSUBMITTED"}
        print(json.dumps(body | {"attempt": run_dir.attempt, "files": files, "script": submission.script}, indent=2))
        return
    print(f"run       {run_dir.run}  (UNSUBMITTED)")
    print(f"files     {run_dir.path}: {', '.join(name for name in files if not name.startswith('keys/'))}")
    print(f"script    {run_dir.path / 'job.sbatch'}\n")
    print("\n".join(f"  {line}".rstrip() for line in submission.script.splitlines()))


def _answer(args: argparse.Namespace, state: dict[str, Any], run_dir: RunDir) -> None:
    if args.json:
        print(json.dumps(state, indent=2))
        return
    print(f"run       {state['run']}  ({state['state']})")
    if state.get("gateway_url"):
        print(f"gateway   {state['gateway_url']}")
        print(f"token     {run_dir.token_file}")
    print(f"files     {run_dir.path}")
    root = run_dir.path.parent.parent
    where = "" if root == runs_root(None, os.environ) else f" --runs-root {shlex.quote(str(root))}"
    print(f"stop      relax-slurm stop {state['run']}{where}")
