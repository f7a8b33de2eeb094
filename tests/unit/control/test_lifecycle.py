"""The walk of a run over real sockets, with sidecars that do what the test tells them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.client.lifecycle import LifecycleClient
from relax_slurm.control import replica_commands
from relax_slurm.control.lifecycle import walk
from relax_slurm.core.plan import Role
from relax_slurm.core.replica_events import State
from relax_slurm.core.run import RunState
from tests.unit.control.stage import Stage, bad, config_of, defer_config, on_stage, run, until, wide_config


async def ready(stage: Stage) -> asyncio.Task[dict[str, Any]]:
    """Walk in the background until READY."""
    walking = asyncio.create_task(walk(stage.coordinator))
    await until(lambda: stage.coordinator.run.state is RunState.READY or walking.done())
    assert not walking.done(), walking.result()
    return walking


def test_from_hello_to_ready_to_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)
            snapshot = (await stage.client.request("get_snapshot", role="rollout"))["snapshot"]
            engines = snapshot["models"]["m"]["engines"]
            assert [engine["state"] for engine in engines] == ["READY"] * 4
            assert len({engine["base_url"] for engine in engines}) == 4
            state = await stage.client.request("get_state")
            assert state["state"] == "READY"
            assert {node["state"] for node in state["nodes"]} == {"UP"}
            assert json.loads((stage.run_dir.path / "bound.json").read_text())["nodes"]
            await stage.client.request("stop", reason="enough")
            outcome = await walking
            assert outcome == {
                "run": "r",
                "attempt": 1,
                "epoch": stage.coordinator.epoch,
                "state": "STOPPED",
                "exit_code": 0,
                "reason": "enough",
                "unproven": [],
            }
            assert all(sidecar.left.is_set() for sidecar in stage.sidecars.values())
            assert len(stage.actors.methods("stop_worker")) == 4

    run(scenario)


def test_a_wrong_binding_starts_nothing_and_sends_everybody_home(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter("p-0")
            stage.enter("p-1", gpus=(0,))
            outcome = await walk(stage.coordinator)
            assert outcome["exit_code"] == 5
            rows = outcome["error"]["detail"]["rows"]
            assert {row["node"] for row in rows} == {"p-1"}
            assert stage.actors.methods("start_worker") == []
            assert all(sidecar.left.is_set() for sidecar in stage.sidecars.values())

    run(scenario)


def test_a_node_that_never_reports_is_a_row_of_the_table(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(
            tmp_path, config_of(control={"bind_seconds": 0.7, "silence_seconds": 0.6, "beat_seconds": 0.1})
        ) as stage:
            stage.enter("p-0")
            outcome = await walk(stage.coordinator)
            assert outcome["exit_code"] == 5
            assert any(row["node"] == "p-1" for row in outcome["error"]["detail"]["rows"])
            assert (await stage.events("reports_missing"))[0]["nodes"] == ["p-1"]

    run(scenario)


def test_a_node_whose_step_is_over_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, config_of(control={"bind_seconds": 60.0})) as stage:
            stage.enter("p-0")
            walking = asyncio.create_task(walk(stage.coordinator))
            answer = await stage.client.request("step_ended", node="p-1", returncode=1, proof="none")
            assert answer == {"again": False}
            assert (await walking)["exit_code"] == 5

    run(scenario)


def test_a_report_that_cannot_be_read_counts_as_none(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter("p-0")
            stage.enter("p-1")
            await until(lambda: stage.coordinator.links.nodes["p-1"].report)
            stage.coordinator.links.nodes["p-1"].report = {"node": "p-1"}
            outcome = await walk(stage.coordinator)
            assert outcome["exit_code"] == 5
            assert (await stage.events("bad_report"))[0]["node"] == "p-1"

    run(scenario)


def test_an_engine_that_does_not_come_up_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:

            def start(args: dict[str, Any]) -> Any:
                if args["worker_id"] == "m/replica-2#0":
                    return bad("exited", "engine ended with exit code 1; its last line is 'no such model'")
                return stage.actors.by_default("", "start_worker", args)

            stage.actors.by_method["start_worker"] = start
            stage.enter_all()
            outcome = await walk(stage.coordinator)
            assert outcome["exit_code"] == 6
            assert "m/replica-2" in outcome["error"]["message"]
            assert "no such model" in outcome["error"]["message"]
            assert outcome["unproven"] == []

    run(scenario)


def test_several_failures_at_once_are_still_one_sentence(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(
            tmp_path,
            config_of(
                pools={"p": {"nodes": 1, "gpus_per_node": 2}},
                roles={
                    "teacher": {
                        "pool": "p",
                        "models": {name: {"model_path": "x", "gpus": 1} for name in ("a", "b")},
                    }
                },
            ),
        ) as stage:
            stage.actors.by_method["start_worker"] = lambda args: bad("exited", f"{args['worker_id']} broke")
            stage.enter_all()
            outcome = await walk(stage.coordinator)
            assert outcome["exit_code"] == 6
            assert "broke" in outcome["error"]["message"]

    run(scenario)


def test_a_stop_while_engines_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.actors.by_method["start_worker"] = lambda _: None
            stage.enter_all()
            walking = asyncio.create_task(walk(stage.coordinator))
            await until(lambda: len(stage.actors.methods("start_worker")) == 4)
            await stage.client.request("stop")
            outcome = await walking
            assert outcome["state"] == "STOPPED"
            assert outcome["exit_code"] == 0

    run(scenario)


def test_an_end_that_nobody_can_prove_is_exit_9(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)
            stuck = "m/replica-0#0"

            def stop(args: dict[str, Any]) -> Any:
                wrong = args["worker_id"] == stuck
                return bad("recovery_required", "pid 7 survives SIGKILL") if wrong else {"ok": True, "value": {}}

            stage.actors.by_method["stop_worker"] = stop
            stage.actors.by_method["shutdown"] = lambda _: {"ok": True, "value": {"unconfirmed": [stuck]}}
            await stage.client.request("stop")
            outcome = await walking
            assert outcome["exit_code"] == 9
            assert outcome["state"] == "FAILED"
            assert outcome["unproven"] == ["m/replica-0"]
            assert "pid 7" in outcome["error"]["message"]

    run(scenario)


def test_what_a_sidecar_says_on_leaving_is_proof_too(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)
            stage.actors.by_method["stop_worker"] = lambda _: bad("recovery_required", "not confirmed")
            await stage.client.request("stop")
            outcome = await walking
            assert outcome["exit_code"] == 0

    run(scenario)


def test_a_sidecar_that_died_leaves_doubt_only_where_nothing_proves_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_commands, "ENDING_SECONDS", 0.5)

    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)
            await stage.sidecars["p-0"].close()
            gone = {"returncode": -9, "final": True}
            assert await stage.client.request("step_ended", node="p-0", proof="none", **gone) == {"again": False}
            await stage.client.request("stop")
            outcome = await walking
            assert outcome["exit_code"] == 9
            assert sorted(outcome["unproven"]) == ["m/replica-0", "m/replica-1"]

    run(scenario)


def test_the_end_of_a_step_under_cgroups_is_proof(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)
            await stage.sidecars["p-0"].close()
            await stage.client.request("step_ended", node="p-0", returncode=-9, proof="cgroup", final=True)
            await until(lambda: stage.coordinator.run.state is RunState.DEGRADED)
            await stage.client.request("stop")
            outcome = await walking
            assert outcome["exit_code"] == 0
            assert outcome["unproven"] == []

    run(scenario)


def test_a_model_without_replicas_that_can_come_back_ends_the_run(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, wide_config()) as stage:
            stage.enter_all()
            walking = await ready(stage)
            await stage.sidecars["p-1"].close()
            await stage.client.request("step_ended", node="p-1", returncode=1, proof="cgroup", final=True)
            outcome = await walking
            assert outcome["exit_code"] == 7
            assert "p-1" in outcome["error"]["message"]

    run(scenario)


def test_deferred_roles_come_up_one_after_the_other_and_sleep(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            stage.enter_all()
            walking = await ready(stage)
            order = [
                (method, args["worker_id"].partition("/")[0])
                for _, method, args in stage.actors.seen
                if method in ("start_worker", "offload")
            ]
            roles = list(dict.fromkeys(name for _, name in order))
            assert order == [(method, name) for name in roles for method in ("start_worker", "offload")]
            state = await stage.client.request("get_state")
            assert set(state["leases"].values()) == {"SLEEPING"}
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_a_deferred_replica_that_dies_asleep_comes_back_with_its_lease_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            stage.enter_all()
            walking = await ready(stage)
            stage.actors.states["judge/replica-0#0"] = "exited"
            judge = stage.coordinator.managers[Role.GENRM, "judge"]
            await until(lambda: judge.replicas[0].state is State.GONE)
            del stage.actors.states["judge/replica-0#0"]
            lifecycle = LifecycleClient(stage.client)
            await lifecycle.begin_batch(0)
            await lifecycle.offload_rollout(0)
            await lifecycle.acknowledge_rollout_offloaded(0)
            assert len(stage.actors.methods("start_worker")) == 3, "the cards are somebody else's"
            await lifecycle.activate("genrm", 0)
            assert len(stage.actors.methods("start_worker")) == 4
            assert (judge.replicas[0].state, judge.replicas[0].generation) == (State.READY, 2)
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_memory_that_is_not_released_stops_the_next_phase(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, defer_config()) as stage:
            stage.actors.by_method["offload"] = lambda _: bad("recovery_required", "GPU 0 still holds memory")
            stage.enter_all()
            outcome = await walk(stage.coordinator)
            assert outcome["exit_code"] == 9
            assert "GPU 0 still holds memory" in outcome["error"]["message"]
            assert len(stage.actors.methods("start_worker")) == 1

    run(scenario)


def test_the_supervisor_can_say_that_the_run_cannot_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)
            await stage.client.request("stop", reason="the gateway ended 6 times", failed=True)
            outcome = await walking
            assert outcome["exit_code"] == 7
            assert "the gateway ended 6 times" in outcome["error"]["message"]

    run(scenario)


def test_a_fault_of_ours_ends_the_engines_and_leaves_an_outcome(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            stage.enter_all()
            walking = await ready(stage)

            async def broken() -> None:
                raise KeyError("oops")

            stage.coordinator.spawn(broken())
            outcome = await walking
            assert outcome["exit_code"] == 7
            assert "fault of relax-slurm" in outcome["error"]["message"]
            assert len(stage.actors.methods("stop_worker")) == 4

    run(scenario)
