"""The lifecycle coordinator at work: who waits, what is moved, what comes too late."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from relax_slurm.config.load import load
from relax_slurm.control.leases import LifecycleCoordinator
from relax_slurm.core import placement
from relax_slurm.core.lease import sharing
from relax_slurm.core.lifecycle import Lifecycle, Move, Unproven
from relax_slurm.core.lifecycle_errors import BatchFailed, MoveFailed, MoveTimedOut, NotSleeping
from relax_slurm.core.operations import Ask, Method
from relax_slurm.errors import EngineFailed

M = Method


class FakeMover:
    """Engines that move when a test says so."""

    def __init__(self) -> None:
        self.moves: list[tuple[str, Move]] = []
        self.abandoned: list[str] = []
        self.held: dict[str, tuple[str, ...]] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.failure = ""

    async def move(self, holder: str, move: Move) -> None:
        self.moves.append((holder, move))
        await self.gate.wait()
        if self.failure:
            raise EngineFailed(self.failure)

    def abandon(self, holder: str, reason: str) -> None:
        self.abandoned.append(holder)

    def unproven(self) -> Unproven:
        return self.held


class Stage:
    """A coordinator with fake engines and a short deadline."""

    def __init__(self, seconds: float = 600.0) -> None:
        self.mover = FakeMover()
        self.records: list[dict[str, Any]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        book = Lifecycle(sharing(placement.plan(load("configs/defer.yaml"))), operation_seconds=seconds)
        loop = asyncio.get_running_loop()
        self.of = LifecycleCoordinator(book, self.mover, record=self.record, spawn=self.spawn, clock=loop.time)
        self.spawn(self.of.watch())
        self._ids = 0

    def record(self, event: str, /, **fields: Any) -> None:
        self.records.append({"event": event, **fields})

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def do(self, method: Method, holder: str | None = None, batch: int = 1) -> dict[str, Any]:
        self._ids += 1
        return await self.of.result(self.of.ask(Ask(f"op-{self._ids}", method, batch, holder)))

    async def generated(self) -> None:
        for method in (M.BEGIN_BATCH, M.OFFLOAD_ROLLOUT, M.ACKNOWLEDGE_ROLLOUT_OFFLOADED):
            await self.do(method)


def staged(scenario: Callable[[Stage], Awaitable[None]], seconds: float = 600.0) -> None:
    async def main() -> None:
        stage = Stage(seconds)
        try:
            async with asyncio.timeout(60):
                await scenario(stage)
        finally:
            await stage.close()

    asyncio.run(main())


def test_a_request_ends_when_the_engines_have_moved() -> None:
    async def scenario(stage: Stage) -> None:
        stage.mover.gate.clear()
        asked = asyncio.create_task(stage.do(M.BEGIN_BATCH))
        waiting = asyncio.create_task(stage.of.committed(1, 60.0))
        while not stage.mover.moves:
            await asyncio.sleep(0)
        assert stage.of.state()["leases"]["rollout"] == "ACTIVE"
        assert not asked.done()
        stage.mover.gate.set()
        assert (await asked)["batch"] == {"id": 1, "state": "PENDING"}
        await stage.do(M.OFFLOAD_ROLLOUT)
        await stage.do(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
        assert not waiting.done()
        await stage.do(M.COMMIT_BATCH)
        assert (await waiting)["state"] == "COMMITTED"
        assert stage.mover.moves == [("rollout", Move.ONLOAD), ("rollout", Move.OFFLOAD)]
        changes = [
            (each["holder"], each["before"], each["after"]) for each in stage.records if each["event"] == "lease"
        ]
        assert changes == [("rollout", "SLEEPING", "ACTIVE"), ("rollout", "ACTIVE", "SLEEPING")]

    staged(scenario)


def test_a_failed_move_wakes_everyone_and_is_cleaned_up() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.generated()
        waiting = [asyncio.create_task(stage.of.committed(number, 60.0)) for number in (1, 2)]
        stage.mover.failure = "judge/replica-0 is FAILED"
        with pytest.raises(MoveFailed, match="activate genrm of batch 1 failed: judge/replica-0 is FAILED"):
            await stage.do(M.ACTIVATE, "genrm")
        for each in waiting:
            with pytest.raises(BatchFailed, match="judge/replica-0"):
                await each
        assert stage.mover.abandoned == ["genrm"]
        assert stage.of.state()["leases"]["genrm"] == "BLOCKED"

    staged(scenario)


def test_who_is_too_slow_is_blocked_and_stays_so() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.generated()
        stage.mover.gate.clear()
        with pytest.raises(MoveTimedOut, match=r"did not end within 1 s"):
            await stage.do(M.ACTIVATE, "genrm")
        assert stage.mover.abandoned == ["genrm"]
        stage.mover.gate.set()
        while not any(each.get("late") for each in stage.records):
            await asyncio.sleep(0.01)
        assert stage.of.state()["leases"]["genrm"] == "BLOCKED"
        stage.mover.held = {"genrm": ("judge/replica-0",)}
        with pytest.raises(Exception, match="no release is proven of judge/replica-0"):
            await stage.do(M.RECOVER, batch=0)
        stage.mover.held = {}
        assert set((await stage.do(M.RECOVER, batch=0))["leases"].values()) == {"SLEEPING"}

    staged(scenario, seconds=1.0)


def test_a_wait_has_an_end_of_its_own() -> None:
    async def scenario(stage: Stage) -> None:
        assert await stage.of.committed(1, 0.05) == {"batch": 1, "state": "PENDING"}

    staged(scenario)


def test_the_evidence_of_the_moment_counts() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.generated()
        stage.mover.held = {"rollout": ("policy/replica-0",)}
        with pytest.raises(NotSleeping, match="no release is proven of policy/replica-0"):
            await stage.do(M.ACTIVATE, "genrm")
        assert stage.of.state()["leases"]["genrm"] == "SLEEPING"

    staged(scenario)


def test_two_who_ask_for_the_same_move_it_once() -> None:
    async def scenario(stage: Stage) -> None:
        await stage.generated()
        await asyncio.gather(*(stage.do(M.ACTIVATE, "teacher") for _ in range(5)))
        assert stage.mover.moves.count(("teacher", Move.ONLOAD)) == 1

    staged(scenario)
