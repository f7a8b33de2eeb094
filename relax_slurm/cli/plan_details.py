"""Parts of `plan` that are neither picture nor script: bundles by phase, step commands, ports, addresses.

A node that Slurm has not chosen yet is called `component[n]` or `pool[n]`; ports are those of a node on which nothing
else runs.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from relax_slurm.cli.picture import FREE, rows
from relax_slurm.config.models import RunConfig
from relax_slurm.control.head_ports import HEAD_PORTS
from relax_slurm.core.placement_commands import LOOPBACK, node_name
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan, RouteMode
from relax_slurm.slurm.container import own_mounts, step_options
from relax_slurm.slurm.steps import node_step

PORT_FIELDS = ("guard", "http", "nccl", "bootstrap", "rendezvous")


def bundles(plan: InferencePlacementPlan) -> list[dict[str, Any]]:
    """One entry per pool, phase and role: the bundles that it holds then, as ranges of first and last."""
    found: list[dict[str, Any]] = []
    for pool in plan.pools:
        for row in rows(plan, pool):
            held = [index for index, cell in enumerate(row.cells) if cell != FREE]
            found.append({"pool": pool.name, "phase": row.phase, "role": row.label, "bundles": _ranges(held)})
    return found


def step_commands(plan: InferencePlacementPlan, config: RunConfig, run_dir: Path) -> list[dict[str, Any]]:
    """The srun of every node's step, one entry per component that has any; `n` counts its nodes."""
    het = plan.job_shape == "het"
    container = config.engine.container
    python = container.python if container is not None and container.runtime == "pyxis" else sys.executable
    found = []
    for component in plan.components:
        if component.index == plan.head_component:
            continue
        node = f"{component.name}[n]"
        argv = node_step(
            node,
            [python, "-m", "sidecars.node", "--run-dir", str(run_dir)],
            het_group=component.index if het else None,
            name=f"sidecar-{node}",
            output=run_dir / "logs" / f"{node}_sidecar.log",
            extra=[*step_options(container, own_mounts(run_dir)), *_words(config)],
        )
        found.append({"component": component.index, "nodes": component.nodes, "argv": argv})
    return found


def _words(config: RunConfig) -> list[str]:
    return [word for line in config.slurm.extra_srun for word in shlex.split(line)]


def ports(plan: InferencePlacementPlan) -> list[dict[str, Any]]:
    """The ports of every engine process on a node whose block starts at the window's first port."""
    start = plan.ports.first
    return [
        {
            "replica": replica.replica_id,
            "role": str(role.role),
            "node": node_name(worker),
            **{name: start + getattr(worker.ports, name) for name in PORT_FIELDS},
        }
        for role in plan.roles
        for model in role.models
        for replica in model.replicas
        for worker in replica.workers
    ]


def addresses(plan: InferencePlacementPlan, config: RunConfig) -> dict[str, Any]:
    """Where things will listen. `head` stands for the head node's advertised address."""
    host = config.gateway.host or "head"
    last = plan.ports.last
    where = "the first free one from there down" if config.gateway.port is None else ""
    return {
        "head": _head(plan),
        "gateway": f"http://{host}:{config.gateway.port or last}",
        "gateway_note": where,
        "head_ports": [max(plan.ports.first, last - HEAD_PORTS + 1), last],
        "routers": [
            f"{role.role}/{model.name}"
            for role in plan.roles
            for model in role.models
            if model.route_mode is RouteMode.SGLANG_ROUTER
        ],
        "guards": {
            replica.replica_id: f"http://{node_name(head)}:{plan.ports.first + head.ports.guard}"
            for role in plan.roles
            for model in role.models
            for replica in model.replicas
            for head in replica.workers[:1]
        },
        "engines": f"on {LOOPBACK} behind their guards, unless a replica spans nodes or is half of a pair",
    }


def _head(plan: InferencePlacementPlan) -> str:
    component = plan.components[0]
    return f"first node of component 0 ({component.name})"


def step_lines(plan: InferencePlacementPlan, config: RunConfig, run_dir: Path) -> list[str]:
    """The same as `step_commands`, as text."""
    lines = []
    for entry in step_commands(plan, config, run_dir):
        component = _component(plan, entry["component"])
        count = f"n = 0 to {component.nodes - 1}" if component.nodes > 1 else "n = 0"
        lines.append(f"component {component.index} ({component.name}), {count}: {shlex.join(entry['argv'])}")
    return lines


def address_lines(plan: InferencePlacementPlan, config: RunConfig) -> list[str]:
    """The same as `addresses`, as text."""
    known = addresses(plan, config)
    first, last = known["head_ports"]
    note = f" ({known['gateway_note']})" if known["gateway_note"] else ""
    lines = [f"head: {known['head']}", f"gateway: {known['gateway']}{note}"]
    lines.append(f"coordinator, discovery{', routers' if known['routers'] else ''}: head, ports {first}-{last}")
    lines.append(f"engines: {known['engines']}")
    return lines


def _component(plan: InferencePlacementPlan, index: int) -> ComponentPlan:
    return next(component for component in plan.components if component.index == index)


def _ranges(held: list[int]) -> list[list[int]]:
    found: list[list[int]] = []
    for bundle in held:
        if found and found[-1][1] == bundle - 1:
            found[-1][1] = bundle
        else:
            found.append([bundle, bundle])
    return found
