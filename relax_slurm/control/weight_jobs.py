"""What is asked of a model's weights, checked before any replica is closed for it (docs/weights.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.config.models import ControlConfig
from relax_slurm.control.manager import InferenceManager
from relax_slurm.control.managers import Managers
from relax_slurm.control.refusals import NotUpdatable, UnknownModel, WeightsBusy
from relax_slurm.core.engine_spec import Operation, spec_for
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import State
from relax_slurm.core.weights import (
    OPERATIONS,
    GroupAction,
    Transport,
    Weights,
    check_group,
    check_update,
    group_of,
)
from relax_slurm.errors import ProtocolError
from relax_slurm.wire.weight_messages import UpdateWeights, WeightsGroup

UP = (State.STARTING, State.READY, State.ONLOADING)
"""States in which a replica that has all its memory can take weights."""
_CLOSED = (State.DRAINING, State.SLEEPING)


@dataclass(slots=True)
class Parts:
    """An update that comes in parts."""

    weights: Weights
    transport: Transport
    members: dict[str, Replica]
    """The replicas that have taken all parts so far."""
    until: float
    """When the next part must have begun."""


@dataclass(frozen=True, slots=True)
class Job:
    """What an operation does, with every default filled in. Times in seconds."""

    message: UpdateWeights | WeightsGroup
    manager: InferenceManager
    document: dict[str, Any]
    members: dict[str, Replica]
    timeout_seconds: float
    weights: Weights | None
    """What an update brings; None for a group."""
    extra: dict[str, Any] = field(default_factory=dict)

    def args(self, replica_id: str) -> dict[str, Any]:
        """The command's arguments for one replica."""
        payload = self.message.payload | self.message.per_replica.get(replica_id, {})
        return {"payload": payload, "deadline_seconds": self.timeout_seconds, **self.extra}


def update_job(
    message: UpdateWeights, managers: Managers, under_way: Mapping[InferenceManager, Parts], control: ControlConfig
) -> Job:
    """The job of an update. Raises what the client is to be told; nothing has happened then."""
    transport = Transport(message.source)
    manager = _manager(message, managers, OPERATIONS[transport])
    where = f"update_weights {message.role}/{message.model}"
    if transport is Transport.DISK and (not message.final or message.per_replica):
        raise ProtocolError(f"{where}: a checkpoint is loaded whole and by all; leave final and per_replica out")
    for payload in _payloads(message, manager):
        check_update(transport, payload, where)
    wanted = Weights(message.weight_version, message.payload["model_path"] if transport is Transport.DISK else None)
    members = {} if _all_asleep(manager) else _up(manager, where)
    parts = under_way.get(manager)
    if parts is not None and (parts.weights, parts.transport) == (wanted, transport):
        # A later part is for those that took the earlier ones.
        members = {name: entry for name, entry in members.items() if parts.members.get(name) is entry}
        if not members:
            raise NotUpdatable(f"{where}: no replica is left that took the parts before; begin the update again")
    if transport is Transport.DISTRIBUTED:
        _check_joined(manager, members, group_of(message.payload), where)
    seconds = message.limit_seconds or control.operation_seconds
    drain = control.drain_seconds if message.drain_seconds is None else message.drain_seconds
    document = _document(
        message,
        source=message.source,
        final=message.final,
        weight_version=wanted.version,
        published_version=manager.weights.version,
    )
    extra = {
        "source": message.source,
        "weight_version": wanted.version,
        "final": message.final,
        "drain_seconds": min(drain, seconds / 2),
    }
    return Job(message, manager, document, members, seconds, wanted, extra)


def group_job(message: WeightsGroup, managers: Managers, control: ControlConfig) -> Job:
    """The job of a group. Raises what the client is to be told; nothing has happened then."""
    manager = _manager(message, managers, Operation.UPDATE_WEIGHTS_DISTRIBUTED)
    where = f"weights_group {message.role}/{message.model}"
    for payload in _payloads(message, manager):
        check_group(GroupAction(message.action), payload, where)
    document = _document(message, action=message.action, group=group_of(message.payload))
    seconds = message.limit_seconds or control.operation_seconds
    return Job(message, manager, document, _up(manager, where), seconds, None, {"action": message.action})


def _manager(message: UpdateWeights | WeightsGroup, managers: Managers, operation: Operation) -> InferenceManager:
    named = {(str(role), name): manager for (role, name), manager in managers.items()}
    manager = named.get((message.role, message.model))
    if manager is None:
        here = ", ".join("/".join(name) for name in named) or "none"
        raise UnknownModel(f"{message.kind}: no model {message.role}/{message.model} is managed here; managed: {here}")
    spec_for(manager.model.role, manager.model.weight_source).check(operation)
    unknown = sorted(message.per_replica.keys() - {replica.engine_id for replica in manager.replicas})
    if unknown:
        raise ProtocolError(
            f"{message.kind}: per_replica names {unknown[0]!r}, which is no replica of {message.model}; "
            f"discovery has their ids"
        )
    if manager.updating:
        raise WeightsBusy(f"{message.kind}: another operation on the weights of {message.model} is under way")
    if not manager.serving:
        raise NotUpdatable(f"{message.kind}: the run is not serving yet, or no more; wait until it is READY")
    asleep = [replica.engine_id for replica in manager.replicas if replica.state in _CLOSED]
    noted = operation is Operation.UPDATE_WEIGHTS_DISK and _all_asleep(manager)
    if asleep and not noted:
        raise NotUpdatable(f"{message.kind}: {asleep[0]} has given its memory back; onload {message.model} first")
    return manager


def _all_asleep(manager: InferenceManager) -> bool:
    """Whether no engine of the model is up or on its way: a checkpoint is then what they wake up with."""
    return all(replica.state in (State.SLEEPING, State.GONE) for replica in manager.replicas)


def _up(manager: InferenceManager, where: str) -> dict[str, Replica]:
    up = {entry.engine_id: entry for entry in manager.replicas if entry.resident and entry.state in UP}
    if not up:
        raise NotUpdatable(f"{where}: no replica is up; `status` says why")
    return up


def _check_joined(manager: InferenceManager, members: Mapping[str, Replica], group: str, where: str) -> None:
    # A collective in which somebody is missing hangs all others until their time is up.
    missing = [name for name in members if group not in manager.slot(name).groups]
    if missing:
        raise NotUpdatable(
            f"{where}: {missing[0]} has not joined the group {group!r} (a replica built again is in none); "
            f"destroy the group and make it again with weights_group"
        )


def _document(message: UpdateWeights | WeightsGroup, **fields: Any) -> dict[str, Any]:
    head = {"operation": message.id, "kind": message.kind, "role": message.role, "model": message.model}
    return {**head, "state": "RUNNING", **fields, "reason": "", "replicas": {}}


def _payloads(message: UpdateWeights | WeightsGroup, manager: InferenceManager) -> list[dict[str, Any]]:
    """Every payload that an engine will see."""
    own = [message.payload | changes for changes in message.per_replica.values()]
    return own if len(own) == len(manager.replicas) else [message.payload, *own]
