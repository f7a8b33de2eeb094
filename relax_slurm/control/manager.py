"""One `InferenceManager` per model, the same class for all three roles (row E1).

It owns the replicas of its model: it feeds their state machines, carries out the commands that come back and tells the
coordinator what to publish. Decisions are in `core.replica`; this file is the ring around them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.links import CommandFailed, NodeGone, NodeLinks
from relax_slurm.control.worker_args import worker_args
from relax_slurm.core.binding import BoundPlan, WorkerBinding
from relax_slurm.core.plan import ModelPlan, ReplicaPlan, WeightSource, WorkerType
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import (
    Command,
    CommandKind,
    Event,
    EventKind,
    Evidence,
    IllegalEvent,
    State,
)
from relax_slurm.core.snapshot import ModelEntry, ReplicaState, model_state
from relax_slurm.errors import EngineFailed, RecoveryRequired, RelaxError, StartupFailed
from relax_slurm.wire.messages import Method, WorkerState, WorkerStatus

_METHODS = {
    CommandKind.START_WORKER: Method.START_WORKER,
    CommandKind.STOP_WORKER: Method.STOP_WORKER,
    CommandKind.OPEN_ADMISSION: Method.OPEN_ADMISSION,
    CommandKind.CLOSE_ADMISSION: Method.CLOSE_ADMISSION,
    CommandKind.OFFLOAD: Method.OFFLOAD,
    CommandKind.ONLOAD: Method.ONLOAD,
}
_BAD = {State.FAILED, State.STOPPING, State.GONE}
_SETTLED = {ReplicaState.READY, ReplicaState.SLEEPING}


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a manager needs from the coordinator."""

    publish: Callable[[InferenceManager, Replica], None]
    record: Callable[..., None]
    """Append to events.jsonl."""
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    """Run as a task that the coordinator keeps and whose failure ends the run."""
    clock: Callable[[], float]
    new_id: Callable[[], str]


@dataclass(slots=True)
class _Slot:
    """One replica of the plan, across its rebuilds."""

    plan: ReplicaPlan
    replica: Replica
    bindings: tuple[WorkerBinding, ...]
    restarts: deque[float] = field(default_factory=deque)
    given_up: str = ""
    """Why it is not built again."""


