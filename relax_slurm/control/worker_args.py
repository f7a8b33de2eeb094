"""The arguments of `start_worker`: one engine process with everything absolute (addresses, ports, GPUs)."""

from __future__ import annotations

from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.core.binding import BoundPlan
from relax_slurm.core.plan import ModelPlan, ReplicaPlan, WeightSource, WorkerType
from relax_slurm.core.weights import Weights

LOOPBACK = "127.0.0.1"


def worker_args(
    model: ModelPlan,
    weights: Weights,
    replica: ReplicaPlan,
    rank: int,
    bound: BoundPlan,
    config: RunConfig,
    *,
    run_tag: str,
    memory_saver: bool,
    generation: int,
) -> dict[str, Any]:
    """What the sidecar needs to start worker `rank` of a replica (fields of `sidecars.worker.WorkerSpec`).

    `weights` are the model's present ones. Those that are on no disk cannot be started with: the engine then loads the
    checkpoint of the run file, and does not serve before it has been sent the others.

    An engine on one node listens on loopback, so that only its guard can reach it; the head of a replica over several
    nodes must be reachable by its peers, and so must a prefill engine by the decode engines: its bootstrap server
    listens where its HTTP server does.
    """
    worker = replica.workers[rank]
    binding = bound.worker_binding(worker)
    rendezvous_host, rendezvous_port = bound.rendezvous(replica)
    paired = replica.worker_type in (WorkerType.PREFILL, WorkerType.DECODE)
    alone = len(replica.workers) == 1
    engine = config.engine
    engine_args = model.engine_args_of(replica)
    if model.weight_source is not WeightSource.STATIC and weights.path is not None:
        engine_args = {**engine_args, "weight_version": weights.version}
    spec = {
        "worker_id": f"{replica.replica_id}#{rank}",
        "replica_id": replica.replica_id,
        "role": str(model.role),
        "model": model.name,
        "program": engine.program,
        "model_path": model.model_path if weights.path is None else weights.path,
        "served_model_name": model.served_model_name,
        "host": LOOPBACK if alone and not paired else binding.address,
        "ports": {
            "http": binding.ports.http,
            "nccl": binding.ports.nccl,
            "rendezvous": rendezvous_port,
            "bootstrap": binding.ports.bootstrap,
        },
        "weight_source": str(model.weight_source),
        "worker_type": str(replica.worker_type),
        "nnodes": len(replica.workers),
        "node_rank": rank,
        "rendezvous_host": LOOPBACK if alone else rendezvous_host,
        "gpus": list(binding.visible),
        "gpu_indexes": list(binding.indexes),
        "engine_args": engine_args,
        "env": engine.env,
        "memory_saver": memory_saver,
        "startup_seconds": engine.startup_seconds,
        "run_tag": run_tag,
        "sim": engine.sim.model_dump(mode="json"),
    }
    if engine.python is not None:
        spec["python"] = engine.python
    if engine.container is not None and engine.container.runtime != "pyxis":
        spec["python"] = engine.container.python
        spec["container"] = engine.container.model_dump(mode="json")
    return {
        "spec": spec,
        "guard": {"host": binding.address, "port": binding.ports.guard_of(generation), "generation": generation},
        "health": engine.health.model_dump(),
    }
