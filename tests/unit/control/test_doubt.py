"""Suspect engines, lost nodes and moves of roles, as the coordinator handles them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control.lifecycle import walk
from relax_slurm.core.run import RunState
from relax_slurm.errors import RelaxError
from tests.unit.control.stage import FAST, Stage, config_of, on_stage, run, until

FIRST = "m/replica-0"


async def ready(stage: Stage) -> asyncio.Task[dict[str, Any]]:
    """Walk in the background until READY."""
    stage.enter_all()
    walking = asyncio.create_task(walk(stage.coordinator))
    await until(lambda: stage.coordinator.run.state is RunState.READY or walking.done())
    assert not walking.done(), walking.result()
    return walking


async def replica(stage: Stage, name: str = FIRST) -> dict[str, Any]:
    state = await stage.client.request("get_state")
    return next(row for row in state["replicas"] if row["replica"] == name)


async def reached(stage: Stage, *, name: str = FIRST, **wanted: Any) -> dict[str, Any]:
    """Wait until a replica's row has these values."""
    async with asyncio.timeout(15):
        while True:
            row = await replica(stage, name)
            if {key: row[key] for key in wanted} == wanted:
                return row
            await asyncio.sleep(0.02)


async def end(stage: Stage, walking: asyncio.Task[dict[str, Any]]) -> None:
    await stage.client.request("stop", reason="enough")
    assert (await walking)["state"] == "STOPPED"


def test_a_suspect_worker_in_a_beat_fences_its_replica_until_it_is_well(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            stage.actors.suspect.add(f"{FIRST}#0")
            row = await reached(stage, state="UNKNOWN", generation=1)
            assert (row["reason"], row["release_proven"]) == ("it did not answer", False)
            snapshot = (await stage.client.request("get_snapshot", role="rollout"))["snapshot"]
            eligible = [engine["direct_eligible"] for engine in snapshot["models"]["m"]["engines"]]
            assert eligible == [False, True, True, True]
            stage.actors.suspect.clear()
            assert (await reached(stage, state="READY"))["reason"] == ""
            assert len(stage.actors.methods("open_admission")) == 4, "its door was never closed"
            await end(stage, walking)

    run(scenario)


def test_a_lost_node_fails_its_replicas_and_they_are_built_again_when_it_is_heard(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, config_of(control=FAST | {"lost_seconds": 0.9})) as stage:
            walking = await ready(stage)
            stage.sidecars["p-0"].mute = True
            row = await reached(stage, state="STOPPING")
            assert "p-0 has been silent" in row["reason"]
            assert row["release_proven"] is False
            assert (await replica(stage, "m/replica-2"))["state"] == "READY"
            assert len(await stage.events("lost")) == 1
            stage.sidecars["p-0"].mute = False
            await reached(stage, state="READY", generation=2)
            await end(stage, walking)

    run(scenario)


def test_a_role_without_memory_saver_and_a_role_that_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            with pytest.raises(RelaxError, match="memory saver"):
                await stage.client.request("move_role", role="rollout", method="offload")
            with pytest.raises(RelaxError, match="no such role"):
                await stage.client.request("move_role", role="teacher", method="offload")
            await end(stage, walking)

    run(scenario)
