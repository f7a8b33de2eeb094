"""What all verbs share: how an error looks, where a run is found, and how its coordinator is asked."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from relax_slurm.control.run_dir import RunDir, runs_root
from relax_slurm.control.runs import JobUnknown, choose, job_of
from relax_slurm.errors import BindingMismatch, RelaxError, Unavailable
from relax_slurm.slurm import explain
from relax_slurm.slurm.job import JobState, JobView

MAX_ROWS = 8
LAG_SECONDS = 5.0
_COLUMNS = ("node", "gpu", "source", "seen", "wanted", "problem")


def say_error(error: RelaxError, *, as_json: bool) -> None:
    """One sentence on stderr (and the table of a binding mismatch); with --json the error document on stdout."""
    print(f"error: {error.message}", file=sys.stderr)
    rows = error.detail.get("rows")
    if isinstance(error, BindingMismatch) or rows:
        print(table(list(rows or []), _COLUMNS), file=sys.stderr)
        for node, text in _advice(list(rows or [])):
            print(f"  do    {node}: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": error.as_json(), "exit_code": error.exit_code}, indent=2))


def _advice(rows: list[dict[str, str]]) -> list[tuple[str, str]]:
    """What to do about the shown rows, each advice once with the nodes that it is for."""
    nodes: dict[str, list[str]] = {}
    for row in rows[:MAX_ROWS]:
        if row.get("do"):
            nodes.setdefault(row["do"], []).append(row.get("node", ""))
    return [(", ".join(dict.fromkeys(names)), text) for text, names in nodes.items()]


def table(rows: list[dict[str, str]], columns: tuple[str, ...], limit: int = MAX_ROWS) -> str:
    """Rows as aligned text; what is over the limit is counted."""
    shown = rows[:limit]
    widths = {name: max([len(name), *(len(str(row.get(name, ""))) for row in shown)]) for name in columns}
    lines = ["  ".join(name.ljust(widths[name]) for name in columns).rstrip()]
    lines += ["  ".join(str(row.get(name, "")).ljust(widths[name]) for name in columns).rstrip() for row in shown]
    if len(rows) > limit:
        lines.append(f"… and {len(rows) - limit} more rows (--json has them)")
    return "\n".join(f"  {line}" for line in lines)


def add_run_argument(parser: argparse.ArgumentParser) -> None:
    """RUN, which defaults to the newest submitted run of this user, one that is not over before all others."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name of a run (default: the newest that was submitted and is not over)"
    )
    parser.add_argument("--runs-root", default=None, help="folder of all runs (default: ~/.relax_slurm/runs)")


def root_of(args: argparse.Namespace) -> Path:
    """The folder of all runs that the arguments mean."""
    return runs_root(args.runs_root, os.environ)


def the_run(args: argparse.Namespace) -> RunDir:
    """The run that the arguments mean."""
    return choose(root_of(args), args.run)


def outcome_of(run_dir: RunDir, wait_seconds: float = LAG_SECONDS) -> dict[str, Any] | None:
    """The outcome of an attempt whose job is over. On a shared file system it may take a moment to be seen here."""
    deadline = time.monotonic() + wait_seconds
    while (outcome := run_dir.read("outcome.json")) is None and time.monotonic() < deadline:
        os.listdir(run_dir.path)  # makes a network file system look again
        time.sleep(0.1)
    return outcome


def ask(run_dir: RunDir, kind: str, *, timeout_seconds: float = 5.0, **fields: Any) -> dict[str, Any]:
    """One request to the run's coordinator; `Unavailable` when there is nobody."""
    from relax_slurm.wire.client import ControlClient
    from relax_slurm.wire.keys import credentials
    from relax_slurm.wire.messages import PeerKind

    endpoint = run_dir.read("endpoint.json")
    if endpoint is None:
        raise Unavailable(f"run {run_dir.run!r} has no coordinator yet ({run_dir.path / 'endpoint.json'} is missing)")

    async def once() -> dict[str, Any]:
        async with ControlClient(endpoint["control"], credentials(run_dir.keys, PeerKind.CLIENT)) as client:
            return await client.request(kind, timeout_seconds=timeout_seconds, **fields)

    return asyncio.run(once())


