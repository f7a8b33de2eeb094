"""The engine arguments of a plan, as they will be passed, before any node is known.

The sidecar builds the real command line; a test keeps the two equal. Ports are those of a node whose block
begins at the first port of the window, which is what happens on a node where nothing else runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from relax_slurm.config.engine_args import to_argv
from relax_slurm.core.engine_spec import spec_for
from relax_slurm.core.plan import (
    InferencePlacementPlan,
    ModelPlan,
    ReplicaPlan,
    Role,
    RolePlan,
    WorkerPlan,
    WorkerType,
)

LOOPBACK = "127.0.0.1"
PROGRAMS = {"sglang": ("-m", "sglang.launch_server"), "sim": ("-m", "sidecars.sim")}
"""What the interpreter on the node is asked to run, per engine program."""


@dataclass(frozen=True, slots=True)
class PlannedCommand:
    """One engine process to be."""

    role: Role
    replica_id: str
    node_rank: int
    pool: str
    node: int
    gpus: tuple[int, ...]
    argv: tuple[str, ...]
    """Arguments without the interpreter. Keys are never in it."""


def planned_commands(plan: InferencePlacementPlan) -> Iterator[PlannedCommand]:
    """All engine processes in the plan's order."""
    for role in plan.roles:
        for model in role.models:
            for replica in model.replicas:
                for worker in replica.workers:
                    argv = (*PROGRAMS[plan.engine], *engine_arguments(plan, role, model, replica, worker))
                    yield PlannedCommand(
                        role=role.role,
                        replica_id=replica.replica_id,
                        node_rank=worker.node_rank,
                        pool=worker.pool,
                        node=worker.node,
                        gpus=worker.gpus,
                        argv=argv,
                    )


def engine_arguments(
    plan: InferencePlacementPlan, role: RolePlan, model: ModelPlan, replica: ReplicaPlan, worker: WorkerPlan
) -> list[str]:
    """The arguments of one worker: what the tool owns first, then the run file's."""
    alone = len(replica.workers) == 1
    head = replica.workers[0]
    block = plan.ports.first
    host = LOOPBACK if alone else node_name(worker)
    rendezvous = LOOPBACK if alone else node_name(head)
    owned: dict[str, Any] = {
        "model_path": model.model_path,
        "served_model_name": model.served_model_name,
        "host": host,
        "port": block + worker.ports.http,
        "nccl_port": block + worker.ports.nccl,
        "dist_init_addr": f"{rendezvous}:{block + head.ports.rendezvous}",
        "nnodes": len(replica.workers),
        "node_rank": worker.node_rank,
        "enable_memory_saver": role.offload,
    }
    if replica.worker_type in {WorkerType.PREFILL, WorkerType.DECODE}:
        owned["disaggregation_mode"] = replica.worker_type.value
    if replica.worker_type is WorkerType.PREFILL:
        owned["disaggregation_bootstrap_port"] = block + worker.ports.bootstrap
    given = model.engine_args_of(replica)
    if role.offload:
        given = {**spec_for(role.role, model.weight_source).overrides, **given}
    return to_argv({**owned, **given})


def node_name(worker: WorkerPlan) -> str:
    """Stands for the node's address, which is known once Slurm has placed the job."""
    return f"{worker.pool}[{worker.node}]"
