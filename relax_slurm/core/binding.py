"""Physical binding: the plan, what the backend says and what every node reported, put together or refused.

`bind` is the last gate before an engine starts. It finds all mismatches before it refuses, because a user
who repairs one at a time waits for the queue each time. Rules: docs/binding.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from relax_slurm.core.binding_address import choose_addresses
from relax_slurm.core.binding_advice import advice
from relax_slurm.core.binding_node import NodeGpus, identify
from relax_slurm.core.binding_plan import check_plan, port_owners
from relax_slurm.core.binding_rules import (
    check_machines,
    check_memory,
    check_physical,
    check_ports,
    check_reports,
    check_slices,
    check_type,
    place_nodes,
)
from relax_slurm.core.binding_types import (
    AllocationFacts,
    Backend,
    BoundGpu,
    BoundNode,
    BoundPlan,
    BoundPorts,
    HeadFacts,
    Problem,
    Says,
    Source,
    Verdict,
    WorkerBinding,
)
from relax_slurm.core.plan import InferencePlacementPlan, PoolPlan
from relax_slurm.core.report import NodeReport
from relax_slurm.errors import BindingMismatch

DEFAULT_MEMORY_LIMIT = 1 << 30
"""Bytes of foreign memory on a card that pass as the driver's and the site's monitoring: 1 GiB."""


def bind(
    plan: InferencePlacementPlan,
    facts: AllocationFacts,
    reports: Mapping[str, NodeReport],
    *,
    allow_unverified: bool = False,
    memory_limit: int = DEFAULT_MEMORY_LIMIT,
) -> BoundPlan:
    """Bind every slot of the plan to a GPU, or raise `BindingMismatch` with a row per mismatch.

    `reports` is keyed by node name. `allow_unverified` accepts nodes whose GPUs nothing confirms; it never
    accepts a contradiction. `memory_limit` is in bytes.
    """
    problems = check_plan(plan)
    placed, found = place_nodes(plan, facts)
    problems += found
    problems += check_reports(placed, facts, reports)
    present = {name: reports[name] for name in dict.fromkeys(placed.values()) if name in reports}
    addresses, found = choose_addresses(
        present, head=facts.head, local=facts.backend is Backend.LOCAL, interface=facts.interface
    )
    problems += found

    identified: dict[str, NodeGpus] = {}
    by_place: dict[tuple[str, int], NodeGpus] = {}
    nodes: list[BoundNode] = []
    for pool in plan.pools:
        for number in range(pool.nodes):
            name = placed.get((pool.name, number))
            report = present.get(name) if name is not None else None
            if name is None or report is None:
                continue
            if name not in identified:
                identified[name] = _look_at(
                    plan, pool, name, report, facts, allow_unverified=allow_unverified, problems=problems
                )
            gpus = by_place[pool.name, number] = identified[name]
            problems += check_memory(name, gpus, pool.gpus_per_node, memory_limit)
            problems += check_ports(plan, (pool.name, number), name, report)
            block = report.port_block
            nodes.append(
                BoundNode(
                    pool=pool.name,
                    node=number,
                    name=name,
                    hostname=report.hostname,
                    boot_id=report.boot_id,
                    address=addresses.get(name, ""),
                    port_block_start=block.start if block is not None else 0,
                    gpus=gpus.gpus[: pool.gpus_per_node],
                    verdict=gpus.verdict,
                    sources=gpus.sources,
                    reason=gpus.reason,
                )
            )
    problems += check_machines(present)
    problems += check_physical(nodes)
    problems += check_slices(plan, by_place)
    if problems:
        raise _refusal(problems, len(set(placed.values())))
    return BoundPlan(tuple(nodes))


def _look_at(
    plan: InferencePlacementPlan,
    pool: PoolPlan,
    name: str,
    report: NodeReport,
    facts: AllocationFacts,
    *,
    allow_unverified: bool,
    problems: list[Problem],
) -> NodeGpus:
    """The GPUs of one node; adds what is wrong with them to `problems`."""
    component = next((entry for entry in plan.components if entry.index == pool.component), None)
    wanted = component.gpus_per_node if component is not None else pool.gpus_per_node
    gpus = identify(name, report, facts, pool.component, wanted)
    problems += gpus.problems
    problems += check_type(name, pool.gpu_type, facts, gpus)
    if gpus.verdict is Verdict.CANNOT_VERIFY and not allow_unverified:
        seen = "; ".join(f"{entry.name}={entry.seen} ({entry.says.value})" for entry in gpus.sources)
        wanted_text = "the step's own list and one independent source (or --allow-unverified)"
        problems.append(
            Problem(name, f"cannot verify: {gpus.reason}", source="all sources", seen=seen, wanted=wanted_text)
        )
    return gpus


def _refusal(problems: list[Problem], nodes: int) -> BindingMismatch:
    unique = list(dict.fromkeys(problems))
    first = unique[0]
    where = f"{first.node} {first.source}".strip()
    return BindingMismatch(
        f"binding refused, no engine was started: {len(unique)} mismatch(es), {nodes} node(s) planned; "
        f"first: {where}: {first.problem} (seen {first.seen}, wanted {first.wanted}); "
        f"{advice(first.problem)}",
        rows=[problem.as_row() for problem in unique],
    )


__all__ = [
    "DEFAULT_MEMORY_LIMIT",
    "AllocationFacts",
    "Backend",
    "BoundGpu",
    "BoundNode",
    "BoundPlan",
    "BoundPorts",
    "HeadFacts",
    "Problem",
    "Says",
    "Source",
    "Verdict",
    "WorkerBinding",
    "bind",
    "port_owners",
]
