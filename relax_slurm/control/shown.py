"""How a model and its replicas look from outside: in discovery, and to the model's router."""

from __future__ import annotations

from collections.abc import Iterable

from relax_slurm.control.dispatch import Slot
from relax_slurm.control.router_api import RouterWorker
from relax_slurm.core.plan import ModelPlan, RouteMode, WeightSource, WorkerType
from relax_slurm.core.replica import Replica
from relax_slurm.core.snapshot import ModelEntry, ReplicaState, model_state
from relax_slurm.core.weights import Weights


def model_entry(model: ModelPlan, slots: Iterable[Slot], weights: Weights, router_url: str | None) -> ModelEntry:
    """The model as discovery shows it; prefill and decode workers stay inside."""
    every = list(slots)
    published = [slot.replica.published() for slot in every if slot.plan.worker_type is WorkerType.REGULAR]
    static = model.weight_source is WeightSource.STATIC
    return ModelEntry(
        name=model.name,
        state=shown_state(model, every, router_url),
        route_mode=model.route_mode,
        router_url=router_url,
        weight_source=model.weight_source,
        weight_version=None if static else weights.version,
        served_model_name=model.served_model_name,
        engines=tuple(sorted(published, key=lambda engine: engine.engine_id)),
    )


def shown_state(model: ModelPlan, slots: Iterable[Slot], router_url: str | None) -> ReplicaState:
    """The model's state. Behind a router it is READY while the router's URL is published, and not otherwise."""
    routed = model.route_mode is RouteMode.SGLANG_ROUTER
    if routed and router_url is not None:
        return ReplicaState.READY
    state = model_state(slot.replica.published().state for slot in slots)
    return ReplicaState.STARTING if routed and state is ReplicaState.READY else state


def router_worker(slot: Slot, replica: Replica) -> RouterWorker | None:
    """The replica as its router shall know it; None while it must not get requests."""
    shown = replica.published()
    if not shown.routable or shown.base_url is None:
        return None
    kind = slot.plan.worker_type
    port = slot.bindings[0].ports.bootstrap if kind is WorkerType.PREFILL else None
    return RouterWorker(replica.engine_id, shown.base_url, shown.generation, kind, port)
