"""Requests about the weights of a model (docs/protocol.md, Weights)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from relax_slurm.wire.message_base import Message, Name, OpId

WaitSeconds = Annotated[float, Field(gt=0, le=3600)]


class UpdateWeights(Message):
    """Other weights for every replica of a model; answered with the operation, which goes on by itself."""

    kind: Literal["update_weights"]
    id: OpId
    role: Name = "rollout"
    model: Name
    source: Literal["disk", "tensor", "distributed"]
    weight_version: Name
    payload: dict[str, Any]
    """Body of SGLang's update call, passed on as it is."""
    per_replica: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Fields laid over the payload for single replicas, by replica id."""
    final: bool = True
    """False: a part; the replicas stay closed for the next one."""
    limit_seconds: WaitSeconds | None = None
    """Time limit of each replica's part; null is `control.operation_seconds`."""
    drain_seconds: Annotated[float, Field(ge=0, le=3600)] | None = None


class WeightsGroup(Message):
    """Make or end a group for distributed updates at every replica of a model."""

    kind: Literal["weights_group"]
    id: OpId
    role: Name = "rollout"
    model: Name
    action: Literal["init", "destroy"]
    payload: dict[str, Any] = Field(default_factory=dict)
    per_replica: dict[str, dict[str, Any]] = Field(default_factory=dict)
    limit_seconds: WaitSeconds | None = None
    """Time limit of each replica's part; null is `control.operation_seconds`."""


class GetWeights(Message):
    """How an operation of the two kinds above stands."""

    kind: Literal["get_weights"]
    id: OpId
    operation: OpId
