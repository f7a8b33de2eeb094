"""`relax-slurm status [RUN]`: one look at a run, or a wait until it is in a state."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from relax_slurm.cli.common import add_run_argument, state_of, the_run
from relax_slurm.cli.view import view
from relax_slurm.errors import StartupFailed

STATES = ("BOOTING", "BINDING", "STARTING", "READY", "DEGRADED", "DRAINING", "STOPPING", "STOPPED", "FAILED")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("--wait", choices=STATES, default=None, help="wait until the run is in this state")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="how long --wait waits")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 6 when --wait did not see its state."""
    run_dir = the_run(args)
    state = state_of(run_dir)
    deadline = time.monotonic() + args.timeout
    while args.wait is not None and not _reached(state, args.wait):
        over = state["state"] in ("STOPPED", "FAILED", "JOB_GONE", "JOB_ENDED")
        if over or time.monotonic() > deadline:
            raise StartupFailed(
                f"run {run_dir.run!r} is {state['state']}, wanted {args.wait}"
                + ("; it will not get there any more" if over else f" within {args.timeout:g} s")
            )
        time.sleep(0.2)
        run_dir = run_dir.newest()
        state = state_of(run_dir)
    print(_text(args, state))
    return 0


def _reached(state: dict[str, Any], wanted: str) -> bool:
    """A run that serves has a gateway; without its URL nobody can use the state that was waited for."""
    serves = wanted not in ("READY", "DEGRADED") or state.get("gateway_url") is not None
    return bool(state["state"] == wanted) and serves


def _text(args: argparse.Namespace, state: dict[str, Any]) -> str:
    return json.dumps(state, indent=2) if args.json else view(state)
