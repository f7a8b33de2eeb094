"""Bundles to replicas: a model's groups laid out one after the other, each engine on its nodes with its
ports."""

from __future__ import annotations

from dataclasses import dataclass

from relax_slurm.config.models import ModelConfig, RoleConfig
from relax_slurm.core.placement_budget import GroupBudget, ModelBudget, RoleBudget
from relax_slurm.core.placement_errors import EngineStraddlesNodes, WholeNodes
from relax_slurm.core.placement_layout import Slice
from relax_slurm.core.plan import (
    ExternalPlan,
    GroupPlan,
    ModelPlan,
    ReplicaPlan,
    Role,
    RolePlan,
    RouteMode,
    WeightSource,
    WorkerPlan,
    WorkerType,
)
from relax_slurm.core.ports import NodePorts


def role_plan(config: RoleConfig, budget: RoleBudget, place: Slice, gpus_per_node: int, ports: NodePorts) -> RolePlan:
    """The role with all its models and replicas, starting at `place.offset`."""
    cursor = _Cursor(place.pool, place.offset, gpus_per_node, ports)
    managed = {model.name: _model_plan(budget.role, model, cursor) for model in budget.models}
    models = [
        managed[name] if name in managed else _external_model(budget.role, name, model)
        for name, model in config.models.items()
    ]
    return _role(budget.role, config, models, place)


def external_role_plan(role: Role, config: RoleConfig) -> RolePlan:
    """A role without a GPU: all its engines are somebody else's."""
    models = [_external_model(role, name, model) for name, model in config.models.items()]
    place = Slice(role, "", 0, 0, phase=0, deferred=False, offload=False)
    return _role(role, config, models, place)


def _role(role: Role, config: RoleConfig, models: list[ModelPlan], place: Slice) -> RolePlan:
    routing = config.routing
    return RolePlan(
        role=role,
        pool=place.pool,
        offset=place.offset,
        gpus=place.gpus,
        phase=place.phase,
        deferred=place.deferred,
        default_model=routing.default_model or models[0].name,
        route_key_map=dict(routing.route_key_map),
        aliases=dict(routing.aliases),
        policy=routing.policy,
        models=tuple(models),
        offload=place.offload,
    )


def _external_model(role: Role, name: str, config: ModelConfig) -> ModelPlan:
    return ModelPlan(
        role=role,
        name=name,
        model_path=config.model_path or "",
        served_model_name=config.served_model_name or name,
        route_mode=RouteMode.DIRECT,
        weight_source=_source(role, config),
        gpus_per_engine=0,
        engine_args={},
        replicas=(),
        external=tuple(
            ExternalPlan(f"{name}/external-{index}", entry.url, entry.api_key_env, entry.api_key_file)
            for index, entry in enumerate(config.external)
        ),
    )


def _source(role: Role, config: ModelConfig) -> WeightSource:
    return WeightSource(config.weight_source or ("ACTOR" if role is Role.ROLLOUT else "STATIC"))


FIRST_WEIGHT_VERSION = "0"
"""Version of the checkpoint that a rollout engine starts with."""


@dataclass(slots=True)
class _Cursor:
    """Where the next engine of a role goes."""

    pool: str
    offset: int
    gpus_per_node: int
    ports: NodePorts


def _model_plan(role: Role, model: ModelBudget, cursor: _Cursor) -> ModelPlan:
    replicas: list[ReplicaPlan] = []
    groups: list[GroupPlan] = []
    source = _source(role, model.config)
    # Engine and discovery must name the same version before the first update; a static model has none.
    version = {} if source is WeightSource.STATIC else {"weight_version": FIRST_WEIGHT_VERSION}
    for group in model.groups:
        _check_nodes(group, cursor.offset, cursor.gpus_per_node)
        first = len(replicas)
        for _ in range(group.engines):
            replicas.append(_replica(role, model.name, len(replicas), group, cursor))
        groups.append(
            GroupPlan(
                group.worker_type,
                group.gpus,
                group.gpus_per_engine,
                first,
                group.engines,
                {**version, **group.engine_args},
            )
        )
    default_mode = "SGLANG_ROUTER" if model.disaggregated else "DIRECT"
    return ModelPlan(
        role=role,
        name=model.name,
        model_path=model.config.model_path or "",
        served_model_name=model.config.served_model_name or model.name,
        route_mode=RouteMode(model.config.route_mode or default_mode),
        weight_source=source,
        gpus_per_engine=groups[0].gpus_per_engine,
        engine_args=groups[0].engine_args,
        replicas=tuple(replicas),
        groups=tuple(groups),
    )


def _check_nodes(group: GroupBudget, offset: int, gpus_per_node: int) -> None:
    """Only the first engines need a look: places repeat from node to node."""
    size = group.gpus_per_engine
    if size > gpus_per_node:
        if size % gpus_per_node:
            raise WholeNodes(
                f"{group.key}: gpus_per_engine is {size} and a node has {gpus_per_node} GPUs; "
                f"an engine larger than a node needs a multiple of {gpus_per_node}"
            )
        if offset % gpus_per_node:
            raise WholeNodes(
                f"{group.key}: engines of {size} GPUs start at bundle {offset}, in the middle of a node of "
                f"{gpus_per_node}; start at {-(-offset // gpus_per_node) * gpus_per_node}"
            )
        return
    for place in range(min(group.engines, gpus_per_node)):
        start = offset + place * size
        if start // gpus_per_node != (start + size - 1) // gpus_per_node:
            raise EngineStraddlesNodes(
                f"{group.key}: engine {place} of {size} GPUs would take bundles {start} to "
                f"{start + size - 1}, which lie "
                f"on nodes {start // gpus_per_node} and {(start + size - 1) // gpus_per_node} of "
                f"{gpus_per_node} GPUs "
                "each; use a size that divides a node and an offset that is a multiple of it"
            )


def _replica(role: Role, model: str, index: int, group: GroupBudget, cursor: _Cursor) -> ReplicaPlan:
    replica_id = f"{model}/replica-{index}"
    begin, end = cursor.offset, cursor.offset + group.gpus_per_engine
    cursor.offset = end
    workers: list[WorkerPlan] = []
    if group.worker_type is not WorkerType.PLACEHOLDER:
        per_node = cursor.gpus_per_node
        for rank, node in enumerate(range(begin // per_node, (end - 1) // per_node + 1)):
            slots = range(max(begin - node * per_node, 0), min(end - node * per_node, per_node))
            ports = cursor.ports.take(cursor.pool, node, group.dp_size, replica_id)
            workers.append(WorkerPlan(cursor.pool, node, rank, tuple(slots), ports))
    return ReplicaPlan(replica_id, role, model, index, group.worker_type, tuple(range(begin, end)), tuple(workers))
