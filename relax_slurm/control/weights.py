"""Updates of a model's weights, one operation at a time per model (docs/weights.md, row E10).

An operation closes the model for requests, sends every replica the command, decides with `core.weights` what follows
and publishes. It goes on when the client that asked for it leaves; whoever knows its id may ask how it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.links import CommandFailed, NodeGone
from relax_slurm.control.manager import Hooks, InferenceManager, WeightsBusy
from relax_slurm.control.managers import Managers
from relax_slurm.control.routers import Routers
from relax_slurm.core.engine_spec import Operation, spec_for
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Event, EventKind, State
from relax_slurm.core.snapshot import ReplicaState
from relax_slurm.core.weights import (
    OPERATIONS,
    GroupAction,
    Outcome,
    Report,
    Transport,
    Verdict,
    Weights,
    check_group,
    check_update,
    decide,
    group_of,
)
from relax_slurm.errors import ProtocolError, RecoveryRequired, StartupFailed
from relax_slurm.wire.codec import pack
from relax_slurm.wire.messages import GetWeights, IdReused, Method, UpdateWeights, WeightsGroup

KEPT_OPERATIONS = 256
MARGIN_SECONDS = 30.0
"""More than the sidecar's own deadline, so that its reason arrives first: it still asks for a version after it."""
_CLOSED = (State.DRAINING, State.SLEEPING)
_UP = (State.STARTING, State.READY, State.ONLOADING)


class UnknownModel(ProtocolError):
    """A role or model that this run does not manage."""

    code = "unknown_model"


class UnknownOperation(ProtocolError):
    """No operation of that id is remembered."""

    code = "unknown_operation"


class NotUpdatable(ProtocolError):
    """The model's replicas are in no state to take weights now."""

    http_status, code = 409, "not_updatable"


@dataclass(slots=True)
class Running:
    """One operation and how it stands."""

    fingerprint: bytes
    document: dict[str, Any]
    began: float
    done: bool = False


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

    manager: InferenceManager
    document: dict[str, Any]
    members: dict[str, Replica]
    payload: dict[str, Any]
    per_replica: dict[str, dict[str, Any]]
    timeout_seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    def args(self, replica_id: str) -> dict[str, Any]:
        """The command's arguments for one replica."""
        payload = {**self.payload, **self.per_replica.get(replica_id, {})}
        return {"payload": payload, "deadline_seconds": self.timeout_seconds, **self.extra}


