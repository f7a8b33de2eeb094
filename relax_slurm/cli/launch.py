"""`relax-slurm launch CONFIG`: plan, write the run directory, submit, wait until READY."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from relax_slurm.cli.common import job_of, not_over
from relax_slurm.cli.progress import Progress
from relax_slurm.cli.ready import ReadyWait
from relax_slurm.config.load import load
from relax_slurm.config.models import RunConfig
from relax_slurm.control.backends import BackendKind, backend_for, choose
from relax_slurm.control.prepare import prepare
from relax_slurm.control.run_dir import RunDir, find, launch_lock, runs_root
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.errors import ConfigError, RelaxError
from relax_slurm.slurm.backend import Backend
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.slurm.submit import Submission
from relax_slurm.wire.host import ephemeral_range
from relax_slurm.workload import preflight

RELEASE_SECONDS = 60.0
"""How long a run that failed may take to end by itself before its job is ended."""


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
    backend = backend_for(kind)
    with launch_lock(root, config.name):
        _refuse_second(root, config.name)
        run_dir, submission = prepare(root, config, plan, kind)
        files = {"run": config.name, "run_dir": str(run_dir.path)}
        if args.dry_run:
            _answer(args, files | {"state": "UNSUBMITTED"}, run_dir)
            return 0
        job = _submit(run_dir, kind, backend, submission)
    progress.say(f"{config.name}: {_what(kind)} {job} submitted, files in {run_dir.path}")
    if args.detach:
        _answer(args, files | {"job_id": job.job_id, "state": "PENDING"}, run_dir)
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
    except KeyboardInterrupt:
        progress.say(f"interrupted; the run goes on, `relax-slurm stop {config.name}` ends it")
        raise
    except RelaxError:
        _release(waiting.run_dir, backend, job, progress)
        raise
    _answer(args, state, waiting.run_dir)
    return 0


def _submit(run_dir: RunDir, kind: BackendKind, backend: Backend, submission: Submission) -> JobRef:
    """Submit, with the job's mark written down before and its id after, so that `stop` finds it whatever happens."""
    known = {"backend": str(kind), "tag": submission.tag}
    run_dir.write_json("job.json", known)
    job = backend.submit(submission)
    run_dir.write_json("job.json", known | {"job_id": job.job_id, "cluster": job.cluster})
    return job


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


def _refuse_second(root: Path, name: str) -> None:
    """Two runs of one name at once would share a folder and a name in discovery."""
    try:
        before = find(root, name)
    except ConfigError:
        return
    job = job_of(before)
    if job is None:
        return
    backend = backend_for(job[0])
    deadline = time.monotonic() + RELEASE_SECONDS
    while not (view := backend.poll(job[1])).over:
        newest = before.newest()
        outcome = newest.read("outcome.json")
        if outcome is None or view.state is JobState.PENDING or time.monotonic() > deadline:
            raise ConfigError(
                f"run {name!r} exists already (attempt {newest.attempt}, {job[0]} job {job[1]}"
                f"{'' if outcome is None else f', {not_over(newest, outcome, view)}'}); "
                f"stop it with `relax-slurm stop {name}` or choose another name"
            )
        time.sleep(0.2)  # it has an outcome: its job is about to end


def _answer(args: argparse.Namespace, state: dict[str, Any], run_dir: RunDir) -> None:
    if args.json:
        print(json.dumps(state, indent=2))
        return
    print(f"run       {state['run']}  ({state['state']})")
    if state.get("gateway_url"):
        print(f"gateway   {state['gateway_url']}")
        print(f"token     {run_dir.token_file}")
    print(f"files     {run_dir.path}")
    print(f"stop      relax-slurm stop {state['run']}")
