"""Offload and onload of a whole role on request: one at a time per role, the outcome kept for whoever asks.

This is the lever, not the lease: who may pull it when is decided by whoever sends the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relax_slurm.control.manager import InferenceManager
from relax_slurm.core.engine_spec import OperationRefused
from relax_slurm.core.plan import RolePlan
from relax_slurm.errors import RelaxError


class MoveState(StrEnum):
    """How a move stands."""

    RUNNING = "RUNNING"
    """Under way."""
    DONE = "DONE"
    """Every replica is where it was wanted."""
    WEIGHTS_PENDING = "WEIGHTS_PENDING"
    """Memory is back, and some replicas wait for weights; not a failure, and not routable."""
    FAILED = "FAILED"
    """At least one replica is not; the error names it."""


@dataclass(slots=True)
class Move:
    """One offload or onload of a role."""

    operation: str
    kind: str
    state: MoveState = MoveState.RUNNING
    error: str = ""
    pending: tuple[str, ...] = ()
    """Replicas that wait for weights."""

    def as_json(self) -> dict[str, Any]:
        """As the state document shows it."""
        return {
            "operation": self.operation,
            "kind": self.kind,
            "state": str(self.state),
            "error": self.error,
            "pending": list(self.pending),
        }


class Moves:
    """The last move of every role."""

    def __init__(
        self, record: Callable[..., None], spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        self._record, self._spawn = record, spawn
        self._last: dict[str, Move] = {}

    def begin(self, role: RolePlan, managers: list[InferenceManager], kind: str, operation: str) -> Move:
        """Start a move. `OperationRefused` while another one runs, or when the role keeps its memory by plan."""
        name = str(role.role)
        if not role.offload:
            raise OperationRefused(
                f"{name}: {kind} is refused, its engines were started without a memory saver; set roles.{name}.offload"
            )
        last = self._last.get(name)
        if last is not None and last.state is MoveState.RUNNING:
            raise OperationRefused(f"{name}: {kind} is refused, {last.kind} {last.operation} is under way; wait for it")
        move = self._last[name] = Move(operation, kind)
        self._record("move", role=name, **move.as_json())
        self._spawn(self._run(name, managers, move))
        return move

    def running(self, role: str) -> bool:
        """Whether a move of the role is under way."""
        last = self._last.get(role)
        return last is not None and last.state is MoveState.RUNNING

    async def _run(self, name: str, managers: list[InferenceManager], move: Move) -> None:
        works = [manager.offload() if move.kind == "offload" else manager.onload() for manager in managers]
        results = await asyncio.gather(*works, return_exceptions=True)
        failed = [result for result in results if isinstance(result, RelaxError)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, RelaxError):
                raise result
        move.pending = tuple(each for result in results if isinstance(result, tuple) for each in result)
        move.error = "; ".join(error.message for error in failed)
        waits = MoveState.WEIGHTS_PENDING if move.pending else MoveState.DONE
        move.state = MoveState.FAILED if failed else waits
        self._record("move", role=name, **move.as_json())

    def as_json(self) -> dict[str, Any]:
        """The last move of each role that had one."""
        return {name: move.as_json() for name, move in self._last.items()}
