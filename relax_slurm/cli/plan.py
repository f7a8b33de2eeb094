"""`relax-slurm plan CONFIG`: everything a launch would do, without doing any of it. No Slurm needed."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from relax_slurm.cli.picture import picture
from relax_slurm.cli.picture_svg import svg
from relax_slurm.cli.plan_details import address_lines, addresses, bundles, ports, step_commands, step_lines
from relax_slurm.cli.warn import warnings
from relax_slurm.config.load import load
from relax_slurm.config.models import RunConfig
from relax_slurm.control.prepare import script_paths
from relax_slurm.control.run_dir import RunDir, runs_root
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.core.placement_commands import PlannedCommand, planned_commands
from relax_slurm.core.placement_json import to_value
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan
from relax_slurm.slurm.container import own_mounts, wrap
from relax_slurm.slurm.script import render
from relax_slurm.wire.host import ephemeral_range
from relax_slurm.workload import preflight

MAX_ROWS = 40
"""Replicas and command lines shown as text; --json has all of them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments. `--json` is common to all verbs and added by the caller."""
    parser.add_argument("config", metavar="CONFIG", help="run file (YAML)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override one key, for instance --set slurm.partition=gpu (repeatable)",
    )
    parser.add_argument("--svg", action="store_true", help="print the picture as an SVG document and nothing else")
    parser.add_argument("--all", action="store_true", help=f"show all rows, not only the first {MAX_ROWS}")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; returns 0. Raises ConfigError (exit 2) or a refusal (exit 3)."""
    config = load(args.config, getattr(args, "set", None) or ())
    plan = make_plan(config, ephemeral=ephemeral_range())
    preflight.check(config, plan)
    if getattr(args, "svg", False):
        print(svg(plan), end="")
        return 0
    attempt = RunDir.upcoming(runs_root(config.runs_root, os.environ), config.name)
    script = render(plan, config, script_paths(attempt, config))
    if getattr(args, "json", False):
        print(json.dumps(document(config, plan, script), indent=2))
        return 0
    limit = None if getattr(args, "all", False) else MAX_ROWS
    width = shutil.get_terminal_size((100, 24)).columns
    print(text(config, plan, script, width=width, limit=limit), end="")
    return 0


def document(config: RunConfig, plan: InferencePlacementPlan, script: str) -> dict[str, Any]:
    """The JSON document of `plan --json`."""
    return {
        "run": plan.run,
        "plan": to_value(plan),
        "config": json.loads(config.resolved_json()),
        "picture": picture(plan),
        "bundles": bundles(plan),
        "components": [asdict(component) for component in plan.components],
        "warnings": list(warnings(plan, config)),
        "script": script,
        "steps": step_commands(plan, config, _run_dir(config)),
        "engines": [asdict(command) for command in planned_commands(plan)],
        "ports": ports(plan),
        "addresses": addresses(plan, config),
    }


def _run_dir(config: RunConfig) -> Path:
    """Where the attempt that a launch would make now would live."""
    return RunDir.upcoming(runs_root(config.runs_root, os.environ), config.name).path


def text(
    config: RunConfig,
    plan: InferencePlacementPlan,
    script: str,
    *,
    width: int = 100,
    limit: int | None = MAX_ROWS,
) -> str:
    """What a person reads."""
    commands = list(planned_commands(plan))
    parts = [
        f"{plan.run}: {plan.mode}, {_job(plan)}, engine {plan.engine}",
        picture(plan, width=width).rstrip(),
        _section("components", [_component(component) for component in plan.components]),
        _section("replicas", _replicas(plan, limit)),
        _section("ports", _ports(plan)),
        _section("addresses", address_lines(plan, config)),
        _section("node steps", step_lines(plan, config, _run_dir(config))),
        _section("engine command lines", _commands(config, plan, commands, limit)),
        _section("sbatch script (of the attempt that a launch would make now)", script.rstrip().splitlines()),
    ]
    if found := warnings(plan, config):
        parts.insert(1, _section("warnings", list(found)))
    return "\n\n".join(parts) + "\n"


def _section(title: str, lines: list[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}".rstrip() for line in lines)])


def _job(plan: InferencePlacementPlan) -> str:
    count = len(plan.components)
    nodes = sum(component.nodes for component in plan.components)
    gpus = sum(component.nodes * component.gpus_per_node for component in plan.components)
    shape = "one homogeneous job" if plan.job_shape == "single" else f"one heterogeneous job of {count} components"
    return f"{shape}, {nodes} node{'s' if nodes > 1 else ''}, {gpus} GPU{'s' if gpus > 1 else ''}"


def _component(component: ComponentPlan) -> str:
    kind = f"{component.gpu_type} " if component.gpu_type else ""
    words = [f"{component.nodes} node{'s' if component.nodes > 1 else ''}"]
    words.append(f"{component.gpus_per_node} {kind}GPUs each" if component.gpus_per_node else "no GPUs (head)")
    if component.cpus_per_node:
        words.append(f"{component.cpus_per_node} CPUs each")
    if component.mem:
        words.append(f"memory {component.mem}")
    if component.partition:
        words.append(f"partition {component.partition}")
    return f"{component.index} {component.name}: {', '.join(words)}"


def _replicas(plan: InferencePlacementPlan, limit: int | None) -> list[str]:
    lines = []
    for role in plan.roles:
        for model in role.models:
            lines += [f"{role.role:8} {engine.engine_id}: somebody else's, {engine.url}" for engine in model.external]
            for replica in model.replicas:
                first, last = replica.bundles[0], replica.bundles[-1]
                bundles = f"bundle {first}" if first == last else f"bundles {first}-{last}"
                places = [
                    f"{worker.pool}[{worker.node}] gpu {_range(worker.gpus)} block+{worker.ports.guard}"
                    for worker in replica.workers
                ]
                kind = "" if replica.worker_type == "regular" else f" ({replica.worker_type})"
                where = ", ".join(places) or "starts nothing"
                lines.append(f"{role.role:8} {replica.replica_id}{kind}: {bundles}; {where}")
    return _cut(lines, limit)


def _ports(plan: InferencePlacementPlan) -> list[str]:
    window = plan.ports
    return [
        f"each node takes the first free block of {window.span} ports in {window.first}-{window.last}, outside its",
        "ephemeral range; within a block an engine has guard, http, nccl, bootstrap, second guard, rendezvous",
    ]


def _commands(
    config: RunConfig, plan: InferencePlacementPlan, commands: list[PlannedCommand], limit: int | None
) -> list[str]:
    container = config.engine.container
    python = config.engine.python or "python"
    if container is not None:
        python = container.python
        if container.runtime != "pyxis":  # pyxis puts the whole node step into the image, see the node steps
            python = shlex.join(wrap(container, [python], {}, own_mounts(_run_dir(config))))
    lines = [f"(ports as on a node whose block starts at {plan.ports.first}; keys are passed in a private file)"]
    shown: list[str] = []
    for _, group in groupby(commands, key=lambda command: command.replica_id):
        for command in group:
            rank = f" rank {command.node_rank}" if command.node_rank else ""
            gpus = ",".join(str(gpu) for gpu in command.gpus)
            shown.append(
                f"{command.replica_id}{rank} on {command.pool}[{command.node}] gpu {gpus}: "
                f"{python} {shlex.join(command.argv)}"
            )
    return lines + _cut(shown, limit)


def _cut(lines: list[str], limit: int | None) -> list[str]:
    if limit is None or len(lines) <= limit:
        return lines
    return [*lines[:limit], f"… and {len(lines) - limit} more (--all shows them, --json has them)"]


def _range(gpus: tuple[int, ...]) -> str:
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"
