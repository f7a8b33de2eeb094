"""Operations on weights at a real coordinator, with sidecars that do what the test tells them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.client.weights import WeightsClient, WeightUpdateFailed
from relax_slurm.control import weights as weights_module
from relax_slurm.control.lifecycle import walk
from relax_slurm.core.run import RunState
from relax_slurm.wire.client import RemoteError
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind
from tests.unit.control.stage import Actors, Answer, Stage, bad, config_of, good, on_stage, run, until

DISK = {"source": "disk", "weight_version": "1", "payload": {"model_path": "/a"}}
PART = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}
GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 5}


def obeys(actors: Actors) -> None:
    """Engines that do what they are asked, and forget it when they are started again."""

    def update(args: dict[str, Any]) -> Answer:
        actors.admission[args["worker_id"]] = False
        if not args["final"]:
            return good(outcome="taken", weight_version="0", reason="")
        return good(outcome="updated", weight_version=args["weight_version"], reason="")

    actors.by_method["update_weights"] = update


@asynccontextmanager
async def serving(tmp_path: Path, **changes: Any) -> AsyncIterator[tuple[Stage, WeightsClient]]:
    async with on_stage(tmp_path, config_of(**changes)) as stage:
        obeys(stage.actors)
        stage.enter_all()
        walking = asyncio.create_task(walk(stage.coordinator))
        await until(lambda: stage.coordinator.run.state is RunState.READY or walking.done())
        assert not walking.done(), walking.result()
        keys = credentials(stage.run_dir.keys, PeerKind.CLIENT)
        async with WeightsClient(stage.address, keys, timeout_seconds=5.0) as client:
            yield stage, client
        await stage.client.request("stop")
        await walking


def version(stage: Stage) -> str | None:
    (role,) = stage.plan.roles
    snapshot = stage.coordinator.registry.snapshot(role.role)
    assert snapshot is not None
    return snapshot.models["m"].weight_version


def states(stage: Stage) -> list[str]:
    (role,) = stage.plan.roles
    snapshot = stage.coordinator.registry.snapshot(role.role)
    assert snapshot is not None
    return [str(engine.state) for engine in snapshot.models["m"].engines]


def test_nothing_is_shown_ready_between_fence_and_proof(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            obey = stage.actors.by_method["update_weights"]
            seen: list[tuple[str | None, list[str]]] = []

            def watched(args: dict[str, Any]) -> Answer:
                seen.append((version(stage), states(stage)))
                return obey(args)

            stage.actors.by_method["update_weights"] = watched
            document = await client.update_weights_from_disk("m", "/a", "1", payload={"load_format": "auto"})
            assert seen == [("0", ["ONLOADING"] * 4)] * 4
            assert (version(stage), states(stage)) == ("1", ["READY"] * 4)
            assert {row["then"] for row in document["replicas"].values()} == {"serve"}
            assert stage.coordinator.run.state is RunState.READY, "an update is no loss"
            sent = stage.actors.methods("update_weights")
            assert [args["payload"] for args in sent] == [{"model_path": "/a", "load_format": "auto"}] * 4
            assert len({args["worker_id"] for args in sent}) == 4
            (event,) = await stage.events("update_weights")
            assert (event["state"], event["weight_version"]) == ("SUCCEEDED", "1")

    run(scenario)


def test_the_same_id_is_the_same_operation(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            ask = {"role": "rollout", "model": "m", **DISK}
            first = await stage.client.request("update_weights", operation_id="one", **ask)
            assert first["state"] == "RUNNING"
            with pytest.raises(RemoteError) as busy:
                await stage.client.request("update_weights", operation_id="two", **ask)
            assert busy.value.remote_code == "weights_busy"
            await client.wait("one")
            again = await stage.client.request("update_weights", operation_id="one", **ask)
            assert again["state"] == "SUCCEEDED"
            assert len(stage.actors.methods("update_weights")) == 4
            with pytest.raises(RemoteError) as reused:
                await stage.client.request("update_weights", operation_id="one", **{**ask, "weight_version": "2"})
            assert reused.value.remote_code == "id_reused"
            with pytest.raises(RemoteError) as unknown:
                await client.look("three")
            assert unknown.value.remote_code == "unknown_operation"

    run(scenario)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "other"}, "unknown_model"),
        ({"role": "genrm"}, "unknown_model"),
        ({"payload": {}}, "protocol"),
        ({"payload": {"model_path": "/a", "keep_pause": True}}, "protocol"),
        ({"final": False}, "protocol"),
        ({"per_replica": {"m/replica-9": {}}}, "protocol"),
        ({"weight_version": ""}, "ill_formed"),
        ({"source": "ipc"}, "ill_formed"),
        ({"limit_seconds": 0.0}, "ill_formed"),
        ({"source": "distributed", "payload": PART}, "not_updatable"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_closed(tmp_path: Path, fields: dict[str, Any], code: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, _):
            with pytest.raises(RemoteError) as refused:
                await stage.client.request("update_weights", **{"model": "m", **DISK, **fields})
            assert refused.value.remote_code == code, refused.value.message
            assert stage.actors.methods("update_weights") == []
            assert states(stage) == ["READY"] * 4

    run(scenario)


def test_a_static_model_refuses_by_its_rule(tmp_path: Path) -> None:
    roles = {"teacher": {"pool": "p", "models": {"m": {"model_path": "sim/m", "gpus": 4}}}}

    async def scenario() -> None:
        async with serving(tmp_path, roles=roles) as (stage, _):
            with pytest.raises(RemoteError, match="row E9") as refused:
                await stage.client.request("update_weights", role="teacher", model="m", **DISK)
            assert refused.value.remote_code == "operation_refused"
            assert version(stage) is None

    run(scenario)


def test_a_replica_in_doubt_is_built_again_with_what_the_others_have(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            obey = stage.actors.by_method["update_weights"]
            stage.actors.by_method["update_weights"] = lambda args: (
                bad("engine_failed", "it broke") if args["worker_id"] == "m/replica-0#0" else obey(args)
            )
            with pytest.raises(WeightUpdateFailed, match="it broke") as failed:
                await client.update_weights_from_disk("m", "/a", "1")
            rows = failed.value.detail["replicas"]
            assert (failed.value.detail["state"], rows["m/replica-0"]["then"]) == ("PARTIAL", "rebuild")
            assert version(stage) == "1"
            await until(lambda: states(stage) == ["READY"] * 4)
            spec = stage.actors.methods("start_worker")[-1]["spec"]
            assert (spec["model_path"], spec["engine_args"]["weight_version"]) == ("/a", "1")
            assert spec["served_model_name"] == "m"

    run(scenario)


def test_when_all_keep_the_old_ones_nothing_has_happened(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            stage.actors.by_method["update_weights"] = lambda args: good(
                outcome="kept", weight_version="0", reason="no such checkpoint"
            )
            with pytest.raises(WeightUpdateFailed, match="no such checkpoint"):
                await client.update_weights_from_disk("m", "/a", "1")
            assert (version(stage), states(stage)) == ("0", ["READY"] * 4)
            assert len(stage.actors.methods("start_worker")) == 4

    run(scenario)


def test_no_answer_within_the_deadline_is_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "MARGIN_SECONDS", 0.3)

    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            stage.actors.by_method["update_weights"] = lambda args: None
            with pytest.raises(WeightUpdateFailed, match=r"no result within 0\.5 s"):
                await client.update_weights_from_disk("m", "/a", "1", timeout_seconds=0.2)
            assert version(stage) == "0"
            await until(lambda: states(stage) == ["READY"] * 4)
            assert [args["spec"]["model_path"] for args in stage.actors.methods("start_worker")] == ["sim/m"] * 8

    run(scenario)


def test_parts_belong_together_and_are_given_up_when_the_next_does_not_come(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            offsets = {f"m/replica-{place}": {"rank_offset": 1 + place} for place in range(4)}
            await client.init_weights_update_group("m", GROUP, per_replica=offsets)
            joined = {
                args["worker_id"]: args["payload"]["rank_offset"] for args in stage.actors.methods("weights_group")
            }
            assert joined == {f"m/replica-{place}#0": 1 + place for place in range(4)}
            await client.update_weights_from_distributed("m", PART, "1", final=False)
            assert (version(stage), states(stage)) == ("0", ["ONLOADING"] * 4)
            await client.update_weights_from_distributed("m", PART, "1")
            assert (version(stage), states(stage)) == ("1", ["READY"] * 4)

            await client.update_weights_from_distributed("m", PART, "2", final=False, timeout_seconds=0.3)
            await until(lambda: len(stage.actors.methods("start_worker")) == 8)
            # What a trainer sent is on no disk, so those that were built again wait for it.
            await until(lambda: states(stage) == ["STARTING"] * 4)
            await until(lambda: all(r.resident for r in next(iter(stage.coordinator.managers.values())).replicas))
            assert version(stage) == "1"
            with pytest.raises(RemoteError, match="has not joined"):
                await client.update_weights_from_distributed("m", PART, "2")
            await client.update_weights_from_disk("m", "/b", "3")
            assert (version(stage), states(stage)) == ("3", ["READY"] * 4)

    run(scenario)


def test_a_group_that_not_all_join_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            stage.actors.by_method["weights_group"] = lambda args: (
                bad("engine_failed", "no route") if args["worker_id"] == "m/replica-3#0" else good()
            )
            with pytest.raises(WeightUpdateFailed, match="no route") as failed:
                await client.init_weights_update_group("m", GROUP)
            assert failed.value.detail["state"] == "PARTIAL"
            with pytest.raises(RemoteError, match="m/replica-3 has not joined"):
                await client.update_weights_from_distributed("m", PART, "1")

    run(scenario)


def test_a_replica_that_dies_meanwhile_comes_back_with_the_new_ones(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as (stage, client):
            obey = stage.actors.by_method["update_weights"]

            def dies(args: dict[str, Any]) -> Answer:
                if args["worker_id"] != "m/replica-1#0":
                    return obey(args)
                stage.actors.states[args["worker_id"]] = "exited"
                return bad("upstream_failed", "the engine ended")

            stage.actors.by_method["update_weights"] = dies
            with pytest.raises(WeightUpdateFailed):
                await client.update_weights_from_disk("m", "/a", "1")
            await until(lambda: states(stage) == ["READY"] * 4)
            assert stage.actors.methods("start_worker")[-1]["spec"]["model_path"] == "/a"
            assert version(stage) == "1"

    run(scenario)
