"""Budgets: how many GPUs each role, model, group and engine gets, and with which parallelism. No positions
yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from relax_slurm.config.models import GroupConfig, ModelConfig, RoleConfig
from relax_slurm.core.placement_errors import (
    BudgetDivision,
    BudgetMissing,
    BudgetSum,
    DataParallelDivision,
    DataParallelWithoutAttention,
    DisaggregationRoute,
    GroupSum,
    MixedWorkerTypes,
    NothingServes,
    ParallelismMismatch,
    PrefillDecodePair,
    TeacherBudget,
)
from relax_slurm.core.plan import Role, WorkerType

DISAGGREGATED = frozenset({WorkerType.PREFILL, WorkerType.DECODE})


@dataclass(frozen=True, slots=True)
class GroupBudget:
    """One group, sized. `key` is its place in the run file."""

    key: str
    worker_type: WorkerType
    gpus: int
    gpus_per_engine: int
    engine_args: dict[str, Any]
    dp_size: int

    @property
    def engines(self) -> int:
        """Number of replicas."""
        return self.gpus // self.gpus_per_engine


@dataclass(frozen=True, slots=True)
class ModelBudget:
    """One model, sized."""

    name: str
    gpus: int
    groups: tuple[GroupBudget, ...]
    config: ModelConfig

    @property
    def disaggregated(self) -> bool:
        """Whether it has prefill and decode groups."""
        return any(group.worker_type in DISAGGREGATED for group in self.groups)


@dataclass(frozen=True, slots=True)
class RoleBudget:
    """One role, sized."""

    role: Role
    gpus: int
    models: tuple[ModelBudget, ...]
    config: RoleConfig


def role_budget(role: Role, config: RoleConfig) -> RoleBudget:
    """Sizes of one role's managed models; raises the refusal of the first rule that does not hold."""
    config = config.model_copy(update={"models": config.managed})
    gpus = _model_gpus(role, config)
    models = tuple(_model(role, name, model, gpus[name]) for name, model in config.models.items())
    return RoleBudget(role, sum(gpus.values()), models, config)


def _model_gpus(role: Role, config: RoleConfig) -> dict[str, int]:
    named = {name: model.gpus for name, model in config.models.items() if model.gpus is not None}
    count = len(config.models)
    if len(named) == count:
        total = sum(named.values())
        if config.gpus is not None and config.gpus != total:
            raise BudgetSum(
                f"roles.{role}.gpus is {config.gpus}, but its models' budgets add up to {total} "
                f"({_listing(named)}); make them equal or leave roles.{role}.gpus out"
            )
        return named
    missing = [name for name in config.models if name not in named]
    if named and role is Role.TEACHER:
        raise TeacherBudget(
            f"roles.teacher.models: {_listing(named)} name a budget and {', '.join(missing)} none; "
            "give every model one, or none and share the role's evenly"
        )
    if config.gpus is None or (count > 1 and role is not Role.TEACHER):
        raise BudgetMissing(
            f"roles.{role}.models.{missing[0]}.gpus is missing and cannot be worked out from "
            f"roles.{role}.gpus ({_or_null(config.gpus)}) and {count} model{'s' if count > 1 else ''}; "
            "name it"
        )
    if config.gpus % count:
        raise TeacherBudget(
            f"roles.{role}.gpus is {config.gpus}, which {count} models cannot share evenly; "
            f"use a multiple of {count} or give each model its own gpus"
        )
    return dict.fromkeys(config.models, config.gpus // count)


def _model(role: Role, name: str, config: ModelConfig, gpus: int) -> ModelBudget:
    key = f"roles.{role}.models.{name}"
    if not config.groups:
        plain = GroupConfig(gpus=gpus)
        return ModelBudget(name, gpus, (_group(key, config, plain),), config)
    groups = tuple(_group(f"{key}.groups[{place}]", config, group) for place, group in enumerate(config.groups))
    total = sum(group.gpus for group in groups)
    if total != gpus:
        raise GroupSum(
            f"{key}: its groups' budgets add up to {total} and the model's budget is {gpus}; make them equal"
        )
    _check_types(key, config, [group.worker_type for group in groups])
    return ModelBudget(name, gpus, groups, config)


def _check_types(key: str, config: ModelConfig, types: list[WorkerType]) -> None:
    present = set(types)
    if present == {WorkerType.PLACEHOLDER}:
        raise NothingServes(f"{key}.groups: all {len(types)} groups are placeholders; add one that serves")
    if WorkerType.REGULAR in present and present & DISAGGREGATED:
        raise MixedWorkerTypes(
            f"{key}.groups: worker types {', '.join(sorted(present))} stand together; "
            "use either regular, or prefill and decode"
        )
    if len(present & DISAGGREGATED) == 1:
        there = next(iter(present & DISAGGREGATED))
        other = next(iter(DISAGGREGATED - present))
        raise PrefillDecodePair(
            f"{key}.groups: {types.count(there)} {there} group(s) and no {other} group; add a {other} group"
        )
    if present & DISAGGREGATED and config.route_mode == "DIRECT":
        raise DisaggregationRoute(
            f"{key}.route_mode is DIRECT, but prefill and decode workers are never published; "
            "use SGLANG_ROUTER or leave it out"
        )


def _group(key: str, model: ModelConfig, group: GroupConfig) -> GroupBudget:
    args: dict[str, Any] = {**model.engine_args, **group.engine_args}
    size = group.gpus_per_engine or model.gpus_per_engine
    tp_size, pp_size, dp_size = args.get("tp_size"), args.get("pp_size", 1), args.get("dp_size", 1)
    if size is None:
        size = (tp_size or 1) * pp_size
    if tp_size is None:
        tp_size = max(1, size // pp_size)
    if tp_size * pp_size != size:
        raise ParallelismMismatch(
            f"{key}: tp_size {tp_size} x pp_size {pp_size} = {tp_size * pp_size} GPUs, "
            f"but gpus_per_engine is {size}; make them equal"
        )
    if dp_size > 1 and args.get("enable_dp_attention") is not True:
        raise DataParallelWithoutAttention(
            f"{key}: dp_size is {dp_size} without enable_dp_attention, so one engine would take "
            f"{size} x {dp_size} = {size * dp_size} GPUs instead of {size}; use more replicas, or enable it"
        )
    if tp_size % dp_size:
        raise DataParallelDivision(
            f"{key}: tp_size {tp_size} is not divisible by dp_size {dp_size}; choose a divisor of {tp_size}"
        )
    if group.gpus % size:
        below, above = group.gpus // size * size, -(-group.gpus // size) * size
        choice = f"{below} or {above}" if below else f"{above}"
        raise BudgetDivision(
            f"{key}: budget of {group.gpus} GPUs is not divisible by gpus_per_engine {size}; use {choice}"
        )
    args["tp_size"] = tp_size
    return GroupBudget(key, WorkerType(group.worker_type), group.gpus, size, args, dp_size)


def _listing(budgets: dict[str, int]) -> str:
    shown = [f"{name} {gpus}" for name, gpus in list(budgets.items())[:8]]
    return ", ".join(shown) + (", …" if len(budgets) > 8 else "")


def _or_null(value: int | None) -> str:
    return "null" if value is None else str(value)