def state_of(run_dir: RunDir, *, timeout_seconds: float = 3.0) -> dict[str, Any]:
    """The state document; without a coordinator what the run directory and the backend say.

    An outcome is that of the run only when the job is over: a job that Slurm starts again has outcomes of earlier
    attempts.
    """
    run_dir = run_dir.newest()
    outcome = run_dir.read("outcome.json")
    if outcome is None:
        try:
            return _asked(run_dir, timeout_seconds)
        except Unavailable as error:
            return _look_from_outside(run_dir, error.message)[0]
    outside, view = _look_from_outside(run_dir, "")
    outside["gateway_url"] = None  # nothing listens there any more
    if view is None or view.over:
        return outside | {key: outcome[key] for key in ("state", "exit_code", "reason", "error") if key in outcome}
    return outside | {"reason": not_over(run_dir, outcome, view)}


def _asked(run_dir: RunDir, timeout_seconds: float) -> dict[str, Any]:
    """The coordinator's answer. A run that serves has a gateway: its URL may come a moment after the state."""
    deadline = time.monotonic() + LAG_SECONDS
    while True:
        state = ask(run_dir, "get_state", timeout_seconds=timeout_seconds)
        waits = state["state"] in ("READY", "DEGRADED") and state.get("gateway_url") is None
        if not waits or time.monotonic() > deadline:
            return state
        time.sleep(0.1)


def not_over(run_dir: RunDir, outcome: dict[str, Any], view: JobView) -> str:
    """Why an attempt that has ended is not the end of its run: the job waits to run again, or has not ended yet."""
    ended = f"attempt {run_dir.attempt} ended with {outcome.get('state')}"
    if outcome.get("reason"):
        ended += f" ({outcome['reason']})"
    if view.state is JobState.PENDING:
        return f"requeued{f' ({view.reason})' if view.reason else ''}; {ended}"
    if view.state is JobState.UNKNOWN:
        return f"{ended}; Slurm could not be asked whether its job is over ({view.reason or 'no answer'})"
    return f"{ended}; its job is not over"


def waiting_for(view: JobView) -> str:
    """What a job waits for, with what to do where waiting does not help."""
    advice = explain.pending(view.reason) if view.state is JobState.PENDING else None
    return f"{view.reason}: {advice}" if advice else view.reason


def _look_from_outside(run_dir: RunDir, note: str) -> tuple[dict[str, Any], JobView | None]:
    from relax_slurm.control.backends import backend_for

    try:
        job = job_of(run_dir)
        view = backend_for(job[0]).poll(job[1]) if job is not None else None
    except JobUnknown as error:
        view = JobView(JobState.UNKNOWN, reason=error.message)
    body = run_dir.read("job.json") or {}
    if "refused" in body:
        note = str(body["refused"])
    elif view is not None and view.state in (JobState.PENDING, JobState.UNKNOWN) and view.reason:
        note = "; ".join(filter(None, (waiting_for(view), note)))
    elif view is not None and view.over:
        note = f"the job is over ({view.reason or view.state}) and left no outcome" if note else ""
    endpoint = run_dir.read("endpoint.json") or {}
    document: dict[str, Any] = {
        "run": run_dir.run,
        "attempt": run_dir.attempt,
        "epoch": endpoint.get("epoch"),
        "state": "UNSUBMITTED" if view is None else f"JOB_{view.state}",
        "reason": note or (view.reason if view is not None else ""),
        "gateway_url": None if view is None or view.over else endpoint.get("gateway_url"),
        "token_file": str(run_dir.token_file),
        "run_dir": str(run_dir.path),
        "roles": {},
        "leases": {},
        "batch": {"id": None, "state": None},
        "nodes": [],
        "replicas": [],
    }
    return document, view
