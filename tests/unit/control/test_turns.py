"""Roles that take turns, asked over the wire of a coordinator with sidecars that do what a test says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.client.lifecycle import LifecycleClient
from relax_slurm.control import manager
from relax_slurm.control.lifecycle import walk
from relax_slurm.core.lifecycle_errors import BatchFailed, BatchPending, NoSuchBatch, NotRecovered, NotSleeping
from relax_slurm.core.plan import Role
from relax_slurm.core.replica_events import Event, EventKind, Evidence, State
from relax_slurm.core.run import RunState
from relax_slurm.errors import DeadlineExceeded, RecoveryRequired, RelaxError
from tests.unit.control.stage import Stage, bad, config_of, defer_config, on_stage, run, until


async def up(stage: Stage) -> tuple[LifecycleClient, asyncio.Task[dict[str, Any]]]:
    """A run whose roles all sleep."""
    stage.enter_all()
    walking = asyncio.create_task(walk(stage.coordinator))
    await until(lambda: stage.coordinator.run.state is RunState.READY or walking.done())
    assert not walking.done(), walking.result()
    return LifecycleClient(stage.client), walking


async def leases(stage: Stage) -> dict[str, str]:
    return dict((await stage.client.request("get_state"))["leases"])


async def generated(lifecycle: LifecycleClient, batch: int) -> None:
    await lifecycle.begin_batch(batch)
    await lifecycle.offload_rollout(batch)
    await lifecycle.acknowledge_rollout_offloaded(batch)


def test_a_batch_over_the_wire(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            asleep = dict.fromkeys(("rollout", "genrm", "teacher", "training"), "SLEEPING")
            assert await leases(stage) == asleep
            waiting = asyncio.create_task(lifecycle.wait_committed(0))
            await generated(lifecycle, 0)
            for role in ("genrm", "teacher"):
                await lifecycle.activate(role, 0)
                assert (await leases(stage))[role] == "ACTIVE"
                with pytest.raises(NotSleeping, match=f"{role} is ACTIVE"):
                    await lifecycle.commit_batch(0)
                await lifecycle.deactivate(role, 0)
            await lifecycle.begin_student_scoring(0)
            await lifecycle.onload_rollout(0)
            await lifecycle.offload_rollout(0)
            await lifecycle.acknowledge_rollout_offloaded(0)
            assert not waiting.done()
            await lifecycle.commit_batch(0)
            await waiting
            async with lifecycle.training(0):
                assert await leases(stage) == asleep | {"training": "ACTIVE"}
                with pytest.raises(NotSleeping, match="training is ACTIVE"):
                    await lifecycle.begin_batch(1)
            await generated(lifecycle, 1)
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_a_judge_that_does_not_come_ends_every_wait_and_is_recovered_by_evidence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            await generated(lifecycle, 0)
            waiting = [asyncio.create_task(lifecycle.wait_committed(number)) for number in (0, 3)]
            stage.actors.by_method["onload"] = lambda args: bad("recovery_required", "in doubt")
            stage.actors.by_method["start_worker"] = lambda args: bad("startup_failed", "no memory")
            with pytest.raises(RecoveryRequired, match="activate genrm of batch 0"):
                await lifecycle.activate("genrm", 0)
            for each in waiting:
                with pytest.raises(BatchFailed, match="activate genrm of batch 0"):
                    await each
            assert (await leases(stage))["genrm"] == "BLOCKED"
            with pytest.raises(BatchFailed, match="recover"):
                await lifecycle.begin_batch(1)
            del stage.actors.by_method["onload"], stage.actors.by_method["start_worker"]
            async with asyncio.timeout(20):
                while True:  # until the engine's end is proven
                    try:
                        await lifecycle.recover()
                    except NotRecovered:
                        await asyncio.sleep(0.02)
                    else:
                        break
            await generated(lifecycle, 1)
            await lifecycle.activate("genrm", 1)
            await lifecycle.deactivate("genrm", 1)
            await lifecycle.commit_batch(1)
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_who_stands_on_trainings_gpus_comes_back_also_when_the_step_fails(tmp_path: Path) -> None:
    model = {"model_path": "sim/m", "gpus": 2}
    config = config_of(
        placement="split",
        training={"pool": "p", "gpus": 4},
        roles={
            "rollout": {"pool": "p", "models": {"policy": model}},
            "genrm": {"pool": "p", "models": {"judge": model}},
        },
    )

    async def scenario() -> None:
        async with on_stage(tmp_path, config) as stage:
            lifecycle, walking = await up(stage)
            standing = {"rollout": "ACTIVE", "genrm": "ACTIVE", "training": "SLEEPING"}
            turn = dict.fromkeys(("rollout", "genrm"), "SLEEPING") | {"training": "ACTIVE"}
            await lifecycle.begin_batch(0)
            await lifecycle.commit_batch(0)
            async with lifecycle.training(0):
                assert await leases(stage) == turn
            assert await leases(stage) == standing

            # Two processes at once: the last one who leaves brings the roles back, whoever sent them away.
            may_leave = asyncio.Event()

            async def last() -> None:
                async with lifecycle.training(0):
                    await may_leave.wait()

            late = [asyncio.create_task(last()) for _ in range(2)]
            async with lifecycle.training(0):
                await until(lambda: len(stage.coordinator.leases.book.trainers) == 3)
            assert await leases(stage) == turn
            may_leave.set()
            await asyncio.gather(*late)
            assert await leases(stage) == standing

            with pytest.raises(ZeroDivisionError):
                async with lifecycle.training(0):
                    raise ZeroDivisionError
            assert await leases(stage) == standing

            async def train() -> None:
                async with lifecycle.training(0):
                    await asyncio.Event().wait()

            step = asyncio.create_task(train())
            await until(lambda: stage.coordinator.leases.holds("training"))
            step.cancel()
            with pytest.raises(asyncio.CancelledError):
                await step
            assert await leases(stage) == standing

            with pytest.raises(NoSuchBatch, match="batch 1 is not committed"):
                async with lifecycle.training(1):
                    pass
            assert await leases(stage) == standing
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_who_waits_for_a_batch_hears_of_the_end_of_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            with pytest.raises(DeadlineExceeded, match="batch 5 is not committed after"):
                await lifecycle.wait_committed(5, 0.05)
            waiting = asyncio.create_task(lifecycle.wait_committed(5))
            await lifecycle.get_state()
            await asyncio.sleep(0)
            await stage.client.request("stop", reason="enough")
            with pytest.raises((BatchFailed, RelaxError), match=r"the run ends: enough|no answer"):
                await waiting
            await walking

    run(scenario)


def test_the_same_id_again_joins_what_is_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            _, walking = await up(stage)
            asked = [
                asyncio.create_task(stage.client.request("begin_batch", operation_id=name, batch=0))
                for name in ("x", "x", "y")
            ]
            for each in asked[1:]:
                assert (await each)["leases"]["rollout"] == "ACTIVE"
            asked[0].cancel()  # its answer went to the one who asked again
            onloads = len(stage.actors.methods("onload"))
            await stage.client.request("begin_batch", batch=0)
            assert len(stage.actors.methods("onload")) == onloads
            with pytest.raises(RelaxError, match="'x' was begin_batch of batch 0"):
                await stage.client.request("commit_batch", operation_id="x", batch=0)
            await stage.client.request("stop")
            await walking

    run(scenario)


@pytest.mark.parametrize("fields", [{"batch": -1}, {"batch": "x"}, {"batch": None}, {}])
def test_batches_are_numbers(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            _, walking = await up(stage)
            with pytest.raises(RelaxError, match="batch"):
                await stage.client.request("begin_batch", **fields)
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_what_waits_to_be_built_again_is_not_built_once_the_lease_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            policy = stage.coordinator.managers[Role.ROLLOUT, "policy"]
            await lifecycle.begin_batch(0)
            monkeypatch.setattr(manager, "rebuild_pause", lambda restarts: 3600.0)
            for _ in range(2):  # the first time it is built again at once, the second time after a pause
                await until(lambda: policy.replicas[0].state is State.READY)
                ended = Event(EventKind.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT)
                policy.feed("policy/replica-0", ended)
            assert policy.replicas[0].state is State.GONE
            await lifecycle.fail_batch(0, "no producer")
            await lifecycle.recover()
            monkeypatch.setattr(manager, "rebuild_pause", lambda restarts: 0.0)
            starts = len(stage.actors.methods("start_worker"))
            policy.tick()
            assert policy.replicas[0].state is State.GONE, "its cards may be somebody else's"
            await lifecycle.begin_batch(1)
            assert len(stage.actors.methods("start_worker")) == starts + 1
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_a_move_by_hand_does_not_get_between_leases(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            await lifecycle.begin_batch(0)
            await lifecycle.offload_rollout(0)
            with pytest.raises(RelaxError, match="its lease decides"):
                await stage.client.request("move_role", role="rollout", method="onload")
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_training_ends_with_the_last_who_trains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            await generated(lifecycle, 0)
            await lifecycle.commit_batch(0)
            async with lifecycle.training(0):
                async with lifecycle.training(0):
                    assert len((await lifecycle.get_state())["trainers"]) == 2
                with pytest.raises(NotSleeping, match="training is ACTIVE"):
                    await lifecycle.begin_batch(1)
                with pytest.raises(NotRecovered, match="training has its lease"):
                    await lifecycle.recover()
            assert (await leases(stage))["training"] == "SLEEPING"
            await lifecycle.activate("training", 0)  # by somebody who is killed now
            await lifecycle.deactivate("training", 0)
            await lifecycle.begin_batch(1)
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_an_operator_gives_up_what_a_killed_producer_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            lifecycle, walking = await up(stage)
            await generated(lifecycle, 0)
            await lifecycle.activate("genrm", 0)
            operator = LifecycleClient(stage.client)
            with pytest.raises(BatchPending, match="by somebody else"):
                await operator.begin_batch(0)
            assert await operator.give_up() == 0
            await operator.recover()
            assert set((await leases(stage)).values()) == {"SLEEPING"}
            assert (await operator.get_state())["batch"]["id"] == 0, "the next number is still known"
            assert await operator.give_up() is None
            await operator.begin_batch(1)
            assert await lifecycle.give_up() == 1
            await stage.client.request("stop")
            await walking

    run(scenario)
