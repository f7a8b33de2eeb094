"""Modes: which pool a role lies in, at which bundle it starts and in which phase it may be resident."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from relax_slurm.config.models import RunConfig
from relax_slurm.core.placement_budget import RoleBudget
from relax_slurm.core.placement_errors import (
    ActorPoolMissing,
    CoResident,
    DeferManyGroups,
    DeferOffset,
    DeferredOutsideDefer,
    DeferredRole,
    MixedDeferral,
    OffloadNeeded,
    OutsideActorPool,
    PoolUnused,
    SliceOutOfPool,
    SliceOverlap,
    TrainingBudget,
    UnknownPool,
)
from relax_slurm.core.plan import Mode, Role, TrainingPlan


@dataclass(frozen=True, slots=True)
class Slice:
    """Where one role lies."""

    role: Role
    pool: str
    offset: int
    gpus: int
    phase: int
    deferred: bool
    offload: bool

    @property
    def end(self) -> int:
        """First bundle after the slice."""
        return self.offset + self.gpus


def pool_sizes(config: RunConfig) -> dict[str, int]:
    """Bundles per pool."""
    return {name: pool.nodes * pool.gpus_per_node for name, pool in config.pools.items()}


def check_pools(config: RunConfig) -> None:
    """Every pool named exists and every pool that exists is named."""
    known = ", ".join(config.pools)
    users = {f"roles.{name}.pool": role.pool or "" for name, role in config.roles.items() if role.managed}
    if config.training:
        users["training.pool"] = config.training.pool
    for key, pool in users.items():
        if pool not in config.pools:
            raise UnknownPool(f"{key} is '{pool}', which is not one of the pools ({known}); correct it")
    for name, pool_config in config.pools.items():
        if name not in users.values():
            raise PoolUnused(
                f"pools.{name}: {pool_config.nodes} nodes with {pool_config.gpus_per_node} GPUs each "
                "would be "
                "allocated and used by no role; use the pool or remove it"
            )


def training_plan(config: RunConfig) -> TrainingPlan | None:
    """Training's share, checked against its pool."""
    training = config.training
    if training is None:
        return None
    size = pool_sizes(config)[training.pool]
    if training.gpus > size:
        raise TrainingBudget(
            f"training.gpus is {training.gpus} and pool '{training.pool}' has {size}; use {size} or fewer"
        )
    components = dict(training.components) or {"actor": training.gpus}
    total = sum(components.values())
    if total != training.gpus:
        raise TrainingBudget(
            f"training.components add up to {total} and training.gpus is {training.gpus}; make them equal"
        )
    return TrainingPlan(training.pool, training.gpus, {str(name): gpus for name, gpus in components.items()})


def layout(config: RunConfig, budgets: list[RoleBudget]) -> list[Slice]:
    """The slices of all managed roles, in cursor order; raises the refusal of the first rule that does not
    hold."""
    mode = Mode(config.placement)
    for budget in budgets:
        _check_deferred(mode, budget)
    if mode is not Mode.DECOUPLED:
        _check_shared(mode, config, budgets)
    if mode is Mode.DECOUPLED:
        slices = _decoupled(config, budgets)
    elif mode is Mode.SPLIT:
        slices = _split(budgets)
    else:
        slices = _defer(budgets)
    sizes = pool_sizes(config)
    for entry in slices:
        if entry.end > sizes[entry.pool]:
            raise SliceOutOfPool(
                f"roles.{entry.role} needs bundles {entry.offset} to {entry.end - 1} of pool "
                f"'{entry.pool}', which has "
                f"{sizes[entry.pool]} (0 to {sizes[entry.pool] - 1}){_sum_of(mode, slices)}; "
                "make the pool larger or the budgets smaller"
            )
    _check_overlap(slices)
    return slices


def _check_deferred(mode: Mode, budget: RoleBudget) -> None:
    role, config = budget.role, budget.config
    if config.deferred and role is Role.ROLLOUT:
        raise DeferredRole("roles.rollout.deferred is true, but generation comes first; only genrm and teacher wait")
    if config.deferred and mode is not Mode.DEFER:
        raise DeferredOutsideDefer(
            f"roles.{role}.deferred is true and placement is {mode}; set placement: defer or remove deferred"
        )
    if mode is Mode.DEFER and config.deferred is False and role is not Role.ROLLOUT:
        raise MixedDeferral(
            f"roles.{role}.deferred is false under placement: defer, so it would hold GPUs that other "
            "phases need; "
            "remove deferred, or use placement: split"
        )


