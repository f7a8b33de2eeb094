"""Plans, facts and faithful reports for the binding tests, made by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_slurm.core.binding import AllocationFacts, Backend, HeadFacts
from relax_slurm.core.plan import (
    PLAN_VERSION,
    ComponentPlan,
    InferencePlacementPlan,
    Mode,
    ModelPlan,
    PoolPlan,
    PortWindow,
    ReplicaPlan,
    Role,
    RolePlan,
    RouteMode,
    WeightSource,
    WorkerPlan,
    WorkerPorts,
    WorkerType,
)
from relax_slurm.core.report import GpuDevice, InterfaceAddress, NodeReport, PortBlockReport

WINDOW = PortWindow(first=20000, last=29999, span=128)
STRIDE = 8
GIB = 1 << 30


@dataclass(frozen=True)
class Want:
    """One role on a pool of its own component: `engine` GPUs per engine."""

    role: Role
    nodes: int
    gpus_per_node: int
    engine: int
    gpu_type: str | None = "h100"


def _replica(want: Want, index: int) -> ReplicaPlan:
    per_node = want.gpus_per_node
    bundles = tuple(range(index * want.engine, (index + 1) * want.engine))
    workers = []
    for rank, node in enumerate(sorted({bundle // per_node for bundle in bundles})):
        slots = tuple(bundle % per_node for bundle in bundles if bundle // per_node == node)
        base = 1 + STRIDE * slots[0]
        workers.append(
            WorkerPlan(
                pool=want.role.value,
                node=node,
                node_rank=rank,
                gpus=slots,
                ports=WorkerPorts(base, base + 1, base + 2, base + 3, base + 4, base + 5),
            )
        )
    return ReplicaPlan(
        f"{want.role}/replica-{index}", want.role, want.role, index, WorkerType.REGULAR, bundles, tuple(workers)
    )


def _role(want: Want) -> RolePlan:
    total = want.nodes * want.gpus_per_node
    model = ModelPlan(
        role=want.role,
        name=want.role.value,
        model_path="/models/m",
        served_model_name="m",
        route_mode=RouteMode.DIRECT,
        weight_source=WeightSource.STATIC,
        gpus_per_engine=want.engine,
        engine_args={},
        replicas=tuple(_replica(want, index) for index in range(total // want.engine)),
    )
    return RolePlan(want.role, want.role.value, 0, total, 0, False, model.name, {}, {}, "round_robin", (model,))


def make_plan(*wants: Want) -> InferencePlacementPlan:
    """A decoupled plan: one component and one pool per role."""
    return InferencePlacementPlan(
        version=PLAN_VERSION,
        run="r",
        mode=Mode.DECOUPLED,
        job_shape="het",
        head_component=None,
        components=tuple(
            ComponentPlan(index, want.role, want.nodes, want.gpus_per_node, want.gpu_type)
            for index, want in enumerate(wants)
        ),
        pools=tuple(
            PoolPlan(want.role, index, want.nodes, want.gpus_per_node, want.gpu_type)
            for index, want in enumerate(wants)
        ),
        roles=tuple(_role(want) for want in wants),
        training=None,
        ports=WINDOW,
        engine="sim",
    )


def ids(numbers: tuple[int, ...]) -> str:
    """A comma list."""
    return ",".join(map(str, numbers))


def make_report(node: str, gpus: tuple[int, ...], number: int = 0, **changes: Any) -> NodeReport:
    """What a Slurm node with these GPUs and no NVML reports; `environ` entries set to None are removed."""
    environ: dict[str, str | None] = {
        "SLURMD_NODENAME": node,
        "SLURM_STEP_GPUS": ids(gpus),
        "SLURM_GPUS_ON_NODE": str(len(gpus)),
        "CUDA_VISIBLE_DEVICES": ids(gpus),
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": "1",
    }
    environ |= changes.pop("environ", {})
    values: dict[str, Any] = {
        "node": node,
        "hostname": node,
        "boot_id": f"boot-{node}",
        "net_ns": "4026531833",
        "pid": 100,
        "addresses": (
            InterfaceAddress(interface="lo", address="127.0.0.1", prefix=8),
            InterfaceAddress(interface="eth0", address=f"10.0.{number // 190}.{number % 190 + 1}", prefix=24),
        ),
        "port_block": PortBlockReport(start=20000, span=128),
        "ephemeral_range": (32768, 60999),
        "environ": {name: value for name, value in environ.items() if value is not None},
    }
    return NodeReport(**(values | changes))


def device(ordinal: int, uuid: str, **changes: Any) -> GpuDevice:
    """An H100 with nothing on it."""
    values = {
        "ordinal": ordinal,
        "uuid": uuid,
        "name": "NVIDIA H100 80GB HBM3",
        "memory_total": 80 * GIB,
        "memory_used": 0,
    }
    return GpuDevice(**(values | changes))


def devices(count: int, node: str = "n", **changes: Any) -> tuple[GpuDevice, ...]:
    """`count` idle GPUs as NVML enumerates them."""
    return tuple(device(ordinal, f"GPU-{node}-{ordinal:04x}", **changes) for ordinal in range(count))


def cluster(plan: InferencePlacementPlan, first_gpu: int = 0) -> tuple[AllocationFacts, dict[str, NodeReport]]:
    """Facts and faithful reports for a plan: node `n{i}` owns GPUs `first_gpu`… of its component's width."""
    nodes: list[tuple[str, ...]] = []
    reports: dict[str, NodeReport] = {}
    indexes: dict[str, tuple[int, ...]] = {}
    types: dict[str, str] = {}
    for component in plan.components:
        names = tuple(f"n{len(reports) + offset}" for offset in range(component.nodes))
        for name in names:
            indexes[name] = tuple(range(first_gpu, first_gpu + component.gpus_per_node))
            reports[name] = make_report(name, indexes[name], len(reports))
            if component.gpu_type is not None:
                types[name] = component.gpu_type
        nodes.append(names)
    facts = AllocationFacts(
        backend=Backend.SLURM,
        nodes=tuple(nodes),
        gpu_indexes=indexes,
        gpu_types=types,
        batch_host=nodes[0][0],
        job_ids=frozenset({"77"}),
        head=HeadFacts(
            "head",
            "boot-head",
            "4026531833",
            (InterfaceAddress(interface="eth0", address="10.0.0.200", prefix=24),),
        ),
    )
    return facts, reports
