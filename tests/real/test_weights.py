"""New weights for a running SGLang, the way a trainer sends them: version, name, text, and a path that is not there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from relax_slurm.client.weights import SyncWeightsClient, WeightUpdateFailed
from tests.contract.engine_program import real_sglang
from tests.harness.launch import LaunchedRun, new_run
from tests.harness.sites import LocalSite, fresh_name

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "tools" / "real" / "smollm2.yaml"
OPENING = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
CHAT = {
    "model": "policy",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


def other_checkpoint(model: Path, folder: Path) -> Path:
    """The same model with its last norm set to zero: every token is as likely as every other, so the first one wins."""
    shutil.copytree(model, folder)
    (weights,) = folder.glob("*.safetensors")
    with weights.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        first, last = json.loads(stream.read(size))["model.norm.weight"]["data_offsets"]
        stream.seek(8 + size + first)
        stream.write(bytes(last - first))
    return folder


def only_rollout(model: Path) -> dict[str, Any]:
    """The run file of the lane with its rollout role alone, on this machine's environment."""
    body = yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))
    real = real_sglang()
    body["engine"] |= {"python": real["python"], "env": real["env"]}
    body["pools"]["actor"]["gpus_per_node"] = body["training"]["gpus"] = 1
    body["roles"] = {"rollout": body["roles"]["rollout"]}
    body["roles"]["rollout"]["models"]["policy"]["model_path"] = str(model)
    return body


def answer(run: LaunchedRun) -> tuple[str, str]:
    """Text and version of one generation."""
    got = run.http(seconds=120).post("/rollout/generate", json=OPENING).raise_for_status().json()
    return got["text"], got["meta_info"]["weight_version"]


def model_of(run: LaunchedRun) -> tuple[str, str, str]:
    """State, version and served name in discovery."""
    model = run.http().get("/rollout/engines").raise_for_status().json()["models"]["policy"]
    return model["state"], model["weight_version"], model["served_model_name"]


def engine_says(run: LaunchedRun, path: str) -> dict[str, Any]:
    """An info answer of the engine, as its guard passes it on."""
    (engine,) = run.http().get("/rollout/engines").json()["models"]["policy"]["engines"]
    headers = {"Authorization": f"Bearer {run.run_dir.engine_key_file.read_text().strip()}"}
    found: dict[str, Any] = httpx.get(engine["base_url"] + path, headers=headers, trust_env=False).json()
    return found


@pytest.mark.timeout(600)
def test_a_checkpoint_from_disk(tmp_path: Path, chat_model: Path) -> None:
    other = other_checkpoint(chat_model, tmp_path / "step-20")
    with new_run(LocalSite(tmp_path / "runs"), only_rollout(chat_model), tmp_path, fresh_name()) as run:
        done = run.launch("--json", seconds=300)
        assert done.rc == 0, done.said + run.logs()
        first, version = answer(run)
        assert ("Paris" in first, version) == (True, "0")
        with SyncWeightsClient(run.run_dir.path, timeout_seconds=120.0) as trainer:
            document = trainer.update_weights_from_disk("policy", str(other), "20")
            print(f"updated after {document['seconds']:.2f} s")
            assert model_of(run) == ("READY", "20", "policy")
            second, version = answer(run)
            print(f"{first!r} -> {second!r}")
            assert (second != first, version) == (True, "20")
            assert engine_says(run, "/model_info")["served_model_name"] == "policy"
            assert [row["id"] for row in engine_says(run, "/v1/models")["data"]] == ["policy"]
            chat = run.http(seconds=120).post("/rollout/v1/chat/completions", json=CHAT).raise_for_status().json()
            assert chat["model"] == "policy"

            with pytest.raises(WeightUpdateFailed) as failed:
                trainer.update_weights_from_disk("policy", str(tmp_path / "nothing"), "21")
            (row,) = failed.value.detail["replicas"].values()
            print(f"refused: {row['reason'][:200]}")
            assert (row["outcome"], row["weight_version"], row["then"]) == ("kept", "20", "serve")
            assert model_of(run) == ("READY", "20", "policy")
            assert answer(run) == (second, "20"), "the old weights stay"

            trainer.update_weights_from_disk("policy", str(chat_model), "0")
            assert (answer(run), model_of(run)) == ((first, "0"), ("READY", "0", "policy"))
        stopped = run.call("stop", "--json", seconds=90)
        assert stopped.rc == 0, stopped.said + run.logs()
        run.nothing_left()