class WeightOperations:
    """All updates of a run. Belongs to the coordinator's loop."""

    def __init__(
        self,
        managers: Managers,
        routers: Routers,
        hooks: Hooks,
        config: RunConfig,
        *,
        publish: Callable[[], None],
    ) -> None:
        self.moved = asyncio.Event()
        """To be set whenever a replica or a router may be shown in another way."""
        self._managers, self._routers, self._hooks, self._config = managers, routers, hooks, config
        self._publish = publish
        self._known: OrderedDict[str, Running] = OrderedDict()
        self._parts: dict[InferenceManager, Parts] = {}

    # --- questions ------------------------------------------------------------------------------------------

    def answer(self, message: UpdateWeights | WeightsGroup | GetWeights) -> dict[str, Any]:
        """The document of the operation, begun unless its id is known. Raises what the client is to be told."""
        if isinstance(message, GetWeights):
            known = self._known.get(message.operation)
            if known is None:
                raise UnknownOperation(
                    f"operation {message.operation} is not known (the last {KEPT_OPERATIONS} are); a new coordinator "
                    f"knows none of the one before"
                )
            return known.document
        fingerprint = sha256(pack(message.model_dump())).digest()
        known = self._known.get(message.id)
        if known is not None:
            if known.fingerprint != fingerprint:
                raise IdReused(f"id {message.id} was another operation on weights, now it has other arguments")
            return known.document
        job, work = self._update_job(message) if isinstance(message, UpdateWeights) else self._group_job(message)
        running = Running(fingerprint, job.document, self._hooks.clock())
        self._known[message.id] = running
        if len(self._known) > KEPT_OPERATIONS:
            for key in [key for key, entry in self._known.items() if entry.done][:1]:
                del self._known[key]
        job.manager.updating = True
        self._hooks.spawn(self._carry_out(running, job, work))
        return job.document

    def tick(self) -> None:
        """Call about once a second: an update whose next part does not come is given up."""
        now = self._hooks.clock()
        for manager, parts in list(self._parts.items()):
            if now > parts.until and not manager.updating:
                del self._parts[manager]
                reason = f"the update to version {parts.weights.version!r} was not finished in time"
                for replica_id, replica in parts.members.items():
                    if manager.slot(replica_id).replica is replica and replica.weights_awaited:
                        manager.retire(replica_id, reason)

    # --- checks before anything is closed -------------------------------------------------------------------

    def _manager(self, message: UpdateWeights | WeightsGroup, operation: Operation) -> InferenceManager:
        found = [
            manager
            for (role, name), manager in self._managers.items()
            if (str(role), name) == (message.role, message.model)
        ]
        if not found:
            here = ", ".join(f"{role}/{name}" for (role, name), _ in self._managers.items())
            raise UnknownModel(
                f"{message.kind}: no model {message.role}/{message.model} is managed here; managed: {here}"
            )
        manager = found[0]
        spec_for(manager.model.role, manager.model.weight_source).check(operation)
        unknown = sorted(message.per_replica.keys() - {replica.engine_id for replica in manager.replicas})
        if unknown:
            raise ProtocolError(
                f"{message.kind}: per_replica names {unknown[0]!r}, which is no replica of {message.model}"
            )
        if manager.updating:
            raise WeightsBusy(f"{message.kind}: another operation on the weights of {message.model} is under way")
        if not manager.serving:
            raise NotUpdatable(f"{message.kind}: the run is not serving yet, or no more; wait until it is READY")
        asleep = [replica.engine_id for replica in manager.replicas if replica.state in _CLOSED]
        if asleep:
            raise NotUpdatable(f"{message.kind}: {asleep[0]} has given its memory back; onload {message.model} first")
        return manager

    def _document(self, message: UpdateWeights | WeightsGroup, **fields: Any) -> dict[str, Any]:
        head = {"operation": message.id, "kind": message.kind, "role": message.role, "model": message.model}
        return {**head, "state": "RUNNING", **fields, "reason": "", "replicas": {}}

    def _update_job(self, message: UpdateWeights) -> tuple[Job, Callable[[Job], Any]]:
        transport = Transport(message.source)
        manager = self._manager(message, OPERATIONS[transport])
        where = f"update_weights {message.role}/{message.model}"
        if transport is Transport.DISK and (not message.final or message.per_replica):
            raise ProtocolError(f"{where}: a checkpoint is loaded whole and by all; leave final and per_replica out")
        for payload in _payloads(message, manager):
            check_update(transport, payload, where)
        path = str(message.payload["model_path"]) if transport is Transport.DISK else None
        wanted = Weights(message.weight_version, path)
        members = self._members(manager, wanted, transport)
        if transport is Transport.DISTRIBUTED:
            self._check_joined(manager, members, group_of(message.payload), where)
        control = self._config.control
        seconds = message.timeout_seconds or control.operation_seconds
        drain = control.drain_seconds if message.drain_seconds is None else message.drain_seconds
        document = self._document(
            message,
            source=message.source,
            final=message.final,
            weight_version=wanted.version,
            published_version=manager.weights.version,
        )
        extra = {
            "source": str(transport),
            "weight_version": wanted.version,
            "final": message.final,
            "drain_seconds": min(drain, seconds / 2),
        }
        job = Job(manager, document, members, message.payload, message.per_replica, seconds, extra)
        return job, lambda job: self._update(job, wanted, transport, final=message.final)

    def _members(self, manager: InferenceManager, wanted: Weights, transport: Transport) -> dict[str, Replica]:
        """Who takes part: all that are up, or in a later part those that took the earlier ones."""
        up = {entry.engine_id: entry for entry in manager.replicas if entry.resident and entry.state in _UP}
        parts = self._parts.get(manager)
        if parts is not None and (parts.weights, parts.transport) == (wanted, transport):
            up = {name: entry for name, entry in up.items() if parts.members.get(name) is entry}
        if not up:
            raise NotUpdatable(f"update_weights: no replica of {manager.model.name} is up to take the update")
        return up

    def _check_joined(self, manager: InferenceManager, members: dict[str, Replica], group: str, where: str) -> None:
        # A collective in which somebody is missing hangs all others until their time is up.
        missing = [name for name in members if group not in manager.slot(name).groups]
        if missing:
            raise NotUpdatable(
                f"{where}: {missing[0]} has not joined the group {group!r} (a replica built again is in none); "
                f"destroy the group and make it again with weights_group"
            )

    def _group_job(self, message: WeightsGroup) -> tuple[Job, Callable[[Job], Any]]:
        manager = self._manager(message, Operation.UPDATE_WEIGHTS_DISTRIBUTED)
        action = GroupAction(message.action)
        where = f"weights_group {message.role}/{message.model}"
        for payload in _payloads(message, manager):
            check_group(action, payload, where)
        members = {entry.engine_id: entry for entry in manager.replicas if entry.resident and entry.state in _UP}
        if not members:
            raise NotUpdatable(f"{where}: no replica is up to join")
        group = group_of(message.payload)
        document = self._document(message, action=message.action, group=group)
        seconds = message.timeout_seconds or self._config.control.operation_seconds
        extra = {"action": message.action}
        job = Job(manager, document, members, message.payload, message.per_replica, seconds, extra)
        return job, lambda job: self._group(job, action, group)

    # --- the work -------------------------------------------------------------------------------------------

    async def _carry_out(self, running: Running, job: Job, work: Callable[[Job], Any]) -> None:
        try:
            await work(job)
        finally:
            job.manager.updating = False
            running.done = True
            job.document["seconds"] = round(self._hooks.clock() - running.began, 3)
            brief = {key: value for key, value in job.document.items() if key != "kind"}
            self._hooks.record(str(job.document["kind"]), **brief)

    async def _group(self, job: Job, action: GroupAction, group: str) -> None:
        async def one(replica_id: str) -> tuple[str, bool, str]:
            slot = job.manager.slot(replica_id)
            try:
                await job.manager.ask_head(
                    replica_id, Method.WEIGHTS_GROUP, job.args(replica_id), job.timeout_seconds + MARGIN_SECONDS
                )
            except (CommandFailed, NodeGone, RecoveryRequired) as error:
                slot.groups.discard(group)
                return replica_id, False, error.message
            same = slot.replica is job.members[replica_id]
            if action is GroupAction.INIT and same:
                slot.groups.add(group)
            else:
                slot.groups.discard(group)
            return replica_id, same, "" if same else "it was built again meanwhile"

        rows = await asyncio.gather(*(one(replica_id) for replica_id in job.members))
        job.document["replicas"] = {name: {"ok": ok, "reason": reason} for name, ok, reason in rows}
        _conclude(job.document, [ok for _, ok, _ in rows], next((reason for _, ok, reason in rows if not ok), ""))

    async def _update(self, job: Job, wanted: Weights, transport: Transport, *, final: bool) -> None:
        manager, now = job.manager, job.manager.weights
        valid = frozenset(name for name, replica in job.members.items() if not replica.weights_awaited)
        # The fence: discovery and routers stop sending before any engine is touched.
        for replica_id in job.members:
            manager.feed(replica_id, Event(EventKind.UPDATE, reason=f"weights {wanted.version!r} are being loaded"))
        reports = await asyncio.gather(*(self._report(job, replica_id) for replica_id in job.members))
        decision = decide(now, wanted, reports, final=final, valid=valid)
        if decision.weights != now:
            manager.adopt(decision.weights)
            self._publish()
        job.document["published_version"] = decision.weights.version
        serve = self._follow(job, reports, decision.verdicts)
        self._others(job, adopted=decision.weights != now)
        self._parts.pop(manager, None)
        taken = {report.replica_id for report in reports if report.outcome is Outcome.TAKEN}
        if taken:
            members = {name: replica for name, replica in job.members.items() if name in taken}
            until = self._hooks.clock() + job.timeout_seconds
            self._parts[manager] = Parts(wanted, transport, members, until)
        late = await self._until_shown(manager, serve, job.timeout_seconds)
        for replica_id in late:
            job.document["replicas"][replica_id]["reason"] = "updated, but not READY again in time"
        good = [
            report.outcome in (Outcome.UPDATED, Outcome.TAKEN) and report.replica_id not in late for report in reports
        ]
        reason = next((report.reason for report in reports if report.reason), "late" if late else "")
        _conclude(job.document, good, reason)

    async def _report(self, job: Job, replica_id: str) -> Report:
        try:
            value = await job.manager.ask_head(
                replica_id, Method.UPDATE_WEIGHTS, job.args(replica_id), job.timeout_seconds + MARGIN_SECONDS
            )
        except (CommandFailed, NodeGone, RecoveryRequired) as error:
            return Report(replica_id, Outcome.DOUBTFUL, None, error.message)
        if job.manager.slot(replica_id).replica is not job.members[replica_id]:
            return Report(replica_id, Outcome.DOUBTFUL, None, "it was built again meanwhile")
        outcomes = {str(outcome): outcome for outcome in Outcome}
        version = value.get("weight_version")
        return Report(
            replica_id,
            outcomes.get(str(value.get("outcome")), Outcome.DOUBTFUL),
            None if version is None else str(version),
            str(value.get("reason") or ""),
        )

    def _follow(self, job: Job, reports: list[Report], verdicts: Any) -> dict[str, Replica]:
        """Carry out the verdicts; answers those that are to serve."""
        serve: dict[str, Replica] = {}
        for report in reports:
            replica_id, verdict = report.replica_id, verdicts[report.replica_id]
            job.document["replicas"][replica_id] = {
                "outcome": str(report.outcome),
                "weight_version": report.version,
                "then": str(verdict),
                "reason": report.reason,
            }
            replica = job.members[replica_id]
            if job.manager.slot(replica_id).replica is not replica or replica.state not in _UP:
                continue
            if verdict is Verdict.SERVE:
                serve[replica_id] = replica
                job.manager.feed(replica_id, Event(EventKind.WEIGHTS_VALID))
            elif verdict is Verdict.REBUILD:
                job.manager.retire(replica_id, f"weights: {report.reason or 'its version is not the wanted one'}")
        return serve

    def _others(self, job: Job, *, adopted: bool) -> None:
        """Replicas that came up meanwhile with the weights of before, or are about to."""
        manager = job.manager
        for replica in manager.replicas if adopted else ():
            took_part = job.members.get(replica.engine_id) is replica
            if took_part or replica.state not in _UP or not replica.workers[0].started:
                continue
            if manager.weights.path is not None:
                manager.retire(replica.engine_id, f"it was started before version {manager.weights.version!r}")
            elif replica.resident:
                reason = f"it was started before version {manager.weights.version!r}; it waits for the next update"
                manager.feed(replica.engine_id, Event(EventKind.UPDATE, reason=reason))

    async def _until_shown(self, manager: InferenceManager, serve: dict[str, Replica], seconds: float) -> list[str]:
        """Wait until discovery shows them, and the router has them; answers those that it does not show in time."""
        router = self._routers.of(manager.model.role, manager.model.name)
        until = self._hooks.clock() + seconds

        def awaited() -> list[str]:
            return [
                name
                for name, replica in serve.items()
                if manager.slot(name).replica is replica
                and replica.state in _UP
                and replica.published().state is not ReplicaState.READY
            ]

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while awaited():
                    self.moved.clear()
                    await self.moved.wait()
        if serve and router is not None:
            try:
                await router.wait_complete(max(until - self._hooks.clock(), 0.0))
            except StartupFailed:
                return list(serve)
        return [name for name, replica in serve.items() if replica.published().state is not ReplicaState.READY]


def _payloads(message: UpdateWeights | WeightsGroup, manager: InferenceManager) -> list[dict[str, Any]]:
    """Every payload that an engine will see."""
    own = [message.payload | changes for changes in message.per_replica.values()]
    return own if len(own) == len(manager.replicas) else [message.payload, *own]


def _conclude(document: dict[str, Any], good: list[bool], reason: str) -> None:
    document["state"] = "SUCCEEDED" if all(good) else "PARTIAL" if any(good) else "FAILED"
    document["reason"] = "" if document["state"] == "SUCCEEDED" else reason
