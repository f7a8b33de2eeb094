"""The planner: a validated run file to an `InferencePlacementPlan`, or a refusal that names the rule and
the numbers.

Pure: the same config and the same ephemeral range give the same plan. The rules live next door: budgets in
`placement_budget`, modes in `placement_layout`, nodes in `placement_replicas`, job shape in
`placement_job`, ports in `ports`; every refusal is a class in `placement_errors`.
"""

from __future__ import annotations

from relax_slurm.config.models import ROLE_ORDER, RunConfig
from relax_slurm.core.placement_budget import role_budget
from relax_slurm.core.placement_errors import ExternalBesideManaged, ExternalShared
from relax_slurm.core.placement_job import components, job_shape
from relax_slurm.core.placement_layout import check_pools, layout, training_plan
from relax_slurm.core.placement_replicas import role_plan
from relax_slurm.core.plan import PLAN_VERSION, InferencePlacementPlan, Mode, Role
from relax_slurm.core.ports import NodePorts, window
from relax_slurm.errors import NotBuilt


def plan(config: RunConfig, *, ephemeral: tuple[int, int] | None = None) -> InferencePlacementPlan:
    """Plans the whole run.

    `ephemeral` is the kernel's ephemeral port range (first, last), None when unknown. Raises a subclass of
    `placement_errors.Refusal`, or `NotBuilt` for a row that this version does not have.
    """
    _check_external(config)
    check_pools(config)
    training = training_plan(config)
    budgets = [role_budget(Role(name), config.roles[name]) for name in ROLE_ORDER if name in config.roles]
    slices = layout(config, budgets)
    shape = job_shape(config)
    parts, pools, head = components(config, shape)
    ports = NodePorts()
    roles = tuple(
        role_plan(budget, place, config.pools[place.pool].gpus_per_node, ports)
        for budget, place in zip(budgets, slices, strict=True)
    )
    return InferencePlacementPlan(
        version=PLAN_VERSION,
        run=config.name,
        mode=Mode(config.placement),
        job_shape=shape,
        head_component=head,
        components=parts,
        pools=pools,
        roles=roles,
        training=training,
        ports=window(ports, config.ports.first, config.ports.last, ephemeral),
        engine=config.engine.program,
    )


def _check_external(config: RunConfig) -> None:
    external = [
        (name, model) for name, role in config.roles.items() for model, entry in role.models.items() if entry.external
    ]
    if not external:
        return
    role, model = external[0]
    key = f"roles.{role}.models.{model}.external"
    if role == "rollout" and config.placement != "decoupled":
        raise ExternalShared(
            f"{key} names engines outside the job and placement is {config.placement}; use placement: decoupled"
        )
    managed = [
        name
        for name, entry in config.roles.items()
        if name != "rollout" and any(not one.external for one in entry.models.values())
    ]
    if role == "rollout" and managed:
        raise ExternalBesideManaged(
            f"{key} makes rollout external while roles.{managed[0]} is managed here; make both external or both managed"
        )
    raise NotBuilt(f"{key}: external engines (row E8) are not built in this version; leave the key out")
