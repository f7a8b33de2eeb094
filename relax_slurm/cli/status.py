"""`relax-slurm status [RUN]`: one look at a run, or a wait until it is in a state."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from relax_slurm.cli.common import add_run_argument, outcome_of, state_of, the_run
from relax_slurm.cli.interrupted import told
from relax_slurm.cli.ready import failure
from relax_slurm.cli.view import view
from relax_slurm.control.run_dir import RunDir
from relax_slurm.errors import RelaxError, StartupFailed

STATES = ("BOOTING", "BINDING", "STARTING", "READY", "DEGRADED", "DRAINING", "STOPPING", "STOPPED", "FAILED")
OVER = ("STOPPED", "FAILED", "JOB_GONE", "JOB_ENDED")
"""States from which no other one comes."""
OUTCOME_SECONDS = 10.0
"""How long the outcome of a run that said FAILED is waited for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("--wait", choices=STATES, default=None, help="wait until the run is in this state")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="how long --wait waits")


def run(args: argparse.Namespace) -> int:
    """Exit 0. With --wait: what a run that ended instead ended with, 6 when --wait did not see its state in time."""
    run_dir = the_run(args)
    state: dict[str, Any] = {}

    def goes_on() -> str:
        return f"run {run_dir.run} is {state.get('state', 'not looked at yet')}; looking at it changes nothing"

    with told(goes_on):
        state = state_of(run_dir)
        deadline = time.monotonic() + args.timeout
        while args.wait is not None and not _reached(state, args.wait):
            over = state["state"] in OVER
            if over or time.monotonic() > deadline:
                raise _not_reached(run_dir, state, args.wait, over, args.timeout)
            time.sleep(0.2)
            run_dir = run_dir.newest()
            state = state_of(run_dir)
    print(_text(args, state))
    return 0


def _not_reached(run_dir: RunDir, state: dict[str, Any], wanted: str, over: bool, seconds: float) -> RelaxError:
    """The error that the run itself failed with, if it did; otherwise that the state did not come."""
    so = f"run {run_dir.run!r} is {state['state']}, wanted {wanted}"
    if not over:
        reason = f": {state['reason']}" if state.get("reason") else ""
        return StartupFailed(f"{so} within {seconds:g} s{reason}")
    # A coordinator that is about to end says so before its outcome is written.
    outcome = state if "exit_code" in state else outcome_of(run_dir, OUTCOME_SECONDS)
    if outcome is not None and outcome.get("exit_code"):
        return failure(run_dir, outcome, f"{so}: ")
    reason = f" ({state['reason']})" if state.get("reason") else ""
    return StartupFailed(f"{so}; it will not get there any more{reason}")


def _reached(state: dict[str, Any], wanted: str) -> bool:
    """A run that serves has a gateway; without its URL nobody can use the state that was waited for."""
    serves = wanted not in ("READY", "DEGRADED") or state.get("gateway_url") is not None
    return bool(state["state"] == wanted) and serves


def _text(args: argparse.Namespace, state: dict[str, Any]) -> str:
    return json.dumps(state, indent=2) if args.json else view(state)
