"""`relax-slurm doctor [RUN|CONFIG] [--site] [--recover]`: what is wrong, which evidence is missing, what to do next.

With a run file (or `--site` alone) it looks at the site: Slurm's configuration, partitions, nodes, and whether this
plan can ever start there. With a run it says what is known of it. Nothing is changed, unless `--recover` asks the
coordinator to let a run go on after a failed batch, which it does on evidence of release only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from pathlib import Path
from typing import Any

from relax_slurm.cli.common import state_of
from relax_slurm.config.load import load
from relax_slurm.control.run_dir import RunDir, find, runs_root
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.errors import ConfigError, SubmissionRefused
from relax_slurm.slurm.command import SECONDS
from relax_slurm.slurm.site_check import Finding, Level, check_site
from relax_slurm.slurm.site_facts import gather
from relax_slurm.wire.host import ephemeral_range
from relax_slurm.workload import preflight

_MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARN: "WARN", Level.UNKNOWN: "?", Level.BAD: "BAD"}
OVER = frozenset({"STOPPED", "JOB_ENDED", "JOB_GONE"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument("subject", nargs="?", metavar="RUN|CONFIG", help="a run, or a run file (default: the site)")
    parser.add_argument("--site", action="store_true", help="look at the site as well when a run is named")
    parser.add_argument(
        "--recover",
        action="store_true",
        help="give up a failed or abandoned batch; the run goes on where it is safe",
    )
    parser.add_argument("--runs-root", default=None, help="folder of all runs (default: ~/.relax_slurm/runs)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override one key of a run file"
    )


def run(args: argparse.Namespace) -> int:
    """Exit 0 when nothing is bad; 4 when a launch would not work here; the run's own exit code when it failed; 9 when
    `--recover` finds no evidence."""
    subject = args.subject
    if args.recover and (subject is None or _is_file(subject)):
        raise ConfigError(f"--recover needs a run, got {subject or 'nothing'!r}; `relax-slurm status` names the newest")
    code, document = 0, {}
    findings: list[Finding] = []
    if subject is None or _is_file(subject):
        found = _site(subject, args.set)
        findings += found
        code = SubmissionRefused.exit_code if any(entry.level is Level.BAD for entry in found) else 0
    else:
        run_dir = find(runs_root(args.runs_root, os.environ), subject)
        if args.recover:
            asyncio.run(_recover(run_dir))
        state = state_of(run_dir)
        findings += of_run(state)
        document = {"run": state["run"], "state": state["state"]}
        outcome = run_dir.newest().read("outcome.json") or {}
        code = int(outcome.get("exit_code") or 0)
        if args.site:
            findings += _site(None, ())
    if args.json:
        print(json.dumps(document | {"findings": [entry.as_row() for entry in findings], "exit_code": code}, indent=2))
    else:
        print(text(findings))
    return code


async def _recover(run_dir: RunDir) -> None:
    from relax_slurm.client.lifecycle import LifecycleClient

    async with await LifecycleClient.of(run_dir.newest().path) as lifecycle:
        await lifecycle.give_up()
        await lifecycle.recover()


def text(findings: list[Finding]) -> str:
    """What a person reads: the worst last, where the eye is."""
    order = [Level.OK, Level.NOTE, Level.UNKNOWN, Level.WARN, Level.BAD]
    lines = []
    for entry in sorted(findings, key=lambda found: order.index(found.level)):
        lines.append(f"{_MARKS[entry.level]:5} {entry.what}: {entry.seen}")
        if entry.advice:
            lines.append(f"      {entry.advice}")
    bad = sum(entry.level is Level.BAD for entry in findings)
    warn = sum(entry.level is Level.WARN for entry in findings)
    lines.append(f"{bad} bad, {warn} to look at" if bad or warn else "nothing wrong was found")
    return "\n".join(lines)


def _is_file(subject: str) -> bool:
    return subject.endswith((".yaml", ".yml")) or Path(subject).is_file()


def _site(path: str | None, overrides: Any) -> list[Finding]:
    """The site alone, or a run file on it; mistakes in the file are errors of their own (exit 2 and 3)."""
    if path is None:
        return check_site(gather(os.environ))
    config = load(path, overrides)
    plan = make_plan(config, ephemeral=ephemeral_range())
    preflight.check(config, plan)
    seconds = min(config.slurm.command_seconds, SECONDS)
    return check_site(gather(os.environ, seconds=seconds), config, plan)


def of_run(state: dict[str, Any]) -> list[Finding]:
    """What a state document tells about a run, and what to do next."""
    name = state["run"]
    found = [Finding(_level_of(state["state"]), "run", _sentence(state), _next(state))]
    if state.get("error"):
        found.append(Finding(Level.BAD, "error", str(state["error"]["message"])))
    recovery = f"`relax-slurm doctor {name} --recover` lets the run go on where it is safe"
    if state.get("lifecycle_failure") and state["state"] not in {"FAILED", *OVER}:
        found.append(Finding(Level.BAD, "batches", f"none begins: {state['lifecycle_failure']}", recovery))
    for role, lease in state.get("leases", {}).items():
        if lease == "BLOCKED":
            advice = (
                f"its GPUs stay fenced until there is proof of release; {recovery}, `relax-slurm stop {name}` ends it"
            )
            found.append(Finding(Level.BAD, f"lease of {role}", lease, advice))
    for node in state.get("nodes", []):
        if node["state"] != "UP" and state["state"] not in OVER:
            heard = node.get("heard_seconds_ago")
            seen = "nothing was heard of it yet" if heard is None else f"last heard {heard:.0f} s ago"
            log = f"see {state['run_dir']}/logs/{node['node']}_sidecar.log"
            found.append(Finding(Level.WARN, f"node {node['node']}", f"{node['state']}, {seen}", log))
    for replica in state.get("replicas", []):
        if replica["state"] == "FAILED":
            proof = "" if replica.get("release_proven") else "; that its GPUs are free is not proven"
            seen = f"FAILED: {replica.get('reason') or 'no reason is known'}{proof}"
            found.append(Finding(Level.BAD, f"replica {replica['replica']}", seen))
    return found


def _level_of(state: str) -> Level:
    return {"READY": Level.OK, "FAILED": Level.BAD, "DEGRADED": Level.WARN}.get(state, Level.NOTE)


def _sentence(state: dict[str, Any]) -> str:
    reason = f" ({state['reason']})" if state.get("reason") else ""
    return f"{state['run']} attempt {state['attempt']} is {state['state']}{reason}"


def _next(state: dict[str, Any]) -> str:
    name = state["run"]
    if state["state"] in {"FAILED", *OVER}:
        return f"logs are in {state['run_dir']}/logs; `relax-slurm launch CONFIG` starts the next attempt"
    if state["state"] == "READY":
        return ""
    return f"`relax-slurm logs {name} --follow` shows what it does"
