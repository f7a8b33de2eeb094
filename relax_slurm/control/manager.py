"""One `InferenceManager` per model, the same class for all three roles (row E1).

It owns the replicas of its model: it feeds their state machines, carries out the commands that come back and tells the
coordinator what to publish. Decisions are in `core.replica`; this file is the ring around them.

Until `serve` a replica that fails stays as it is, because whoever waits for it reports it. From then on the manager
looks after it: it is stopped, and built again once its end is proven.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.dispatch import Dispatch, Slot
from relax_slurm.control.hooks import Hooks
from relax_slurm.control.links import NodeLinks
from relax_slurm.control.refusals import WeightsBusy
from relax_slurm.control.router_api import RouterWorker
from relax_slurm.control.shown import model_entry, router_worker, shown_state
from relax_slurm.core.binding import BoundPlan
from relax_slurm.core.onload import REMEDIES, Remedy, Woken, woken
from relax_slurm.core.plan import ModelPlan, WorkerType
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
from relax_slurm.core.snapshot import ModelEntry, ReplicaState
from relax_slurm.core.weights import Weights
from relax_slurm.errors import EngineFailed, RecoveryRequired, RelaxError, StartupFailed
from relax_slurm.wire.messages import Method, WorkerState, WorkerStatus

STOP_AGAIN_SECONDS = 30.0
REBUILD_PAUSE_SECONDS = 1.0
MAX_REBUILD_PAUSE_SECONDS = 30.0
"""Pause before a stop that could not be confirmed is asked for again."""
_BAD = (State.FAILED, State.STOPPING, State.GONE)


def rebuild_pause(restarts: int) -> float:
    """Seconds between the last rebuild and the next one, growing with what the window has seen already."""
    return min(REBUILD_PAUSE_SECONDS * 2.0 ** (restarts - 1), MAX_REBUILD_PAUSE_SECONDS)


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
        self._config = config
        self._links = links
        self._hooks = hooks
        self._serving = False
        self._rebuild = False
        self._awake = True
        """False from an offload to the next onload: somebody else may use the GPUs, so nothing is built there."""
        self._onloading = False
        """A static model is being woken: what ends now may be built again, its role has the GPUs."""
        self.updating = False
        """Whether an update of its weights is under way: its replicas being closed is then no loss."""
        self._changed = asyncio.Event()
        self._dispatch = Dispatch(
            model,
            bound,
            config,
            links,
            spawn=hooks.spawn,
            new_id=hooks.new_id,
            feed=self.feed,
            ended=self._changed.set,
            run_tag=run_tag,
            memory_saver=memory_saver,
        )
        self._slots = {
            plan.replica_id: Slot(
                plan,
                Replica(plan.replica_id, len(plan.workers), since=hooks.clock()),
                tuple(bound.worker_binding(worker) for worker in plan.workers),
            )
            for plan in model.replicas
            if plan.worker_type is not WorkerType.PLACEHOLDER
        }
        self._counts = Counter(slot.replica.state for slot in self._slots.values())
        self._on_node: dict[str, list[tuple[str, int]]] = {}
        for replica_id, slot in self._slots.items():
            for rank, binding in enumerate(slot.bindings):
                self._on_node.setdefault(binding.node_name, []).append((replica_id, rank))

    # --- what others read -----------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[Replica]:
        """All replicas, in the plan's order."""
        return [slot.replica for slot in self._slots.values()]

    def entry(self, router_url: str | None = None) -> ModelEntry:
        """The model as discovery shows it; prefill and decode workers stay inside."""
        return model_entry(self.model, self._slots.values(), self.weights, router_url)

    def shown_state(self, router_url: str | None) -> ReplicaState:
        """The model's state. Behind a router it is READY while the router's URL is published, and not otherwise."""
        return shown_state(self.model, self._slots.values(), router_url)

    def router_worker(self, replica: Replica) -> RouterWorker | None:
        """The replica as its router shall know it; None while it must not get requests."""
        return router_worker(self._slots[replica.engine_id], replica)

    def is_public(self, replica_id: str) -> bool:
        """Whether discovery may show the replica."""
        return self._slots[replica_id].plan.worker_type is WorkerType.REGULAR

    @property
    def weights(self) -> Weights:
        """What every replica that serves has."""
        return self._dispatch.weights

    @property
    def serving(self) -> bool:
        """Whether it looks after its replicas: after the start and before the end."""
        return self._serving

    @property
    def complete(self) -> bool:
        """Whether every replica serves, or sleeps until its lease."""
        if self._counts[State.READY] + self._counts[State.SLEEPING] < len(self._slots):
            return False
        return all(replica.state is State.SLEEPING or not replica.fenced for replica in self.replicas)

    @property
    def exhausted(self) -> str:
        """Why nothing of this model can serve any more; empty while something can or may again."""
        given_up = [slot.given_up for slot in self._slots.values()]
        return given_up[0] if given_up and all(given_up) else ""

    def unproven(self) -> list[Replica]:
        """Replicas whose end is not proven."""
        return [replica for replica in self.replicas if replica.state is not State.GONE]

    def workers_on(self, node: str) -> list[tuple[str, int]]:
        """Replica id and rank of every worker planned on a node."""
        return self._on_node.get(node, [])

    def worker_ids(self) -> Iterable[tuple[str, str, str, int]]:
        """Worker id, node, replica id and rank of every worker."""
        for node, workers in self._on_node.items():
            for replica_id, rank in workers:
                yield f"{replica_id}#{rank}", node, replica_id, rank

    def nodes_of(self, replica_id: str) -> list[str]:
        """Names of the nodes that carry the replica's workers, head first."""
        return [binding.node_name for binding in self._slots[replica_id].bindings]

    # --- what the coordinator asks --------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every replica and wait until all are READY; `StartupFailed` names the first that is not."""
        self._feed_all(EventKind.BEGIN)
        await self._until(State.READY, StartupFailed)

    async def offload(self) -> None:
        """Bring every replica to SLEEPING; `RecoveryRequired` names those whose release is not confirmed.

        Each goes its own way: one that fails does not keep the others awake. What ends meanwhile, and is proven to have
        ended, holds nothing either; it is not built again before the next `onload`. `WeightsBusy` while its weights are
        being updated: a replica that sleeps with half an update in it has no weights to wake up with.
        """
        if self.updating:
            raise WeightsBusy(
                f"{self.model.role} model {self.model.name}: its weights are being updated; wait for that"
            )
        self._awake = False
        for replica in self.replicas:
            if woken(replica) is Woken.PENDING:
                # The way out of ONLOADING is READY or FAILED, and nobody will send it weights any more.
                self.feed(replica.engine_id, Event(EventKind.FAIL, reason="offloaded while it waited for weights"))
        await self._settled(State.READY, EventKind.OFFLOAD, self._falls_asleep)
        held = [replica for replica in self.replicas if replica.state not in (State.SLEEPING, State.GONE)]
        if held:
            raise RecoveryRequired(self._not_as_wanted(held, State.SLEEPING))

    async def onload(self) -> tuple[str, ...]:
        """Bring every replica back to READY; answers the ids of those that have their memory and wait for weights.

        `EngineFailed` when one does not come: by then the others of a rollout sleep again, and a static replica was
        built again as often as its restarts allow (`core.onload`).
        """
        remedy = REMEDIES[self.model.weight_source]
        self._awake, self._onloading = True, remedy is Remedy.REBUILD
        try:
            self.tick()  # what ended since the offload is built now
            # From here on a rollout that fails is not built again: it would come up with the weights of its checkpoint
            # beside siblings that kept newer ones.
            self._awake = self._onloading
            await self._settled(State.SLEEPING, EventKind.ONLOAD, lambda slot: self._wakes(slot, remedy))
        finally:
            self._onloading = False
        lost = [replica for replica in self.replicas if woken(replica) is Woken.LOST]
        if not lost:
            self._awake = True
            return tuple(r.engine_id for r in self.replicas if woken(r) is Woken.PENDING)
        message = self._not_as_wanted(lost, State.READY)
        if remedy is Remedy.OFFLOAD:
            with contextlib.suppress(RecoveryRequired):  # said below, together with why it came to this
                await self.offload()
            held = [replica.engine_id for replica in self.replicas if not replica.release_proven]
            if held:
                raise RecoveryRequired(f"{message}; release unconfirmed: {', '.join(held)}")
        raise EngineFailed(message)

    def abandon(self, reason: str) -> None:
        """A move went wrong: end what hangs in between, and do not build it again before the next `onload`.

        What stays behind is either asleep or ended, so that there can be evidence of release.
        """
        self._awake = self._onloading = False
        self._changed.set()
        for slot in self._slots.values():
            state = slot.replica.state
            if state in (State.STARTING, State.ONLOADING, State.DRAINING):
                self.feed(slot.plan.replica_id, Event(EventKind.FAIL, reason=reason))
            elif state is State.READY:
                self._shut_down(slot, reason)

    def _wakes(self, slot: Slot, remedy: Remedy) -> bool:
        state = woken(slot.replica)
        if state is Woken.LOST and self._serving and remedy is Remedy.REBUILD:
            still = self._onloading and not slot.given_up  # `abandon` ends the waiting too
            return still and (slot.replica.state is not State.STOPPING or self._goes_on(slot))
        return state is Woken.UNDER_WAY

    def _goes_on(self, slot: Slot) -> bool:
        """Whether anything is under way that could still change the replica."""
        return bool(slot.tasks) or slot.replica.state not in _BAD

    def _falls_asleep(self, slot: Slot) -> bool:
        return slot.replica.state not in (State.SLEEPING, State.GONE) and self._goes_on(slot)

    async def _settled(self, source: State, kind: EventKind, under_way: Callable[[Slot], bool]) -> None:
        """Ask every replica as soon as it is in `source`, one that was still on its way there too, and wait for all."""
        while True:
            for slot in self._slots.values():
                if slot.replica.state is source:
                    self.feed(slot.plan.replica_id, Event(kind))
            if not any(under_way(slot) for slot in self._slots.values()):
                return
            self._changed.clear()
            await self._changed.wait()

    def serve(self, *, rebuild: bool) -> None:
        """Look after the replicas from now on. Without `rebuild` one that ended stays ended.

        A deferred replica must not come back by itself: whoever has the lease uses its GPUs.
        """
        self._serving, self._rebuild = True, rebuild
        for slot in self._slots.values():
            self._look_after(slot)

    def slot(self, replica_id: str) -> Slot:
        """One replica across its rebuilds; only `feed` and `retire` may change it."""
        return self._slots[replica_id]

    async def ask_head(self, replica_id: str, method: Method, args: dict[str, Any], seconds: float) -> dict[str, Any]:
        """A command to a replica's head that changes nothing in its machine; errors are those of `links`."""
        return await self._dispatch.ask_head(self._slots[replica_id], method, args, seconds)

    def adopt(self, weights: Weights) -> None:
        """These are the model's weights from now on: engines are started with them, and discovery names them."""
        self._dispatch.weights = weights

    def retire(self, replica_id: str, reason: str) -> None:
        """End a replica that must not serve; while serving it is built again, with the model's weights."""
        self._shut_down(self._slots[replica_id], reason)

    def tick(self) -> None:
        """Call about once a second while serving: what had to wait for a node or for another try goes on."""
        if self._counts[State.GONE] + self._counts[State.STOPPING] + self._counts[State.FAILED]:
            for slot in self._slots.values():
                self._look_after(slot)

    async def stop(self, reason: str) -> None:
        """End every replica; answers when all ends are proven or nothing is under way that could prove one."""
        self._serving = False
        for slot in self._slots.values():
            if slot.replica.state is not State.GONE:
                self._shut_down(slot, reason)
        while self._counts[State.GONE] < len(self._slots) and self._dispatch.in_flight:
            self._changed.clear()
            await self._changed.wait()

    def rebind(self, bound: BoundPlan) -> None:
        """A node came back with other ports: what is started from now on uses them."""
        self._dispatch.bound = bound
        for slot in self._slots.values():
            slot.bindings = tuple(bound.worker_binding(worker) for worker in slot.plan.workers)

    async def _until(self, wanted: State, error: type[RelaxError]) -> None:
        while self._counts[wanted] < len(self._slots) and not any(self._counts[state] for state in _BAD):
            self._changed.clear()
            await self._changed.wait()
        bad = [replica for replica in self.replicas if replica.state in _BAD]
        if bad:
            raise error(self._not_as_wanted(bad, wanted))

    def _not_as_wanted(self, bad: Sequence[Replica], wanted: State) -> str:
        first = bad[0]
        others = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        return (
            f"{self.model.role} replica {first.engine_id} on {self.nodes_of(first.engine_id)[0]} is {first.state}, "
            f"wanted {wanted}: {first.reason or 'no reason given'}{others}"
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
        self._after(slot, before, commands, cause=str(event.kind), reason=event.reason)

    def on_status(self, replica_id: str, rank: int, status: WorkerStatus) -> None:
        """What a beat or an event says of a worker; only changes that the machine must know become events."""
        replica = self._slots[replica_id].replica
        worker = replica.workers[rank]
        if not worker.started or worker.exit_proof is not None:
            return
        if status.generation is not None and status.generation != replica.generation:
            return  # of a predecessor: its end is not the end of the worker that is being started now
        if status.state == WorkerState.EXITED:
            self.feed(replica_id, _event(EventKind.WORKER_EXITED, rank, status, evidence=Evidence.CONFIRMED_EXIT))
        elif status.state == WorkerState.UNCONFIRMED and worker.ready:
            self.feed(replica_id, _event(EventKind.WORKER_EXITED, rank, status))
        elif status.state == WorkerState.FAILED and worker.ready:
            self.feed(replica_id, _event(EventKind.WORKER_UNHEALTHY, rank, status))
        elif status.suspect != worker.suspect and worker.ready:
            kind = EventKind.WORKER_SUSPECT if status.suspect else EventKind.WORKER_WELL
            self.feed(replica_id, Event(kind, rank, reason=status.detail))
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

    def on_node_lost(self, node: str, reason: str) -> None:
        """The node has been silent for too long: its replicas fail. One that sleeps has nothing to lose and waits."""
        for replica_id, rank in self.workers_on(node):
            replica = self._slots[replica_id].replica
            worker = replica.workers[rank]
            if worker.started and worker.exit_proof is None and replica.state not in (State.SLEEPING, State.GONE):
                self.feed(replica_id, Event(EventKind.WORKER_UNHEALTHY, rank, reason=reason))

    def on_node_heard(self, node: str) -> None:
        """The node is back."""
        for replica_id, rank in self.workers_on(node):
            self.feed(replica_id, Event(EventKind.WORKER_HEARD, rank))

    def on_node_emptied(
        self, node: str, evidence: Evidence | None, reason: str, keep: frozenset[str] = frozenset()
    ) -> None:
        """No worker of ours but `keep` is left on the node; `evidence` is None where that is not proven."""
        for replica_id, rank in self.workers_on(node):
            worker = self._slots[replica_id].replica.workers[rank]
            if worker.started and worker.exit_proof is None and f"{replica_id}#{rank}" not in keep:
                event = Event(EventKind.WORKER_EXITED, rank, evidence=evidence, reason=reason)
                self.feed(replica_id, event)

    # --- what follows ---------------------------------------------------------------------------------------

    def _feed_all(self, kind: EventKind) -> None:
        for replica in self.replicas:
            self.feed(replica.engine_id, Event(kind))

    def _after(self, slot: Slot, before: State, commands: Iterable[Command], *, cause: str, reason: str) -> None:
        """Count, record, publish and send what follows from an event."""
        replica = slot.replica
        if replica.state is not before:
            self._counts[before] -= 1
            self._counts[replica.state] += 1
            self._changed.set()
            self._hooks.record(
                "replica",
                replica=slot.plan.replica_id,
                role=self.model.role,
                before=before,
                after=replica.state,
                cause=cause,
                reason=reason,
                generation=replica.generation,
            )
        todo = list(commands)
        stops = any(command.kind is CommandKind.STOP_WORKER for command in todo)
        if stops or (replica.state is State.GONE and before is not State.GONE):
            # A start that reached nobody yet must not reach the next sidecar: by the proof nothing of it runs.
            self._dispatch.withdraw(slot)
        if stops:
            slot.stopped_at = self._hooks.clock()
        for command in todo:
            if command.kind is CommandKind.PUBLISH:
                self._hooks.publish(self, replica)
            else:
                self._dispatch.send(slot, command)
        self._look_after(slot)

    def _look_after(self, slot: Slot) -> None:
        """While serving: clean up what failed, ask again for an end that is not proven, build again what is gone."""
        if not self._serving:
            return
        state = slot.replica.state
        if state is State.FAILED:
            self._shut_down(slot, slot.replica.reason)
        elif state is State.STOPPING and not slot.tasks:
            if self._hooks.clock() - slot.stopped_at >= STOP_AGAIN_SECONDS and self._reachable(slot):
                self._shut_down(slot, slot.replica.reason)
        elif state is State.GONE and not slot.given_up:
            self._begin_again(slot)

    def _shut_down(self, slot: Slot, reason: str) -> None:
        before = slot.replica.state
        commands = slot.replica.shutdown(self._hooks.clock(), reason)
        self._after(slot, before, commands, cause="stop", reason=reason)

    def _begin_again(self, slot: Slot) -> None:
        links = [self._links.nodes[binding.node_name] for binding in slot.bindings]
        lost = next((link for link in links if link.lost), None)
        has_gpus = self._awake and self._hooks.may_run(str(self.model.role))
        if self._rebuild and not has_gpus and lost is None:
            return  # `onload` comes back to it
        if lost is not None or not (self._rebuild or self._onloading):
            ended = f"{lost.step_ended} and will not be started again" if lost is not None else slot.replica.reason
            self._give_up(slot, ended)
            return
        if any(link.identity is None for link in links):
            return  # its sidecar is being started; `tick` comes back to it
        now = self._hooks.clock()
        budget = self._config.engine
        while slot.restarts and now - slot.restarts[0] > budget.restart_window_seconds:
            slot.restarts.popleft()
        if len(slot.restarts) >= budget.max_restarts:
            self._give_up(slot, slot.replica.reason)
            return
        if slot.restarts and now - slot.restarts[-1] < rebuild_pause(len(slot.restarts)):
            return  # `tick` comes back to it: what fails at once must not use up its restarts at once
        slot.restarts.append(now)
        self._dispatch.withdraw(slot)
        slot.replica = slot.replica.successor(now)
        self._counts[State.GONE] -= 1
        self._counts[slot.replica.state] += 1
        self._hooks.publish(self, slot.replica)
        self.feed(slot.plan.replica_id, Event(EventKind.BEGIN))

    def _give_up(self, slot: Slot, reason: str) -> None:
        slot.given_up = reason or "its engine ended"
        self._hooks.record("given_up", replica=slot.plan.replica_id, reason=slot.given_up)
        self._changed.set()

    def _reachable(self, slot: Slot) -> bool:
        nodes = [slot.bindings[rank].node_name for rank in slot.replica.unproven()]
        return any(self._links.nodes[node].identity is not None for node in nodes)


def _event(kind: EventKind, rank: int, status: WorkerStatus, evidence: Evidence | None = None) -> Event:
    return Event(kind, rank, evidence=evidence, reason=status.detail)
