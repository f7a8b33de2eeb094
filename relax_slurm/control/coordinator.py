"""The coordinator: one loop, the only writer of replica, registry and run state (docs/architecture.md, Processes).

`python -m relax_slurm.control.coordinator --run-dir DIR`. The loop takes messages in; `control.lifecycle` walks the
run from binding to its end; `control.manager` owns the replicas. What is published goes out on the discovery socket.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any
from uuid import uuid4

from relax_slurm.config.models import RunConfig
from relax_slurm.control.allocation import Allocation
from relax_slurm.control.links import NodeGone, NodeLink, NodeLinks
from relax_slurm.control.manager import Hooks, InferenceManager
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.state_document import state_document
from relax_slurm.core.binding import BoundPlan
from relax_slurm.core.discovery import to_json
from relax_slurm.core.evidence import StepProof
from relax_slurm.core.plan import InferencePlacementPlan, Role
from relax_slurm.core.registry import Registry
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Evidence
from relax_slurm.core.run import SERVING, TERMINAL, Run, RunEvent, RunState
from relax_slurm.core.snapshot import Policy, RoutingSpec
from relax_slurm.core.update import Update
from relax_slurm.errors import ProtocolError, RelaxError
from relax_slurm.wire.messages import (
    Beat,
    GatewayUp,
    GetSnapshot,
    GetState,
    Hello,
    PeerKind,
    Result,
    StepEnded,
    Stop,
    WorkerStatus,
    parse_for_coordinator,
)
from relax_slurm.wire.messages import Event as WorkerEvent
from relax_slurm.wire.server import ControlServer, Incoming

log = logging.getLogger(__name__)
BEAT_TOPIC = "beat"


class Coordinator:
    """State of one run and the handlers of its messages."""

    def __init__(
        self,
        run_dir: RunDir,
        config: RunConfig,
        plan: InferencePlacementPlan,
        allocation: Allocation,
        server: ControlServer,
        endpoint: dict[str, Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self.run_dir, self.config, self.plan, self.allocation = run_dir, config, plan, allocation
        self.epoch: str = endpoint["epoch"]
        self.clock = clock
        self._endpoint = endpoint
        self.run = Run()
        self.registry = Registry(self.epoch)
        self.bound: BoundPlan | None = None
        self.managers: dict[tuple[Role, str], InferenceManager] = {}
        self.stop_reason: str | None = None
        self.stop_wanted = asyncio.Event()
        self.nodes_changed = asyncio.Event()
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.server = server
        self.links = NodeLinks(allocation.node_names, self.epoch, server.send, clock)
        self.hooks = Hooks(self._publish_replica, self.record, self.spawn, clock, new_id)
        self._tasks: set[asyncio.Task[None]] = set()
        self._outbox: asyncio.Queue[Update] = asyncio.Queue(maxsize=65_536)

    # --- tasks ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write down where we are, then listen, publish and watch for silence."""
        self.run_dir.write_json("endpoint.json", self._endpoint)
        for work in (self._receive(), self._publish(), self._pulse()):
            self.spawn(work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run as a task; an exception in it ends the run instead of vanishing."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.fatal.done():
            self.fatal.set_exception(task.exception() or RuntimeError("task failed"))

    async def close(self) -> None:
        """Cancel every task and close the sockets."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.server.close()

    def record(self, event: str, /, **fields: Any) -> None:
        """One line in events.jsonl."""
        self.run_dir.append_event({"event": event, "epoch": self.epoch, **fields})

    def advance(self, event: RunEvent, reason: str = "") -> None:
        """Move the run's state machine and write the change down."""
        before = self.run.state
        after = self.run.apply(event, reason)
        if after is not before:
            self.record("run", before=before, after=after, cause=event, reason=reason)
            log.info("run %s -> %s %s", before, after, reason)

    # --- messages in ----------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            incoming = await self.server.receive()
            try:
                await self._handle(incoming)
            except RelaxError as error:
                await self._refuse(incoming, error)

    async def _refuse(self, incoming: Incoming, error: RelaxError) -> None:
        operation = incoming.body.get("id")
        if incoming.peer is PeerKind.CLIENT:
            await self._reply(incoming, operation if isinstance(operation, str) else "", error=error)
            return
        body = {"kind": "refused", "code": error.code, "message": error.message, "epoch": self.epoch}
        await self.server.send(incoming.identity, body)

    async def _reply(
        self,
        incoming: Incoming,
        operation: str,
        result: dict[str, Any] | None = None,
        error: RelaxError | None = None,
    ) -> None:
        body: dict[str, Any] = {"kind": "reply", "id": operation, "epoch": self.epoch, "ok": error is None}
        if error is None:
            body["result"] = result or {}
        else:
            body["error"] = {"code": error.code, "message": error.message}
        await self.server.send(incoming.identity, body)

    async def _handle(self, incoming: Incoming) -> None:
        message = parse_for_coordinator(incoming.body, incoming.peer)
        match message:
            case Hello():
                await self._hello(incoming.identity, message)
            case Beat():
                link = self._current(message.node, message.incarnation, message.epoch)
                self._heard(link)
                ack = {"kind": "beat_ack", "epoch": self.epoch, "seq": message.seq}
                await self.server.send(incoming.identity, ack)
                self._statuses(link, message.workers)
            case WorkerEvent():
                link = self._current(message.node, message.incarnation, message.epoch)
                self._heard(link)
                self.record("worker", node=link.name, worker=message.worker.worker_id, what=message.event)
                self._statuses(link, [message.worker])
            case Result():
                self._current(message.node, message.incarnation, message.epoch)
                self.links.resolve(message)
            case GetSnapshot():
                await self._reply(incoming, message.id, {"snapshot": self._snapshot(message.role)})
            case GetState():
                await self._reply(incoming, message.id, state_document(self))
            case StepEnded():
                await self._reply(incoming, message.id, self._step_ended(message))
            case GatewayUp():
                self._endpoint["gateway_url"] = message.url
                self.run_dir.write_json("endpoint.json", self._endpoint)
                self.record("gateway_up", url=message.url)
                await self._reply(incoming, message.id, {"epoch": self.epoch})
            case Stop():
                self.request_stop(message.reason or "asked by a client")
                await self._reply(incoming, message.id, {"state": self.run.state})
            case _:
                await self._reply(incoming, message.id, {"epoch": self.epoch, "state": self.run.state})

    async def _hello(self, identity: bytes, hello: Hello) -> None:
        link = self.links.nodes.get(hello.node)
        if link is None:
            raise UnknownNode(f"node {hello.node!r} is not part of this run's allocation")
        if hello.attempt != self.run_dir.attempt:
            raise StaleAttempt(f"hello of attempt {hello.attempt}, this is attempt {self.run_dir.attempt}")
        fresh = hello.incarnation != link.incarnation
        replaced = fresh and link.incarnation != ""
        link.identity, link.incarnation = identity, hello.incarnation
        link.report, link.step_ended, link.lost = hello.report, None, False
        link.workers = {}
        welcome = {
            "kind": "welcome",
            "epoch": self.epoch,
            "beat_seconds": self.config.control.beat_seconds,
            "silence_seconds": self.config.control.silence_seconds,
        }
        await self.server.send(identity, welcome)
        if fresh:
            self.record("hello", node=link.name, incarnation=hello.incarnation, replaced=replaced)
        if replaced and not hello.workers:
            # A sidecar sweeps what its predecessor left before it says hello, so nothing of ours runs there now.
            self._node_emptied(link, Evidence.CONFIRMED_EXIT, f"the sidecar of {link.name} was replaced")
        self._heard(link)
        self._statuses(link, hello.workers)
        self.nodes_changed.set()

    def _current(self, node: str, incarnation: str, epoch: str) -> NodeLink:
        if epoch != self.epoch:
            raise StaleEpoch(f"message of epoch {epoch or 'none'}, this is {self.epoch}; say hello again")
        link = self.links.owner_of(node, incarnation)
        if link is None:
            raise StaleIncarnation(f"incarnation {incarnation} of node {node!r} is not the current one")
        return link

    def _heard(self, link: NodeLink) -> None:
        was_silent = link.silent
        link.heard(self.clock())
        if was_silent:
            self.record("heard", node=link.name)
            for manager in self.managers.values():
                manager.on_node_heard(link.name)

    def _statuses(self, link: NodeLink, statuses: list[WorkerStatus]) -> None:
        for status in statuses:
            link.workers[status.worker_id] = status
            replica_id, _, rank = status.worker_id.rpartition("#")
            for manager in self.managers.values():
                if (replica_id, int(rank) if rank.isdigit() else -1) in manager.workers_on(link.name):
                    manager.on_status(replica_id, int(rank), status)

    def _step_ended(self, message: StepEnded) -> dict[str, Any]:
        link = self.links.nodes.get(message.node)
        if link is None:
            raise UnknownNode(f"node {message.node!r} is not part of this run's allocation")
        again = self.run.state in SERVING and not self.stop_wanted.is_set()
        link.step_ended = f"the step of node {link.name} ended with code {message.returncode}"
        link.lost = not again
        link.identity = None
        self.record("step_ended", node=link.name, returncode=message.returncode, proof=message.proof, again=again)
        proven = message.proof in (StepProof.CGROUP, StepProof.SWEPT)
        evidence = Evidence.STEP_ENDED_WITH_CGROUP if proven else None
        if link.lost:
            self.links.fail_pending(link, NodeGone(link.step_ended))
        self._node_emptied(link, evidence, link.step_ended)
        self.nodes_changed.set()
        return {"again": again}

    def _node_emptied(self, link: NodeLink, evidence: Evidence | None, reason: str) -> None:
        for manager in self.managers.values():
            manager.on_step_ended(link.name, evidence, reason)

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the run; the first reason stays."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.record("stop", reason=reason)
        self.stop_wanted.set()

    # --- publishing -----------------------------------------------------------------------------------------

    def _snapshot(self, role_name: str) -> dict[str, Any]:
        roles = {str(role): role for role in Role}
        snapshot = self.registry.snapshot(roles[role_name]) if role_name in roles else None
        if snapshot is None:
            served = ", ".join(self.registry.revisions()) or "none yet"
            raise UnknownRole(f"role {role_name[:64]!r} is not published here; published: {served}")
        return to_json(snapshot)

    def publish_all(self) -> None:
        """Publish every role of the plan as it stands."""
        for role in self.plan.roles:
            routing = RoutingSpec(
                role.default_model, role.route_key_map, role.aliases, Policy(role.policy), policy_revision=0
            )
            entries = [self.managers[role.role, model.name].entry() for model in role.models]
            self._queue(self.registry.publish(role.role, routing, entries))

    def _publish_replica(self, manager: InferenceManager, replica: Replica) -> None:
        if manager.is_public(replica.engine_id):
            model = manager.model
            self._queue(self.registry.publish_engine(model.role, model.name, replica.published()))

    def _queue(self, update: Update | None) -> None:
        if update is not None and not self._outbox.full():  # a lost update is a gap, and a gap is a resync
            self._outbox.put_nowait(update)

    async def _publish(self) -> None:
        while True:
            update = await self._outbox.get()
            await self.server.publish(f"snap.{update.role}", {"kind": "update", **update.to_json()})

    async def _pulse(self) -> None:
        """Heartbeats on discovery, and a look at who has fallen silent."""
        control, sequence = self.config.control, 0
        while True:
            sequence += 1
            beat = {"kind": "heartbeat", "epoch": self.epoch, "seq": sequence, "state": str(self.run.state)}
            await self.server.publish(BEAT_TOPIC, {**beat, "revisions": self.registry.revisions()})
            now = self.clock()
            for link in self.links.nodes.values():
                if link.identity is None or link.silent or now - link.last_heard <= control.silence_seconds:
                    continue
                link.silent = True
                self.record("silent", node=link.name, seconds=round(now - link.last_heard, 1))
                for manager in self.managers.values():
                    manager.on_node_silent(link.name)
            await asyncio.sleep(control.beat_seconds)

    def follow_replicas(self) -> None:
        """Tell the run's machine whether everything the plan wants is there."""
        complete = all(manager.complete for manager in self.managers.values())
        if complete and self.run.state is RunState.DEGRADED:
            self.advance(RunEvent.ALL_READY)
        elif not complete and self.run.state is RunState.READY:
            self.advance(RunEvent.PART_LOST, "a replica is missing")

    @property
    def gateway_url(self) -> str | None:
        """Where the gateway listens, once it said so."""
        return self._endpoint.get("gateway_url")

    @property
    def over(self) -> bool:
        """Whether the run has reached its end."""
        return self.run.state in TERMINAL


class UnknownNode(ProtocolError):
    """A node that the allocation does not have."""

    code = "unknown_node"


class UnknownRole(ProtocolError):
    """A role that this run does not publish."""

    code = "unknown_role"


class StaleAttempt(ProtocolError):
    """A sidecar of an earlier attempt."""

    code = "stale_attempt"


class StaleEpoch(ProtocolError):
    """A message of another coordinator's epoch."""

    code = "stale_epoch"


class StaleIncarnation(ProtocolError):
    """A sidecar that has been replaced."""

    code = "stale_incarnation"


__all__ = ["Coordinator"]