class InferenceManager:
    """Replicas of one model. Belongs to the coordinator's loop; nothing else writes them."""

    def __init__(
        self,
        model: ModelPlan,
        bound: BoundPlan,
        config: RunConfig,
        links: NodeLinks,
        hooks: Hooks,
        *,
        run_tag: str,
        memory_saver: bool,
    ) -> None:
        self.model = model
        self.rebuild = True
        """Whether a replica whose end is proven is started again; cleared when the run stops."""
        self._bound = bound
        self._config = config
        self._links = links
        self._hooks = hooks
        self._run_tag = run_tag
        self._memory_saver = memory_saver
        self._changed = asyncio.Condition()
        self._slots = {
            plan.replica_id: _Slot(
                plan,
                Replica(plan.replica_id, len(plan.workers), since=hooks.clock()),
                tuple(bound.worker_binding(worker) for worker in plan.workers),
            )
            for plan in model.replicas
            if plan.worker_type is not WorkerType.PLACEHOLDER
        }

    # --- what others read -----------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, in the plan's order."""
        return [slot.replica for slot in self._slots.values()]

    def entry(self) -> ModelEntry:
        """The model as discovery shows it; prefill and decode workers stay inside."""
        published = [
            slot.replica.published()
            for slot in self._slots.values()
            if slot.plan.worker_type is WorkerType.REGULAR
        ]
        static = self.model.weight_source is WeightSource.STATIC
        return ModelEntry(
            name=self.model.name,
            state=model_state(engine.state for engine in published),
            route_mode=self.model.route_mode,
            router_url=None,
            weight_source=self.model.weight_source,
            weight_version=None if static else "0",
            served_model_name=self.model.served_model_name,
            engines=tuple(sorted(published, key=lambda engine: engine.engine_id)),
        )

    def is_public(self, replica_id: str) -> bool:
        """Whether discovery may show the replica."""
        return self._slots[replica_id].plan.worker_type is WorkerType.REGULAR

    @property
    def complete(self) -> bool:
        """Whether every replica is in the state that the run wants it in."""
        return all(replica.published().state in _SETTLED for replica in self.replicas)

    @property
    def exhausted(self) -> str:
        """Why nothing of this model can serve any more; empty while something can or may again."""
        given_up = [slot.given_up for slot in self._slots.values()]
        return given_up[0] if given_up and all(given_up) else ""

    def workers_on(self, node: str) -> Iterable[tuple[str, int]]:
        """Replica id and rank of every worker planned on a node."""
        for replica_id, slot in self._slots.items():
            for rank, binding in enumerate(slot.bindings):
                if binding.node_name == node:
                    yield replica_id, rank

    def nodes_of(self, replica_id: str) -> list[str]:
        """Names of the nodes that carry the replica's workers, head first."""
        return [binding.node_name for binding in self._slots[replica_id].bindings]

    # --- what the coordinator asks --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every replica and wait until all are READY; `StartupFailed` names the first that is not."""
        for replica in self.replicas:
            self.feed(replica.engine_id, Event(EventKind.BEGIN))
        await self._until(State.READY, StartupFailed)

    async def offload(self) -> None:
        """Bring every replica to SLEEPING; `RecoveryRequired` when the release of one is not confirmed."""
        for replica in self.replicas:
            self.feed(replica.engine_id, Event(EventKind.OFFLOAD))
        await self._until(State.SLEEPING, RecoveryRequired)

    async def onload(self) -> None:
        """Bring every replica back to READY; `EngineFailed` when one does not come."""
        for replica in self.replicas:
            self.feed(replica.engine_id, Event(EventKind.ONLOAD))
        await self._until(State.READY, EngineFailed)

    async def stop(self, reason: str) -> list[Replica]:
        """End every replica and wait for proof; answers those whose end could not be proven in time."""
        self.rebuild = False
        for slot in self._slots.values():
            if slot.replica.state is not State.GONE:
                self._carry_out(slot, slot.replica.shutdown(self._hooks.clock(), reason))
        seconds = self._config.control.drain_seconds + self._config.control.operation_seconds
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: all(r.state is State.GONE for r in self.replicas))
        except TimeoutError:
            pass
        return [replica for replica in self.replicas if replica.state is not State.GONE]

    async def _until(self, wanted: State, error: type[RelaxError]) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    all(r.state is wanted for r in self.replicas)
                    or any(r.state in _BAD for r in self.replicas)
                )
            )
        for replica in self.replicas:
            if replica.state in _BAD:
                raise error(
                    f"{self.model.role} replica {replica.engine_id} on "
                    f"{self.nodes_of(replica.engine_id)[0]} is {replica.state}, wanted {wanted}: "
                    f"{replica.reason or 'no reason given'}"
                )

    # --- events ---------------------------------------------------------------------------------------------

    def feed(self, replica_id: str, event: Event) -> None:
        """Give one event to a replica and carry out what follows. An event that cannot happen now is recorded."""
        slot = self._slots[replica_id]
        before = slot.replica.state
        try:
            commands = slot.replica.apply(event, self._hooks.clock())
        except IllegalEvent as error:
            self._hooks.record("ignored", replica=replica_id, reason=error.message)
            return
        if slot.replica.state is not before:
            self._hooks.record(
                "replica",
                replica=replica_id,
                role=self.model.role,
                before=before,
                after=slot.replica.state,
                cause=event.kind,
                reason=event.reason,
                generation=slot.replica.generation,
            )
        self._carry_out(slot, commands)

    def on_status(self, replica_id: str, rank: int, status: WorkerStatus) -> None:
        """What a beat or an event says of a worker; only changes that the machine must know become events."""
        replica = self._slots[replica_id].replica
        worker = replica.workers[rank]
        if not worker.started or worker.exit_proof is not None:
            return
        if status.state == WorkerState.EXITED:
            self.feed(
                replica_id, _event(EventKind.WORKER_EXITED, rank, status, evidence=Evidence.CONFIRMED_EXIT)
            )
        elif status.state == WorkerState.UNCONFIRMED and worker.ready:
            self.feed(replica_id, _event(EventKind.WORKER_EXITED, rank, status))
        elif status.state == WorkerState.FAILED and worker.ready:
            self.feed(replica_id, _event(EventKind.WORKER_UNHEALTHY, rank, status))
        elif rank == 0 and replica.state is State.READY and replica.admission_open != status.admission_open:
            kind = EventKind.ADMISSION_OPENED if status.admission_open else EventKind.ADMISSION_CLOSED
            self.feed(replica_id, Event(kind))
            if not status.admission_open:
                # The sidecar closed it by its own deadline; WORKER_HEARD makes the machine ask for it again.
                self.feed(replica_id, Event(EventKind.WORKER_HEARD, rank))

    def on_node_silent(self, node: str) -> None:
        """The node has not been heard: stop routing there. Says nothing about its GPUs."""
        for replica_id, rank in self.workers_on(node):
            self.feed(replica_id, Event(EventKind.WORKER_SILENT, rank, reason=f"node {node} is silent"))

    def on_node_heard(self, node: str) -> None:
        """The node is back."""
        for replica_id, rank in self.workers_on(node):
            self.feed(replica_id, Event(EventKind.WORKER_HEARD, rank))

    def on_step_ended(self, node: str, evidence: Evidence | None, reason: str) -> None:
        """The node's step is over; `evidence` is None where that proves nothing about its processes."""
        for replica_id, rank in self.workers_on(node):
            worker = self._slots[replica_id].replica.workers[rank]
            if worker.started and worker.exit_proof is None:
                event = Event(EventKind.WORKER_EXITED, rank, evidence=evidence, reason=reason)
                self.feed(replica_id, event)

    # --- commands -------------------------------------------------------------------------------------------

    def _carry_out(self, slot: _Slot, commands: Iterable[Command]) -> None:
        for command in commands:
            if command.kind is CommandKind.PUBLISH:
                self._hooks.publish(self, slot.replica)
            else:
                self._hooks.spawn(self._command(slot, slot.replica, command))
        if slot.replica.state is State.GONE and self.rebuild:
            self._begin_again(slot)
        self._hooks.spawn(self._notify())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _begin_again(self, slot: _Slot) -> None:
        now = self._hooks.clock()
        budget = self._config.engine
        while slot.restarts and now - slot.restarts[0] > budget.restart_window_seconds:
            slot.restarts.popleft()
        if len(slot.restarts) >= budget.max_restarts:
            slot.given_up = slot.replica.reason or "its engine ended"
            self._hooks.record("given_up", replica=slot.plan.replica_id, reason=slot.given_up)
            return
        slot.restarts.append(now)
        slot.replica = slot.replica.successor(now)
        self._hooks.publish(self, slot.replica)
        self.feed(slot.plan.replica_id, Event(EventKind.BEGIN))

    async def _command(self, slot: _Slot, replica: Replica, command: Command) -> None:
        rank = command.worker or 0
        node = slot.bindings[rank].node_name
        try:
            value = await self._links.command(
                node,
                _METHODS[command.kind],
                self._args(slot, replica, command, rank),
                operation_id=self._hooks.new_id(),
                timeout_seconds=self._seconds(command.kind),
            )
            event = _success(command, rank, value)
        except CommandFailed as error:
            event = _failure(command, rank, error)
        except NodeGone as error:
            event = Event(EventKind.FAIL, reason=error.message)
        except RecoveryRequired as error:
            event = Event(EventKind.FAIL, reason=error.message)
        if slot.replica is replica:  # a rebuilt replica is not told about its predecessor
            self.feed(replica.engine_id, event)

    def _seconds(self, kind: CommandKind) -> float:
        control = self._config.control
        if kind is CommandKind.START_WORKER:
            return self._config.engine.startup_seconds + control.silence_seconds
        return control.operation_seconds

    def _args(self, slot: _Slot, replica: Replica, command: Command, rank: int) -> dict[str, Any]:
        base: dict[str, Any] = {"worker_id": f"{replica.engine_id}#{rank}"}
        if command.kind is CommandKind.START_WORKER:
            return base | worker_args(
                self.model,
                slot.plan,
                rank,
                self._bound,
                self._config,
                run_tag=self._run_tag,
                memory_saver=self._memory_saver,
                generation=replica.generation,
            )
        control = self._config.control
        if command.kind in (CommandKind.CLOSE_ADMISSION, CommandKind.STOP_WORKER):
            return base | {"drain_seconds": control.drain_seconds}
        if command.kind in (CommandKind.OFFLOAD, CommandKind.ONLOAD):
            seconds = control.operation_seconds - control.drain_seconds
            return base | {"tags": sorted(command.tags), "deadline_seconds": seconds}
        return base


