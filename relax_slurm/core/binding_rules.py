"""Rules over what the allocation and the nodes say. Each returns the problems it finds, one per table row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise

from relax_slurm.core.binding_node import NodeGpus
from relax_slurm.core.binding_plan import port_owners, replicas
from relax_slurm.core.binding_types import AllocationFacts, Backend, BoundNode, Problem
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.core.report import NodeReport

GIB = 1 << 30


def place_nodes(
    plan: InferencePlacementPlan, facts: AllocationFacts
) -> tuple[dict[tuple[str, int], str], list[Problem]]:
    """Node names for every (pool, node) of the plan; problems where the allocation has another shape."""
    problems: list[Problem] = []
    for component in plan.components:
        names = facts.nodes[component.index] if component.index < len(facts.nodes) else ()
        if len(names) != component.nodes:
            seen = f"{len(names)}: {','.join(names)[:200]}"
            problem = f"component {component.name}: node list is not as planned"
            problems.append(
                Problem("(allocation)", problem, source="node list", seen=seen, wanted=f"{component.nodes} nodes")
            )
    placed: dict[tuple[str, int], str] = {}
    for pool in plan.pools:
        names = facts.nodes[pool.component] if pool.component < len(facts.nodes) else ()
        for node in range(pool.nodes):
            if pool.first_node + node < len(names):
                placed[pool.name, node] = names[pool.first_node + node]
    homes: dict[str, int] = {}
    for pool in plan.pools:
        for node in range(pool.nodes):
            name = placed.get((pool.name, node))
            if name is not None and homes.setdefault(name, pool.component) != pool.component:
                wanted = "one component per node (ask for whole nodes, or use job_shape: single)"
                seen = f"components {homes[name]} and {pool.component}"
                problems.append(
                    Problem(
                        name,
                        "the node is in two components with GPUs",
                        source="node list",
                        seen=seen,
                        wanted=wanted,
                    )
                )
    return placed, problems


def check_reports(
    placed: Mapping[tuple[str, int], str], facts: AllocationFacts, reports: Mapping[str, NodeReport]
) -> list[Problem]:
    """Every planned node reported, nobody else did, and each report is from where it says."""
    planned = set(placed.values())
    problems = [
        Problem(name, "the node reported nothing", source="binding report", seen="none", wanted="one report")
        for name in sorted(planned - set(reports))
    ]
    for name, report in sorted(reports.items()):
        if name not in planned:
            wanted = ",".join(sorted(planned))[:200]
            problems.append(
                Problem(
                    name,
                    "a node that is not in the plan reported",
                    source="node list",
                    seen=name,
                    wanted=wanted,
                )
            )
        elif report.node != name:
            problems.append(Problem(name, "the report is another node's", source="node", seen=report.node, wanted=name))
        if facts.backend is Backend.SLURM:
            problems += _check_step(name, report, facts)
    return problems


def _check_step(name: str, report: NodeReport, facts: AllocationFacts) -> Iterator[Problem]:
    slurmd = report.environ.get("SLURMD_NODENAME")
    if slurmd is not None and slurmd != name:
        yield Problem(name, "the step runs on another node", source="SLURMD_NODENAME", seen=slurmd, wanted=name)
    job = report.environ.get("SLURM_JOB_ID")
    if facts.job_ids and job is not None and job not in facts.job_ids:
        yield Problem(
            name,
            "the report is another job's",
            source="SLURM_JOB_ID",
            seen=job,
            wanted=" or ".join(sorted(facts.job_ids)),
        )


def check_type(name: str, wanted: str | None, facts: AllocationFacts, gpus: NodeGpus) -> Iterator[Problem]:
    """GPU type against the allocation's; NVML's product name only has to be the same over one node."""
    given = facts.gpu_types.get(name)
    if wanted is not None and given is not None and given.casefold() != wanted.casefold():
        yield Problem(name, "GPU type is not as planned", source="scontrol show job -d", seen=given, wanted=wanted)
    kinds = sorted({device.name for device in gpus.devices if device is not None})
    if len(kinds) > 1:
        yield Problem(
            name,
            "GPUs of different types on one node",
            source="NVML",
            seen=", ".join(kinds),
            wanted="one type",
        )


def check_memory(name: str, gpus: NodeGpus, slots: int, limit: int) -> Iterator[Problem]:
    """Memory on the planned GPUs that is not ours. `limit` is in bytes."""
    for gpu, device in list(zip(gpus.gpus, gpus.devices, strict=True))[:slots]:
        if device is None:
            continue
        others = max(device.memory_used - device.own_memory, sum(entry.memory or 0 for entry in device.foreign))
        if others > limit:
            pids = ", ".join(f"pid {entry.pid}" for entry in device.foreign[:5]) or "no process visible from here"
            yield Problem(
                name,
                "GPU memory is already in use by someone else; end that process or choose another node",
                gpu=str(gpu.index),
                source="NVML",
                seen=f"{others / GIB:.1f} GiB ({pids})",
                wanted=f"at most {limit / GIB:.1f} GiB",
            )


def check_ports(
    plan: InferencePlacementPlan, place: tuple[str, int], name: str, report: NodeReport
) -> Iterator[Problem]:
    """The node holds a whole block inside the window and outside its ephemeral range."""
    window, block = plan.ports, report.port_block
    if block is None:
        owners = port_owners(plan, *place)
        busy = [
            f"{port} ({owners.get((port - window.first) % window.span, 'spare')})" for port in report.busy_ports[:8]
        ]
        yield Problem(
            name,
            f"no free block of {window.span} ports in {window.first}-{window.last}, widen the window",
            source="ports",
            seen=f"busy: {', '.join(busy)}" if busy else "no block",
            wanted=f"{window.span} free ports outside {report.ephemeral_range}",
        )
        return
    last = block.start + block.span - 1
    seen = f"{block.start}-{last}"
    if block.span < window.span or block.start < window.first or last > window.last:
        wanted = f"{window.span} ports in {window.first}-{window.last}"
        yield Problem(name, "the port block is not as planned", source="ports", seen=seen, wanted=wanted)
    elif report.ephemeral_range and block.start <= report.ephemeral_range[1] and last >= report.ephemeral_range[0]:
        wanted = f"outside {report.ephemeral_range[0]}-{report.ephemeral_range[1]}"
        yield Problem(name, "the port block lies in the ephemeral range", source="ports", seen=seen, wanted=wanted)


def check_machines(reports: Mapping[str, NodeReport]) -> Iterator[Problem]:
    """Two nodes on one machine hold different ports."""
    by_host: dict[tuple[str, str, str], list[tuple[int, int, str]]] = defaultdict(list)
    for name, report in reports.items():
        if report.port_block is not None:
            block = report.port_block
            by_host[report.host].append((block.start, block.start + block.span - 1, name))
    for blocks in by_host.values():
        blocks.sort()
        for (_, last, before), (start, _, name) in pairwise(blocks):
            if start <= last:
                yield Problem(
                    name,
                    f"port block overlaps {before}'s on the same machine",
                    source="ports",
                    seen=str(start),
                    wanted=f"above {last}",
                )


def check_physical(nodes: list[BoundNode]) -> Iterator[Problem]:
    """No two slots of the plan on one physical GPU."""
    holder: dict[str, str] = {}
    for node in nodes:
        for gpu in node.gpus:
            key = node.gpu_key(gpu.slot).casefold()
            here = f"{node.pool}[{node.node}] slot {gpu.slot} on {node.name}"
            other = holder.setdefault(key, here)
            if other != here:
                yield Problem(
                    node.name,
                    "two bundles on one physical GPU",
                    gpu=str(gpu.index),
                    source="UUID" if gpu.uuid is not None else "index",
                    seen=f"{node.gpu_key(gpu.slot)}: {here}",
                    wanted=f"another GPU than {other}",
                )


def check_slices(plan: InferencePlacementPlan, gpus: Mapping[tuple[str, int], NodeGpus]) -> Iterator[Problem]:
    """An engine of several GPUs cannot be built from MIG slices."""
    for _, replica in replicas(plan):
        for worker in replica.workers:
            found = gpus.get((worker.pool, worker.node))
            if found is None or len(replica.bundles) < 2:
                continue
            for slot in worker.gpus:
                device = found.devices[slot] if 0 <= slot < len(found.devices) else None
                if device is not None and device.mig_parent is not None:
                    yield Problem(
                        f"{worker.pool}[{worker.node}]",
                        f"{replica.replica_id} needs several GPUs, but MIG slices cannot talk to each other",
                        gpu=device.uuid,
                        source="NVML",
                        seen="MIG slice",
                        wanted="a whole GPU, or one GPU per engine",
                    )
