"""`relax-slurm launch CONFIG`: plan, write the run directory, submit, wait until READY."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from relax_slurm.cli.common import ask, job_of
from relax_slurm.cli.progress import Progress
from relax_slurm.config.load import load
from relax_slurm.config.models import RunConfig
from relax_slurm.control.backends import BackendKind, backend_for, choose
from relax_slurm.control.prepare import prepare
from relax_slurm.control.run_dir import RunDir, find, runs_root
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.core.placement import require_built
from relax_slurm.errors import (
    BindingMismatch,
    ConfigError,
    EngineFailed,
    PlanRefused,
    Preempted,
    RecoveryRequired,
    RelaxError,
    StartupFailed,
    Unavailable,
)
from relax_slurm.slurm.job import JobRef, JobState
from relax_slurm.wire.client import RemoteError
from relax_slurm.wire.host import ephemeral_range

POLL_SECONDS = 0.1
_BY_EXIT_CODE = {
    error.exit_code: error
    for error in (ConfigError, PlanRefused, BindingMismatch, StartupFailed, EngineFailed, Preempted, RecoveryRequired)
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("config", metavar="CONFIG", help="run file (YAML)")
    parser.add_argument("--backend", choices=("auto", "slurm", "local"), default="auto")
    parser.add_argument("--dry-run", action="store_true", help="write the files of the run and submit nothing")
    parser.add_argument("--detach", action="store_true", help="do not wait until the run is READY")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of the run file (repeatable)"
    )
    parser.add_argument(
        "--timeout", type=float, default=None, metavar="SECONDS", help="how long to wait for READY once the job runs"
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 when READY (or submitted, with --detach); the codes of the contract otherwise."""
    config = load(args.config, args.set)
    plan = make_plan(config, ephemeral=ephemeral_range())
    require_built(plan)
    kind = choose(args.backend, os.environ)
    root = runs_root(config.runs_root, os.environ)
    _refuse_second(root, config.name)
    run_dir, submission = prepare(root, config, plan, kind)
    if args.dry_run:
        _answer(args, {"run": config.name, "run_dir": str(run_dir.path), "state": "UNSUBMITTED"}, run_dir)
        return 0
    progress = Progress(sys.stderr)
    backend = backend_for(kind)
    job = backend.submit(submission)
    run_dir.write_json("job.json", {"backend": str(kind), "job_id": job.job_id, "cluster": job.cluster})
    progress.say(f"{config.name}: {_what(kind)} {job} submitted, files in {run_dir.path}")
    if args.detach:
        _answer(args, {"run": config.name, "run_dir": str(run_dir.path), "job_id": job.job_id, "state": "PENDING"}, run_dir)
        return 0
    try:
        state = wait_ready(run_dir, kind, job, progress, _limit(args, config))
    except KeyboardInterrupt:
        progress.say(f"interrupted; the run goes on, `relax-slurm stop {config.name}` ends it")
        raise
    except StartupFailed:
        # What did not come up in time must not keep GPUs: an owned job is given back.
        backend.cancel(job)
        raise
    _answer(args, state, run_dir)
    return 0


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


def _refuse_second(root: Any, name: str) -> None:
    """Two runs of one name at once would share a folder and a name in discovery."""
    try:
        before = find(root, name)
    except ConfigError:
        return
    job = job_of(before)
    if job is None or before.read("outcome.json") is not None:
        return
    view = backend_for(job[0]).poll(job[1])
    if not view.over:
        raise ConfigError(
            f"run {name!r} exists already (attempt {before.attempt}, {job[0]} job {job[1]}, {view.state}); "
            f"stop it with `relax-slurm stop {name}` or choose another name"
        )


def wait_ready(
    run_dir: RunDir, kind: BackendKind, job: JobRef, progress: Progress, limit_seconds: float
) -> dict[str, Any]:
    """Follow job and coordinator until READY; raises what the run failed with."""
    backend = backend_for(kind)
    deadline: float | None = None
    looked = 0.0
    while True:
        failed = run_dir.read("outcome.json")
        if failed is not None:
            raise _failure(run_dir, failed)
        if (run_dir.path / "endpoint.json").exists():
            state = _state(run_dir)
            if state is not None:
                progress.state(state)
                if state["state"] in ("READY", "DEGRADED") and state.get("gateway_url"):
                    return state
        now = time.monotonic()
        if now - looked >= 1.0:
            looked = now
            view = backend.poll(job)
            progress.job(view)
            if view.over and run_dir.read("outcome.json") is None:
                raise StartupFailed(
                    f"{_what(kind)} {job} is over ({view.reason or view.state}) and left no outcome; "
                    f"see {run_dir.logs}"
                )
            if deadline is None and view.state is not JobState.PENDING:
                deadline = now + limit_seconds
        if deadline is not None and now > deadline:
            raise StartupFailed(
                f"run {run_dir.run!r} was not READY within {limit_seconds:g} s after its job started; "
                f"see {run_dir.path / 'events.jsonl'} and {run_dir.logs}"
            )
        time.sleep(POLL_SECONDS)


def _state(run_dir: RunDir) -> dict[str, Any] | None:
    try:
        return ask(run_dir, "get_state", timeout_seconds=2.0)
    except (Unavailable, RemoteError):
        return None


def _failure(run_dir: RunDir, outcome: dict[str, Any]) -> RelaxError:
    body = outcome.get("error") or {}
    message = str(body.get("message") or f"run {run_dir.run!r} ended before it was READY: {outcome.get('reason')}")
    error = _BY_EXIT_CODE.get(int(outcome.get("exit_code", 6)), StartupFailed)
    if error is BindingMismatch:
        return BindingMismatch(message, rows=(body.get("detail") or {}).get("rows"))
    return error(message)


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
