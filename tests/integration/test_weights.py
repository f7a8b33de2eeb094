"""New weights for a model while clients ask: simulated engines on virtual nodes, updated as a trainer does it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.client.weights import SyncWeightsClient, WeightUpdateFailed
from relax_slurm.wire.client import RemoteError
from tests.harness.launch import LaunchedRun
from tests.harness.load import load_on
from tests.harness.routers import require_router
from tests.harness.sites import LOCAL, NewRun, small
from tests.harness.slurm_proc import Proc
from tests.harness.wait import until

pytestmark = pytest.mark.parametrize("site", [LOCAL], indirect=True)
FIRST, SECOND = "policy/replica-0", "policy/replica-1"
GROUP = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3, "backend": "gloo"}
PART = {"names": ["model.weight"], "dtypes": ["float32"], "shapes": [[2, 2]]}


@contextmanager
def trainer(run: LaunchedRun) -> Iterator[SyncWeightsClient]:
    with SyncWeightsClient(run.run_dir.path, timeout_seconds=20.0) as client:
        yield client


def model_of(run: LaunchedRun) -> dict[str, Any]:
    model: dict[str, Any] = run.http().get("/rollout/engines").raise_for_status().json()["models"]["policy"]
    return model


def answer_of(run: LaunchedRun) -> dict[str, Any]:
    body = {"text": "Tell me", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
    answer: dict[str, Any] = run.http().post("/rollout/generate", json=body).raise_for_status().json()
    return answer


def shown(run: LaunchedRun) -> dict[str, str]:
    return {engine["engine_id"]: engine["state"] for engine in model_of(run)["engines"]}


def kill(run: LaunchedRun, replica: str) -> None:
    engine = Proc.of(int(run.worker(f"{replica}#0")["pid"]))
    assert engine is not None
    engine.send(signal.SIGKILL)


def checkpoint(folder: Path, name: str) -> str:
    path = folder / name
    path.mkdir()
    return str(path)


def test_a_checkpoint_reaches_every_replica_and_every_rebuilt_one(new: NewRun, tmp_path: Path) -> None:
    run = new(small())
    run.up()
    before = answer_of(run)
    assert (model_of(run)["weight_version"], before["meta_info"]["weight_version"]) == ("0", "0")
    path = checkpoint(tmp_path, "step-20")
    with trainer(run) as client, load_on(run.gateway_url, "/rollout/generate", run.token) as load:
        load.more(10)
        document = client.update_weights_from_disk("policy", path, "20", operation_id="step-20")
        assert document["state"] == "SUCCEEDED"
        assert {row["weight_version"] for row in document["replicas"].values()} == {"20"}
        assert client.begin_update("policy", "disk", "20", {"model_path": path}, operation_id="step-20") == "step-20"
        load.more(10)
        # 503 while the model is closed, and nothing else: what got in was answered before the engines were paused.
        assert (load.wrong, set(load.refused) - {503}, load.cut) == ([], set(), 0)

        model = model_of(run)
        assert (model["weight_version"], model["served_model_name"]) == ("20", "policy")
        assert set(shown(run).values()) == {"READY"}
        after = answer_of(run)
        assert after["meta_info"]["weight_version"] == "20"
        assert after["text"] != before["text"], "other weights say something else"
        chat = {"model": "policy", "messages": [{"role": "user", "content": "What is 6 * 7?"}], "max_tokens": 8}
        assert run.http().post("/rollout/v1/chat/completions", json=chat).raise_for_status().json()["model"] == "policy"

        kill(run, FIRST)
        run.wait_replica(FIRST, generation=2)
        for _ in range(2):  # round robin: both
            again = answer_of(run)
            assert (again["text"], again["meta_info"]["weight_version"]) == (after["text"], "20")

        with pytest.raises(WeightUpdateFailed) as failed:
            client.update_weights_from_disk("policy", "/no/such/step", "21")
        rows = failed.value.detail["replicas"].values()
        assert {(row["outcome"], row["weight_version"], row["then"]) for row in rows} == {("kept", "20", "serve")}
        assert all("/no/such/step" in row["reason"] for row in rows)
        assert model_of(run)["weight_version"] == "20"
        assert set(shown(run).values()) == {"READY"}
        assert answer_of(run)["text"] == after["text"]

        client.update_weights_from_disk("policy", path, "0")
        assert (model_of(run)["weight_version"], answer_of(run)["meta_info"]["weight_version"]) == ("0", "0")
    assert run.events("given_up") == []
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_what_comes_from_the_trainer_is_not_there_after_a_rebuild(new: NewRun) -> None:
    run = new(small())
    run.up()
    with trainer(run) as client:
        with pytest.raises(RemoteError, match="has not joined the group") as refused:
            client.update_weights_from_distributed("policy", PART, "1")
        assert refused.value.remote_code == "not_updatable"
        offsets = {FIRST: {"rank_offset": 1}, SECOND: {"rank_offset": 2}}
        client.init_weights_update_group("policy", GROUP, per_replica=offsets)
        client.update_weights_from_distributed("policy", PART, "1", final=False)
        assert set(shown(run).values()) == {"ONLOADING"}, "closed between the parts"
        assert run.http().post("/rollout/generate", json={"text": "x"}).status_code == 503
        assert model_of(run)["weight_version"] == "0"
        client.update_weights_from_distributed("policy", PART, "1")
        assert (model_of(run)["weight_version"], set(shown(run).values())) == ("1", {"READY"})
        assert answer_of(run)["meta_info"]["weight_version"] == "1"
        client.destroy_weights_update_group("policy")

        kill(run, FIRST)
        pending = until(lambda: _waits(run, FIRST), 20.0, run.logs)
        assert "on no disk" in pending["reason"]
        assert shown(run)[FIRST] == "STARTING"
        assert answer_of(run)["meta_info"]["weight_version"] == "1", "the other one serves on"
        client.update_weights_from_tensor("policy", ["AAAA"], "2")
        assert (model_of(run)["weight_version"], set(shown(run).values())) == ("2", {"READY"})
        assert {answer_of(run)["meta_info"]["weight_version"] for _ in range(2)} == {"2"}


def _waits(run: LaunchedRun, replica: str) -> dict[str, Any] | None:
    rows = (run.state() or {"replicas": []})["replicas"]
    return next(
        (row for row in rows if row["replica"] == replica and row["generation"] == 2 and "waits" in row["reason"]), None
    )


def test_a_replica_that_cannot_take_them_is_built_again_with_them(new: NewRun, tmp_path: Path) -> None:
    faults = [{"kind": "refuse_update", "worker": f"{FIRST}#0"}]
    run = new(small(engine={"sim": {"faults": faults}}))
    run.up()
    path = checkpoint(tmp_path, "step-1")
    with trainer(run) as client:
        with pytest.raises(WeightUpdateFailed) as failed:
            client.update_weights_from_disk("policy", path, "1")
        document = failed.value.detail
        assert document["state"] == "PARTIAL"
        rows = document["replicas"]
        assert (rows[FIRST]["outcome"], rows[FIRST]["then"]) == ("kept", "rebuild")
        assert (rows[SECOND]["outcome"], rows[SECOND]["then"]) == ("updated", "serve")
        assert model_of(run)["weight_version"] == "1"
        run.wait_replica(FIRST, generation=2)
        assert {answer_of(run)["meta_info"]["weight_version"] for _ in range(2)} == {"1"}


def test_a_version_that_does_not_come_true_is_not_published(new: NewRun, tmp_path: Path) -> None:
    faults = [{"kind": "keep_version", "worker": "policy/*"}]
    run = new(small(engine={"sim": {"faults": faults}}))
    run.up()
    with trainer(run) as client:
        with pytest.raises(WeightUpdateFailed, match="wanted '1'") as failed:
            client.update_weights_from_disk("policy", checkpoint(tmp_path, "step-1"), "1")
        assert failed.value.detail["published_version"] == "0"
        assert {row["then"] for row in failed.value.detail["replicas"].values()} == {"rebuild"}
        for replica in (FIRST, SECOND):
            run.wait_replica(replica, generation=2)
        assert (model_of(run)["weight_version"], answer_of(run)["meta_info"]["weight_version"]) == ("0", "0")


def test_judges_and_teachers_refuse_everything(new: NewRun, tmp_path: Path) -> None:
    run = new(small())
    run.up()
    with trainer(run) as client:
        for role, model in (("genrm", "judge"), ("teacher", "teacher")):
            with pytest.raises(RemoteError, match="weight source is STATIC") as refused:
                client.update_weights_from_disk(model, str(tmp_path), "1", role=role)
            assert refused.value.remote_code == "operation_refused"
            with pytest.raises(RemoteError, match="weight source is STATIC"):
                client.init_weights_update_group(model, GROUP, role=role)
        with pytest.raises(RemoteError, match="no model rollout/judge"):
            client.update_weights_from_disk("judge", str(tmp_path), "1")
    assert run.events("update_weights") == []


@pytest.mark.engine
def test_behind_a_router_nothing_reaches_an_engine_meanwhile(new: NewRun, tmp_path: Path) -> None:
    python = require_router()
    body = small(
        engine={"router_python": python}, roles={"rollout": {"models": {"policy": {"route_mode": "SGLANG_ROUTER"}}}}
    )
    run = new(body)
    run.up()
    with trainer(run) as client, load_on(run.gateway_url, "/rollout/generate", run.token) as load:
        load.more(10)
        client.update_weights_from_disk("policy", checkpoint(tmp_path, "step-3"), "3")
        assert answer_of(run)["meta_info"]["weight_version"] == "3"
        load.more(10)
        assert (load.wrong, set(load.refused) - {503}, load.cut) == ([], set(), 0)
    assert len(run.events("router_removed")) == 2, "taken out of the router first"
    chat = {"model": "policy", "messages": [{"role": "user", "content": "What is 6 * 7?"}], "max_tokens": 8}
    assert run.http().post("/rollout/v1/chat/completions", json=chat).raise_for_status().json()["model"] == "policy"