def _check_shared(mode: Mode, config: RunConfig, budgets: list[RoleBudget]) -> None:
    training = config.training
    if training is None:
        raise ActorPoolMissing(f"placement is {mode} and there is no training section; add training.pool and .gpus")
    if not training.offload:
        raise OffloadNeeded(
            f"training.offload is false and placement is {mode}, so training would never make room; set it to true"
        )
    for budget in budgets:
        pool = _pool(budget)
        if pool != training.pool:
            raise OutsideActorPool(
                f"roles.{budget.role}.pool is '{pool}' and the actor pool is '{training.pool}'; under "
                "placement "
                f"{mode} all roles lie in the actor pool: use it, or placement: decoupled"
            )
        if budget.config.offload is False:
            raise OffloadNeeded(
                f"roles.{budget.role}.offload is false and placement is {mode}, so training would find "
                "its GPUs "
                "taken; remove it"
            )
    if mode is Mode.DEFER:
        for budget in budgets:
            _check_defer_groups(budget)


def _check_defer_groups(budget: RoleBudget) -> None:
    groups = [group for model in budget.models for group in model.groups]
    models = len(budget.models)
    if budget.role is Role.GENRM and models > 1:
        raise DeferManyGroups(f"roles.genrm has {models} models under placement: defer; keep one")
    if budget.role is Role.ROLLOUT and (len(groups) > 1 or budget.models[0].disaggregated):
        raise DeferManyGroups(
            f"roles.rollout has {models} model(s) with {len(groups)} groups under placement: defer; "
            "keep one model with one regular group"
        )
    if budget.config.offset:
        raise DeferOffset(
            f"roles.{budget.role}.offset is {budget.config.offset} under placement: defer; remove it, "
            "every phase starts at bundle 0"
        )


def _pool(budget: RoleBudget) -> str:
    """The config of a role with managed models always names one."""
    return budget.config.pool or ""


def _slice(budget: RoleBudget, offset: int, phase: int, *, shared: bool, deferred: bool = False) -> Slice:
    offload = shared if budget.config.offload is None else budget.config.offload
    return Slice(budget.role, _pool(budget), offset, budget.gpus, phase, deferred, offload)


def _decoupled(config: RunConfig, budgets: list[RoleBudget]) -> list[Slice]:
    users: dict[str, str] = {config.training.pool: "training"} if config.training else {}
    for budget in budgets:
        other = users.setdefault(_pool(budget), f"roles.{budget.role}")
        if other != f"roles.{budget.role}":
            raise CoResident(
                f"roles.{budget.role} and {other} both use pool '{_pool(budget)}' under "
                "placement: decoupled; "
                "give each a pool, or use split (slices) or defer (phases)"
            )
    return [_slice(budget, budget.config.offset or 0, 0, shared=False) for budget in budgets]


def _split(budgets: list[RoleBudget]) -> list[Slice]:
    slices: list[Slice] = []
    cursor = 0
    for budget in budgets:
        named = budget.config.offset
        slices.append(_slice(budget, cursor if named is None else named, 0, shared=True))
        cursor = max(cursor, slices[-1].end)
    return slices


def _defer(budgets: list[RoleBudget]) -> list[Slice]:
    return [
        _slice(budget, 0, phase, shared=True, deferred=budget.role is not Role.ROLLOUT)
        for phase, budget in enumerate(budgets)
    ]


def _sum_of(mode: Mode, slices: list[Slice]) -> str:
    if mode is not Mode.SPLIT:
        return ""
    parts = " + ".join(f"{entry.role} {entry.gpus}" for entry in slices)
    return f": {parts} = {sum(entry.gpus for entry in slices)}"


def _check_overlap(slices: list[Slice]) -> None:
    ordered = sorted(slices, key=lambda entry: (entry.pool, entry.phase, entry.offset))
    for left, right in pairwise(ordered):
        if (left.pool, left.phase) == (right.pool, right.phase) and right.offset < left.end:
            raise SliceOverlap(
                f"roles.{left.role} has bundles {left.offset} to {left.end - 1} of pool '{left.pool}' and "
                f"roles.{right.role} starts at {right.offset}; move one offset or leave both out"
            )
