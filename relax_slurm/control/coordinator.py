"""The coordinator: one loop, the only writer of replica, registry and run state (docs/architecture.md, Processes).

`control.inbox` takes messages in; `control.lifecycle` walks the run from binding to its end; `control.manager` owns the
replicas; `control.publisher` says what became of them.
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
from relax_slurm.control.event_log import EventLog
from relax_slurm.control.external import ExternalEngines
from relax_slurm.control.head_ports import head_ports
from relax_slurm.control.hooks import Hooks
from relax_slurm.control.inbox import Inbox
from relax_slurm.control.leases import LifecycleCoordinator
from relax_slurm.control.links import NodeLink, NodeLinks
from relax_slurm.control.manager import InferenceManager
from relax_slurm.control.managers import Managers
from relax_slurm.control.moves import Moves
from relax_slurm.control.node_reports import bind_nodes
from relax_slurm.control.publisher import Publisher
from relax_slurm.control.refusals import (
    NotAsBound,
    StaleAttempt,
    StaleEpoch,
    StaleIncarnation,
    UnknownNode,
)
from relax_slurm.control.role_mover import RoleMover
from relax_slurm.control.router_program import RouterProgram
from relax_slurm.control.routers import ModelRouter, Routers
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.weights import WeightOperations
from relax_slurm.core.binding import BoundPlan
from relax_slurm.core.engine_spec import OperationRefused
from relax_slurm.core.evidence import StepProof
from relax_slurm.core.lease import sharing
from relax_slurm.core.lifecycle import Lifecycle
from relax_slurm.core.operations import Ask, Method, Operation
from relax_slurm.core.plan import InferencePlacementPlan, Role, RouteMode
from relax_slurm.core.registry import Registry
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Evidence
from relax_slurm.core.run import SERVING, TERMINAL, Run, RunEvent, RunState
from relax_slurm.errors import BindingMismatch, EngineFailed, StartupFailed
from relax_slurm.wire.lifecycle_messages import LifecycleAsk
from relax_slurm.wire.messages import Beat, Hello, MoveRole, Result, StepEnded, Stop, WorkerStatus
from relax_slurm.wire.messages import Event as WorkerEvent
from relax_slurm.wire.server import ControlServer

log = logging.getLogger(__name__)
PULSE_SECONDS = 1.0
"""Time between two heartbeats on discovery, whatever the sidecars' beat is."""


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
        self.run = Run()
        self.bound: BoundPlan | None = None
        self.managers = Managers()
        self.routers = Routers()
        self.stop_reason: str | None = None
        self.stop_wanted = asyncio.Event()
        self.nodes_changed = asyncio.Event()
        self.fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.server = server
        self.links = NodeLinks(allocation.node_names, self.epoch, server.send, clock)
        self.publisher = Publisher(self.epoch, server)
        self.events = EventLog(run_dir.path)
        self.hooks = Hooks(self._publish_replica, self.record, self.spawn, clock, new_id, self._may_run)
        self.moves = Moves(self.record, self.spawn)
        seconds = config.control.operation_seconds
        self.leases = LifecycleCoordinator(
            Lifecycle(sharing(plan), operation_seconds=seconds),
            RoleMover(self.managers, self.routers, seconds=seconds),
            record=self.record,
            spawn=self.spawn,
            clock=clock,
        )
        self._endpoint = endpoint
        self.externals = ExternalEngines(
            plan,
            seconds=config.control.external_seconds,
            publish=self._publish_external,
            record=self.record,
            spawn=self.spawn,
        )
        self.weights = WeightOperations(self.managers, self.routers, self.hooks, config, publish=self.publish_all)
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbox = Inbox(self)

    # --- tasks ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write down where we are, then listen, publish and watch for silence."""
        self.run_dir.write_json("endpoint.json", self._endpoint)
        watching = (self._pulse(), self._watch(), self.leases.watch())
        for work in (self._inbox.run(), self.publisher.run(), *watching, self.events.run()):
            self.spawn(work)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run as a task; an exception in it ends the run instead of vanishing."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a task of the coordinator failed", exc_info=fault)
            self._fail(fault)

    def _fail(self, error: BaseException) -> None:
        if not self.fatal.done():
            self.fatal.set_exception(error)
            self.fatal.exception()  # seen: whoever walks the run may be past the point of asking

    async def close(self) -> None:
        """Cancel every task, write the last events and close the sockets."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.events.flush()
        await self.server.aclose()

    def record(self, event: str, /, **fields: Any) -> None:
        """One line in events.jsonl."""
        self.events.add({"event": event, "epoch": self.epoch, **fields})

    def advance(self, event: RunEvent, reason: str = "") -> None:
        """Move the run's state machine and write the change down."""
        before = self.run.state
        after = self.run.apply(event, reason)
        if after is not before:
            self.record("run", before=before, after=after, cause=event, reason=reason)
            log.info("run %s -> %s %s", before, after, reason)

    # --- sidecars -------------------------------------------------------------------------------------------

    async def on_hello(self, identity: bytes, hello: Hello) -> None:
        """A sidecar introduces itself, for the first time or again."""
        link = self._planned(hello.node)
        if hello.attempt != self.run_dir.attempt:
            raise StaleAttempt(f"hello of attempt {hello.attempt}, this is attempt {self.run_dir.attempt}")
        if hello.incarnation in link.former:
            raise StaleIncarnation(f"sidecar {hello.incarnation} of node {link.name!r} was replaced or has ended")
        fresh = hello.incarnation != link.incarnation
        replaced = fresh and (link.incarnation != "" or bool(link.former))
        if fresh:
            self._rebind(link, hello.report)
            self.links.retire(link, "its sidecar was replaced")
            link.incarnation = hello.incarnation
            self.record("hello", node=link.name, incarnation=hello.incarnation, replaced=replaced)
        link.report, link.step_ended, link.lost = hello.report, None, False
        if replaced:
            # A sidecar sweeps what its predecessor left before it says hello: only what it names runs there now. First
            # of all, because a command that waits for a sidecar must not bring up what is said to have ended.
            keep = frozenset(status.worker_id for status in hello.workers)
            reason = f"the sidecar of {link.name} was replaced"
            for manager in self.managers.on_node(link.name):
                manager.on_node_emptied(link.name, Evidence.CONFIRMED_EXIT, reason, keep)
        welcome = {
            "kind": "welcome",
            "epoch": self.epoch,
            "beat_seconds": self.config.control.beat_seconds,
            "silence_seconds": self.config.control.silence_seconds,
        }
        await self.server.send(identity, welcome)
        await self.links.follow(link, identity)
        self._heard(link)
        self._statuses(link, hello.workers)
        self.nodes_changed.set()

    def _rebind(self, link: NodeLink, report: dict[str, Any]) -> None:
        """A sidecar that comes after the binding: what is started from now on uses what it reports."""
        if self.bound is None:
            return
        reports = {name: other.report for name, other in self.links.nodes.items()} | {link.name: report}
        try:
            bound = bind_nodes(self.plan, self.allocation, self.config, reports, self.record)
        except BindingMismatch as error:
            self.record("not_as_bound", node=link.name, rows=error.rows)
            raise NotAsBound(f"node {link.name}: {error.message}") from None
        if bound != self.bound:
            self.record("bound_again", node=link.name)
            self.bound = bound
            self.run_dir.write_json("bound.json", bound.to_json())
            for manager in self.managers.values():
                manager.rebind(bound)

    def _planned(self, node: str) -> NodeLink:
        link = self.links.nodes.get(node)
        if link is None:
            raise UnknownNode(f"node {node!r} is not part of this run's allocation")
        return link

    def current(self, node: str, incarnation: str, epoch: str) -> NodeLink:
        """The link of a message; `StaleEpoch` or `StaleIncarnation` when it is not from the sidecar that counts now."""
        if epoch != self.epoch:
            raise StaleEpoch(f"message of epoch {epoch or 'none'}, this is {self.epoch}; say hello again")
        link = self.links.owner_of(node, incarnation)
        if link is None:
            raise StaleIncarnation(f"incarnation {incarnation} of node {node!r} is not the current one")
        return link

    def on_beat(self, link: NodeLink, beat: Beat) -> None:
        """The sidecar lives, and this is what runs there."""
        self._heard(link)
        self._statuses(link, beat.workers)

    def on_event(self, link: NodeLink, event: WorkerEvent) -> None:
        """One worker changed."""
        self._heard(link)
        self.record("worker", node=link.name, worker=event.worker.worker_id, what=event.event)
        link.workers[event.worker.worker_id] = event.worker
        self.managers.on_status(link.name, event.worker)

    def on_result(self, link: NodeLink, result: Result) -> None:
        """A command is done. It is a sign of life too, and counts as such first."""
        self._heard(link)
        self.links.resolve(link, result)

    def _heard(self, link: NodeLink) -> None:
        was_silent = link.silent
        link.heard(self.clock())
        if was_silent:
            self.record("heard", node=link.name)
            for manager in self.managers.on_node(link.name):
                manager.on_node_heard(link.name)

    def _statuses(self, link: NodeLink, statuses: list[WorkerStatus]) -> None:
        """All workers of the node, as a beat or a hello tells them."""
        link.workers = {status.worker_id: status for status in statuses}
        for status in statuses:
            self.managers.on_status(link.name, status)

    def on_step_ended(self, message: StepEnded) -> dict[str, Any]:
        """The supervisor says that a node's step is over; the answer tells whether it shall start another."""
        link = self._planned(message.node)
        again = not message.final and self.run.state in SERVING and not self.stop_wanted.is_set()
        link.step_ended = f"the step of node {link.name} ended with code {message.returncode}"
        link.lost = not again
        self.record("step_ended", node=link.name, returncode=message.returncode, proof=message.proof, again=again)
        self.links.retire(link, link.step_ended)
        proven = message.proof in (StepProof.CGROUP, StepProof.SWEPT)
        evidence = Evidence.STEP_ENDED_WITH_CGROUP if proven else None
        for manager in self.managers.on_node(link.name):
            manager.on_node_emptied(link.name, evidence, link.step_ended)
        self.nodes_changed.set()
        return {"again": again}

    # --- the run --------------------------------------------------------------------------------------------

    def on_gateway(self, url: str) -> None:
        """A gateway listens."""
        self._endpoint["gateway_url"] = url
        self.run_dir.write_json("endpoint.json", self._endpoint)
        self.record("gateway_up", url=url)

    def on_move(self, message: MoveRole) -> dict[str, Any]:
        """Offload or onload a role; answers at once, the state document tells how it ends."""
        role = next((role for role in self.plan.roles if role.role == message.role), None)
        if role is None or not role.pool or self.run.state not in (RunState.READY, RunState.DEGRADED):
            none = "the run has no such role with engines of its own"
            where = none if role is None or not role.pool else f"the run is {self.run.state}"
            raise OperationRefused(f"{message.role}: {message.method} is refused, {where}; wanted READY or DEGRADED")
        if self.leases.book.sharing[str(role.role)].deferred or not self.leases.holds(str(role.role)):
            raise OperationRefused(f"{message.role}: {message.method} is refused, its lease decides where it is")
        managers = [self.managers[role.role, model.name] for model in role.models]
        return self.moves.begin(role, managers, message.method, message.id).as_json()

    def _may_run(self, role: str) -> bool:
        return role not in self.leases.book.leases or self.leases.book.may_run(role)

    def on_lifecycle(self, message: LifecycleAsk) -> Operation:
        """A lease or a batch shall change; the operation tells when it has."""
        if self.run.state not in (RunState.READY, RunState.DEGRADED):
            raise OperationRefused(f"{message.kind} is refused, the run is {self.run.state}; wanted READY or DEGRADED")
        moved = [holder.name for holder in self.leases.book.sharing.holders if self.moves.running(holder.name)]
        if moved and message.kind != "fail_batch":
            raise OperationRefused(f"{message.kind} is refused, a move of {', '.join(moved)} is under way; wait for it")
        role = message.holder or "rollout"
        busy = [name for (owner, name), manager in self.managers.items() if owner == role and manager.updating]
        if busy and message.kind not in ("fail_batch", "commit_batch", "acknowledge_rollout_offloaded"):
            raise OperationRefused(f"{message.kind} is refused, weights of {', '.join(busy)} are being updated; wait")
        ask = Ask(message.id, Method(message.kind), message.batch, message.holder, message.error, message.member)
        return self.leases.ask(ask)

    def on_stop(self, message: Stop) -> None:
        """A client wants the end, or the supervisor cannot go on."""
        reason = message.reason or "asked by a client"
        if message.failed:
            self.fail_run(reason)
        else:
            self.request_stop(reason)

    def fail_run(self, reason: str) -> None:
        """End the run as failed: something that it cannot go on without is gone."""
        up = self.run.state in (RunState.READY, RunState.DEGRADED)
        self._fail(EngineFailed(reason) if up else StartupFailed(reason))

    def request_stop(self, reason: str) -> None:
        """Ask for the end of the run; the first reason stays."""
        if self.stop_reason is None:
            self.stop_reason = reason
            self.record("stop", reason=reason)
        self.stop_wanted.set()

    def publish_all(self) -> None:
        """Publish every role of the plan as it stands."""
        for role in self.plan.roles:
            entries = []
            for model in role.models:
                if model.external:
                    entries.append(self.externals.entry(role.role, model.name))
                    continue
                router = self.routers.of(role.role, model.name)
                entries.append(self.managers[role.role, model.name].entry(router.url if router is not None else None))
            self.publisher.publish_role(role, entries)

    def _publish_external(self, role: Role) -> None:
        if self.registry.snapshot(role) is not None:
            self.publish_all()

    def _publish_replica(self, manager: InferenceManager, replica: Replica) -> None:
        role, name = manager.model.role, manager.model.name
        router = self.routers.of(role, name)
        state = None
        if router is not None:
            # First: when this was the last engine, the URL is gone before the engine is.
            worker = manager.router_worker(replica)
            if worker is None:
                router.unwant(replica.engine_id)
            else:
                router.want(worker)
            state = manager.shown_state(router.url)
        if self.registry.snapshot(role) is None:
            pass  # the end of a run that was not published yet; `publish_all` shows everything as it stands
        elif manager.is_public(replica.engine_id):
            self.publisher.publish_engine(role, name, replica.published(), state)
        elif router is not None and state is not None:
            self.publisher.publish_head(role, name, router_url=router.url, state=state)
        self.weights.moved.set()

    def start_routers(self) -> None:
        """Start the router of every model that has one. Call when the managers are there."""
        window = self.plan.ports
        programs = {
            (model.role, model.name): RouterProgram.of(
                model,
                self.config,
                host=self.allocation.head_address,
                ports=head_ports(window.first, window.last),
                logs=self.run_dir.logs,
                key=self.run_dir.engine_key_file.read_text().strip(),
            )
            for role in self.plan.roles
            for model in role.models
            if model.route_mode is RouteMode.SGLANG_ROUTER
        }
        if programs:
            self.routers.start(programs, record=self.record, changed=self._on_router, spawn=self.spawn)

    def _on_router(self, router: ModelRouter) -> None:
        if self.registry.snapshot(router.role) is not None:
            state = self.managers[router.role, router.model].shown_state(router.url)
            self.publisher.publish_head(router.role, router.model, router_url=router.url, state=state)
        self.weights.moved.set()

    async def _pulse(self) -> None:
        """Heartbeats on discovery."""
        while True:
            await self.publisher.heartbeat(str(self.run.state))
            await asyncio.sleep(PULSE_SECONDS)

    async def _watch(self) -> None:
        """A look at who has fallen silent, once a beat."""
        control = self.config.control
        while True:
            await asyncio.sleep(control.beat_seconds)
            now = self.clock()
            for link in self.links.nodes.values():
                quiet = now - link.last_heard
                if link.identity is None or quiet <= control.silence_seconds:
                    continue
                if not link.silent:
                    link.silent = True
                    self.record("silent", node=link.name, seconds=round(quiet, 1))
                    for manager in self.managers.on_node(link.name):
                        manager.on_node_silent(link.name)
                if not link.given_up and quiet > control.lost_seconds:
                    link.given_up = True
                    reason = f"node {link.name} has been silent for {quiet:.0f} s"
                    self.record("lost", node=link.name, seconds=round(quiet, 1))
                    for manager in self.managers.on_node(link.name):
                        manager.on_node_lost(link.name, reason)

    def follow_replicas(self) -> None:
        """Let every manager go on with what had to wait, and tell the run whether everything is there."""
        for manager in self.managers.values():
            manager.tick()
        self.weights.tick()
        if self.leases.book.moving or any(manager.updating for manager in self.managers.values()):
            return  # on their way, not lost
        ours = self.routers.complete and all(manager.complete for manager in self.managers.values())
        complete = ours and self.externals.complete
        if complete and self.run.state is RunState.DEGRADED:
            self.advance(RunEvent.ALL_READY)
        elif not complete and self.run.state is RunState.READY:
            self.advance(RunEvent.PART_LOST, "a replica, a router or an external engine is missing")

    @property
    def registry(self) -> Registry:
        """What is published."""
        return self.publisher.registry

    @property
    def gateway_url(self) -> str | None:
        """Where the gateway listens, once it said so."""
        return self._endpoint.get("gateway_url")

    @property
    def over(self) -> bool:
        """Whether the run has reached its end."""
        return self.run.state in TERMINAL
