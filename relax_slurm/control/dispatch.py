"""Carries out what replicas ask for: each command is a task that ends in one event for the replica it belongs to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.links import CommandFailed, NodeGone, NodeLinks
from relax_slurm.control.replica_commands import METHODS, arguments, failure, success, timeout_seconds
from relax_slurm.control.worker_args import worker_args
from relax_slurm.core.binding import BoundPlan, WorkerBinding
from relax_slurm.core.placement_replicas import FIRST_WEIGHT_VERSION
from relax_slurm.core.plan import ModelPlan, ReplicaPlan, WeightSource
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Command, CommandKind, Event, EventKind
from relax_slurm.core.weights import Weights
from relax_slurm.errors import RecoveryRequired
from relax_slurm.wire.messages import Method


@dataclass(slots=True)
class Slot:
    """One replica of the plan, across its rebuilds."""

    plan: ReplicaPlan
    replica: Replica
    bindings: tuple[WorkerBinding, ...]
    restarts: deque[float] = field(default_factory=deque)
    given_up: str = ""
    """Why it is not built again."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Commands of this replica in flight."""
    stopped_at: float = 0.0
    """When it was last told to stop."""
    started_with: Weights | None = None
    """The model's weights when its engine was last told to start."""
    groups: set[str] = field(default_factory=set)
    """Groups for distributed updates that its present engine has joined."""


class Dispatch:
    """The commands of one model's replicas."""

    def __init__(
        self,
        model: ModelPlan,
        bound: BoundPlan,
        config: RunConfig,
        links: NodeLinks,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        new_id: Callable[[], str],
        feed: Callable[[str, Event], None],
        ended: Callable[[], None],
        run_tag: str,
        memory_saver: bool,
    ) -> None:
        self.bound = bound
        version = str(model.engine_args.get("weight_version", FIRST_WEIGHT_VERSION))
        self.weights = Weights(version, model.model_path)
        """What engines are started with; a static model's never change."""
        self.in_flight = 0
        """Commands without an outcome, of all replicas."""
        self._model, self._config, self._links = model, config, links
        self._spawn, self._new_id, self._feed, self._ended = spawn, new_id, feed, ended
        self._run_tag, self._memory_saver = run_tag, memory_saver

    def send(self, slot: Slot, command: Command) -> None:
        """Begin to carry out a command."""
        task = self._spawn(self._carry_out(slot, slot.replica, command))
        slot.tasks.add(task)
        self.in_flight += 1

        def done(task: asyncio.Task[None]) -> None:
            slot.tasks.discard(task)
            self.in_flight -= 1
            self._ended()

        task.add_done_callback(done)

    def withdraw(self, slot: Slot) -> None:
        """Commands of before must neither be sent again nor have a say any more."""
        for task in slot.tasks - {asyncio.current_task()}:  # the one whose result led here is about to end
            task.cancel()

    async def _carry_out(self, slot: Slot, replica: Replica, command: Command) -> None:
        rank = command.worker or 0
        try:
            value = await self._links.command(
                slot.bindings[rank].node_name,
                METHODS[command.kind],
                self._args(slot, replica, command, rank),
                operation_id=self._new_id(),
                timeout_seconds=timeout_seconds(command.kind, self._config),
            )
            event = self._checked(slot, success(command, rank, value))
        except CommandFailed as error:
            event = failure(rank, error)
        except (NodeGone, RecoveryRequired) as error:
            event = Event(EventKind.FAIL, reason=error.message)
        if slot.replica is replica:  # a rebuilt replica is not told about its predecessor
            self._feed(replica.engine_id, event)

    async def ask_head(
        self, slot: Slot, method: Method, args: dict[str, Any], timeout_seconds: float
    ) -> dict[str, Any]:
        """A command to the head of a replica whose result is for the caller alone; errors are those of `links`."""
        replica = slot.replica
        return await self._links.command(
            slot.bindings[0].node_name,
            method,
            {"worker_id": f"{replica.engine_id}#0", "generation": replica.generation, **args},
            operation_id=self._new_id(),
            timeout_seconds=timeout_seconds,
        )

    def _checked(self, slot: Slot, event: Event) -> Event:
        """An engine that came up serves only if it was started with the model's weights."""
        if event.kind is not EventKind.WORKER_READY or event.worker != 0:
            return event
        now = self.weights
        if now.path is not None and slot.started_with == now:
            return event
        reason = f"weights {now.version!r} came from the trainer and are on no disk; it waits for the next update"
        return replace(event, weights_valid=False, reason=reason)

    def _args(self, slot: Slot, replica: Replica, command: Command, rank: int) -> dict[str, Any]:
        args = arguments(command, f"{replica.engine_id}#{rank}", replica.generation, self._config)
        changing = self._model.weight_source is not WeightSource.STATIC
        if command.kind is CommandKind.ONLOAD and rank == 0 and changing and self.weights.path is not None:
            args["weights"] = {"path": self.weights.path, "version": self.weights.version}
        if command.kind is CommandKind.START_WORKER:
            if rank == 0:
                slot.started_with = self.weights
                slot.groups.clear()
            args |= worker_args(
                self._model,
                slot.started_with or self.weights,
                slot.plan,
                rank,
                self.bound,
                self._config,
                run_tag=self._run_tag,
                memory_saver=self._memory_saver,
                generation=replica.generation,
            )
        return args
