"""`relax-slurm stop [RUN]`: ask the coordinator, wait for the outcome and for the job's end, cancel what is left."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from relax_slurm.cli.common import LAG_SECONDS, add_run_argument, ask, job_of, outcome_of, the_run
from relax_slurm.cli.progress import Progress
from relax_slurm.config.load import from_resolved
from relax_slurm.control.backends import BackendKind, backend_for
from relax_slurm.control.replica_commands import ENDING_SECONDS
from relax_slurm.control.run_dir import RunDir
from relax_slurm.errors import RecoveryRequired, Unavailable
from relax_slurm.wire.client import RemoteError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=None,
        metavar="SECONDS",
        help="how long an orderly end may take (default: what requests and engines are given, and half a minute)",
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 when nothing of the run is left; 9 when the end of something is not proven."""
    run_dir = the_run(args)
    progress = Progress(sys.stderr)
    outcome = stop(run_dir, progress, _orderly_seconds(run_dir) if args.timeout is None else args.timeout)
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


def _orderly_seconds(run_dir: RunDir) -> float:
    """Requests may drain, then a sidecar ends its engines, then the supervisor ends the sidecars."""
    config = from_resolved((run_dir.path / "config.json").read_text())
    return config.control.drain_seconds + ENDING_SECONDS + 30.0


def stop(run_dir: RunDir, progress: Progress, timeout_seconds: float) -> dict[str, Any]:
    """End the run and answer its outcome. A borrowed allocation stays; only our supervisor and steps end."""
    job = job_of(run_dir)
    if job is None:
        return {"run": run_dir.run, "state": "UNSUBMITTED"}
    kind, ref = job
    backend = backend_for(kind)
    cancelled = False
    if run_dir.read("outcome.json") is None:
        try:
            ask(run_dir, "stop", timeout_seconds=5.0, reason="relax-slurm stop")
            progress.say("asked the coordinator to stop")
        except (Unavailable, RemoteError) as error:
            progress.say(f"no coordinator to ask ({error.message}); ending the {_noun(kind)} instead")
            backend.cancel(ref)
            cancelled = True
    deadline = time.monotonic() + timeout_seconds
    while True:
        view = backend.poll(ref)
        progress.job(view)
        if view.over:
            break
        if time.monotonic() > deadline:
            if cancelled:
                raise RecoveryRequired(
                    f"{kind} job {ref} of run {run_dir.run!r} is still {view.state} after it was cancelled; "
                    f"look at it with squeue and at its nodes"
                )
            progress.say(f"not over after {timeout_seconds:g} s; ending the {_noun(kind)}")
            backend.cancel(ref)
            cancelled, deadline = True, time.monotonic() + timeout_seconds
        time.sleep(0.2)
    wait_seconds = 0.0 if cancelled else LAG_SECONDS
    return outcome_of(run_dir, wait_seconds) or {
        "run": run_dir.run,
        "state": "STOPPED",
        "reason": "the job was ended",
    }


def _noun(kind: str) -> str:
    return "job" if kind == BackendKind.SLURM else "supervisor"
