"""What may be done to an engine, decided by its role and by where its weights come from.

A judge or a teacher is loaded once and never changes: every path that could change its weights is closed
here, in one table, so that no caller has to remember it. The sidecar checks the same table before it talks to
the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from relax_slurm.core.plan import Role, WeightSource
from relax_slurm.errors import PlanRefused, RelaxError


class OperationRefused(RelaxError):
    """The engine must not be asked to do this, now or ever; nothing was sent to it."""

    http_status, code = 409, "operation_refused"


class Operation(StrEnum):
    """Something that can be asked of an engine."""

    GENERATE = "generate"
    """SGLang's own generation route, scoring included."""
    CHAT = "chat"
    """The OpenAI-shaped generation routes."""
    OFFLOAD = "offload"
    """Give GPU memory back."""
    ONLOAD = "onload"
    """Take GPU memory again."""
    UPDATE_WEIGHTS_DISK = "update_weights_disk"
    """Load other weights from a path."""
    UPDATE_WEIGHTS_TENSOR = "update_weights_tensor"
    """Take weights out of a request body or an IPC handle."""
    UPDATE_WEIGHTS_DISTRIBUTED = "update_weights_distributed"
    """Take weights out of a collective."""
    DCS = "dcs"
    """Take weights out of a distributed checkpoint service."""
    LORA = "lora"
    """Load or unload an adapter."""
    SEED_SYNC = "seed_sync"
    """Give a new replica the weights its siblings have."""


SERVING = frozenset({Operation.GENERATE, Operation.CHAT, Operation.OFFLOAD, Operation.ONLOAD})
"""Allowed for every engine."""

WEIGHT_CHANGES = frozenset(Operation) - SERVING
"""Everything that can leave an engine with other weights than it was started with."""

_ALLOWED: Mapping[WeightSource, frozenset[Operation]] = MappingProxyType(
    {
        WeightSource.STATIC: SERVING,
        WeightSource.ACTOR: SERVING | (WEIGHT_CHANGES - {Operation.DCS}),
        WeightSource.DCS: SERVING | {Operation.DCS, Operation.UPDATE_WEIGHTS_DISK, Operation.LORA, Operation.SEED_SYNC},
    }
)

_SOURCES: Mapping[Role, frozenset[WeightSource]] = MappingProxyType(
    {
        Role.ROLLOUT: frozenset(WeightSource),
        Role.GENRM: frozenset({WeightSource.STATIC}),
        Role.TEACHER: frozenset({WeightSource.STATIC}),
    }
)


@dataclass(frozen=True, slots=True)
class InferenceEngineSpec:
    """The rules of one engine."""

    role: Role
    weight_source: WeightSource
    operations: frozenset[Operation]
    strict_drain: bool
    """A static engine leaves READY only when its drain is confirmed: a half-scored batch cannot be
    repaired.
    """
    overrides: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Engine arguments that this kind of engine needs unless the run file names them."""

    def allows(self, operation: Operation) -> bool:
        """Whether `operation` is in the table for this engine."""
        return operation in self.operations

    def check(self, operation: Operation) -> None:
        """Raise `OperationRefused` unless the engine may do `operation`."""
        if self.allows(operation):
            return
        allowed = ", ".join(sorted(self.operations))
        why = f"the weight source is {self.weight_source}"
        if self.weight_source is WeightSource.STATIC:
            why += ", and static weights never change (row E9)"
        raise OperationRefused(
            f"{self.role}: operation {operation} is refused, {why}; "
            f"allowed are {allowed}; send it to a model whose weights may change"
        )


def spec_for(role: Role, weight_source: WeightSource) -> InferenceEngineSpec:
    """The rules for an engine of `role` whose weights come from `weight_source`.

    Raises `PlanRefused` for a judge or a teacher with weights that could change.
    """
    if weight_source not in _SOURCES[role]:
        raise PlanRefused(
            f"{role}: weight source is {weight_source}, but {role} models are always {WeightSource.STATIC}; "
            f"set weight_source to {WeightSource.STATIC}"
        )
    static = weight_source is WeightSource.STATIC
    overrides: dict[str, Any] = {"enable_weights_cpu_backup": True} if static else {}
    return InferenceEngineSpec(
        role=role,
        weight_source=weight_source,
        operations=_ALLOWED[weight_source],
        strict_drain=static,
        overrides=MappingProxyType(overrides),
    )
