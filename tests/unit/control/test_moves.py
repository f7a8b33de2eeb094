"""Moves of a role on request: one at a time, and how they end."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from relax_slurm.control.manager import InferenceManager
from relax_slurm.control.moves import Moves, MoveState
from relax_slurm.core.engine_spec import OperationRefused
from relax_slurm.core.plan import Role
from relax_slurm.errors import RecoveryRequired
from tests.unit.control.stage import defer_config, plan_of, run


class FakeManager:
    """Moves when a test says so."""

    def __init__(self, failure: str = "", pending: tuple[str, ...] = ()) -> None:
        self.gate = asyncio.Event()
        self._failure, self._pending = failure, pending

    async def offload(self) -> None:
        await self.gate.wait()
        if self._failure:
            raise RecoveryRequired(self._failure)

    async def onload(self) -> tuple[str, ...]:
        await self.gate.wait()
        return self._pending


@pytest.mark.parametrize(
    ("kind", "manager", "state"),
    [
        ("offload", {}, MoveState.DONE),
        ("offload", {"failure": "still holds"}, MoveState.FAILED),
        ("onload", {"pending": ("m/replica-0",)}, MoveState.WEIGHTS_PENDING),
    ],
)
def test_one_move_at_a_time_and_its_end(kind: str, manager: dict[str, Any], state: MoveState) -> None:
    async def scenario() -> None:
        role = plan_of(defer_config()).role(Role.ROLLOUT)
        assert role is not None
        tasks: list[asyncio.Task[None]] = []

        def spawn(work: Any) -> asyncio.Task[None]:
            tasks.append(asyncio.get_running_loop().create_task(work))
            return tasks[-1]

        moves, fake = Moves(lambda event, **fields: None, spawn), FakeManager(**manager)
        managers = [cast(InferenceManager, fake)]
        move = moves.begin(role, managers, kind, "a")
        assert moves.running("rollout")
        with pytest.raises(OperationRefused, match=f"{kind} a is under way"):
            moves.begin(role, managers, "onload", "b")
        fake.gate.set()
        await asyncio.gather(*tasks)
        assert (move.state, moves.running("rollout")) == (state, False)
        assert moves.as_json()["rollout"]["error"] == manager.get("failure", "")

    run(scenario)