def _event(kind: EventKind, rank: int, status: WorkerStatus, evidence: Evidence | None = None) -> Event:
    return Event(kind, rank, evidence=evidence, reason=status.detail)


def _success(command: Command, rank: int, value: dict[str, Any]) -> Event:
    match command.kind:
        case CommandKind.START_WORKER:
            url = value.get("base_url") if rank == 0 else None
            return Event(EventKind.WORKER_READY, rank, base_url=url)
        case CommandKind.OPEN_ADMISSION:
            return Event(EventKind.ADMISSION_OPENED)
        case CommandKind.CLOSE_ADMISSION:
            return Event(EventKind.ADMISSION_CLOSED)
        case CommandKind.OFFLOAD:
            return Event(EventKind.RELEASED, rank, tags=command.tags)
        case CommandKind.ONLOAD:
            return Event(EventKind.RESUMED, rank, tags=command.tags)
        case _:
            return Event(EventKind.WORKER_EXITED, rank, evidence=Evidence.CONFIRMED_EXIT)


def _failure(command: Command, rank: int, error: CommandFailed) -> Event:
    if error.remote_code == "exited":
        # The sidecar saw the whole process tree end: a failure, and proof of release.
        evidence = Evidence.CONFIRMED_EXIT
        return Event(EventKind.WORKER_EXITED, rank, evidence=evidence, reason=error.message)
    return Event(EventKind.FAIL, reason=error.message)
