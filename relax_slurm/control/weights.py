"""Updates of a model's weights, one operation at a time per model (docs/weights.md, row E10).

An operation closes the model for requests, sends every replica the command, decides with `core.weights` what follows
and publishes. It goes on when the client that asked for it leaves; whoever knows its id may ask how it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.hooks import Hooks
from relax_slurm.control.links import CommandFailed, NodeGone
from relax_slurm.control.manager import InferenceManager
from relax_slurm.control.managers import Managers
from relax_slurm.control.refusals import UnknownOperation
from relax_slurm.control.routers import Routers
from relax_slurm.control.weight_jobs import UP, Job, Parts, group_job, update_job
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Event, EventKind
from relax_slurm.core.snapshot import ReplicaState
from relax_slurm.core.weights import GroupAction, Outcome, Report, Transport, Verdict, Weights, decide, group_of
from relax_slurm.errors import RecoveryRequired, StartupFailed
from relax_slurm.wire.codec import pack
from relax_slurm.wire.messages import IdReused, Method
from relax_slurm.wire.weight_messages import GetWeights, UpdateWeights, WeightsGroup

KEPT_OPERATIONS = 256
MARGIN_SECONDS = 30.0
"""More than the sidecar's own deadline, so that its reason arrives first: it still asks for a version after it."""


@dataclass(slots=True)
class Running:
    """One operation and how it stands."""

    fingerprint: bytes
    document: dict[str, Any]
    began: float
    done: bool = False


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
        control = self._config.control
        if isinstance(message, UpdateWeights):
            job = update_job(message, self._managers, self._parts, control)
        else:
            job = group_job(message, self._managers, control)
        running = Running(fingerprint, job.document, self._hooks.clock())
        self._known[message.id] = running
        if len(self._known) > KEPT_OPERATIONS:
            for key in [key for key, entry in self._known.items() if entry.done][:1]:
                del self._known[key]
        job.manager.updating = True
        self._hooks.spawn(self._carry_out(running, job))
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

    # --- the work -------------------------------------------------------------------------------------------

    async def _carry_out(self, running: Running, job: Job) -> None:
        message = job.message
        try:
            if isinstance(message, UpdateWeights) and job.weights is not None and not job.members:
                self._note(job, job.weights)
            elif isinstance(message, UpdateWeights) and job.weights is not None:
                await self._update(job, job.weights, Transport(message.source), final=message.final)
            elif isinstance(message, WeightsGroup):
                await self._group(job, GroupAction(message.action), group_of(message.payload))
        finally:
            job.manager.updating = False
            running.done = True
            job.document["seconds"] = round(self._hooks.clock() - running.began, 3)
            brief = {key: value for key, value in job.document.items() if key != "kind"}
            self._hooks.record(str(job.document["kind"]), **brief)

    def _note(self, job: Job, wanted: Weights) -> None:
        """Nobody is awake: the checkpoint is loaded, and the version proven, when the lease of the role comes."""
        job.manager.adopt(wanted)
        self._publish()
        job.document["published_version"] = wanted.version
        job.document["replicas"] = {
            replica.engine_id: {"outcome": "noted", "weight_version": None, "then": "onload", "reason": ""}
            for replica in job.manager.replicas
        }
        job.document["state"] = "SUCCEEDED"

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
            if job.manager.slot(replica_id).replica is not replica or replica.state not in UP:
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
            if took_part or replica.state not in UP or not replica.workers[0].started:
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
                and replica.state in UP
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


def _conclude(document: dict[str, Any], good: list[bool], reason: str) -> None:
    document["state"] = "SUCCEEDED" if all(good) else "PARTIAL" if any(good) else "FAILED"
    document["reason"] = "" if document["state"] == "SUCCEEDED" else reason
