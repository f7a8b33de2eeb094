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
from relax_slurm.core.placement_replicas import external_role_plan, role_plan
from relax_slurm.core.plan import PLAN_VERSION, InferencePlacementPlan, Mode, Role
from relax_slurm.core.ports import NodePorts, window


def plan(config: RunConfig, *, ephemeral: tuple[int, int] | None = None) -> InferencePlacementPlan:
    """Plans the whole run.

    `ephemeral` is the kernel's ephemeral port range (first, last), None when unknown. Raises a subclass of
    `placement_errors.Refusal`.
    """
    _check_external(config)
    check_pools(config)
    training = training_plan(config)
    present = {Role(name): config.roles[name] for name in ROLE_ORDER if name in config.roles}
    budgets = [role_budget(role, entry) for role, entry in present.items() if entry.managed]
    slices = layout(config, budgets)
    shape = job_shape(config)
    parts, pools, head = components(config, shape)
    ports = NodePorts()
    managed = {
        budget.role: role_plan(present[budget.role], budget, place, config.pools[place.pool].gpus_per_node, ports)
        for budget, place in zip(budgets, slices, strict=True)
    }
    roles = tuple(managed.get(role) or external_role_plan(role, entry) for role, entry in present.items())
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
    """Rollout outside the job stands alone: its owner, not this run, decides when it changes."""
    rollout = config.roles.get("rollout")
    external = [] if rollout is None else [name for name, model in rollout.models.items() if model.external]
    if not external:
        return
    key = f"roles.rollout.models.{external[0]}.external"
    if config.placement != "decoupled":
        raise ExternalShared(
            f"{key} names engines outside the job and placement is {config.placement}; use placement: decoupled"
        )
    managed = [name for name, entry in config.roles.items() if name != "rollout" and entry.managed]
    if managed:
        raise ExternalBesideManaged(
            f"{key} makes rollout external while roles.{managed[0]} is managed here; make both external or both managed"
        )
