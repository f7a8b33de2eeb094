"""A prefill and a decode engine of SGLang behind a real router; KV cache travels by mooncake over TCP."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine_program import real_sglang
from tests.harness.launch import new_run
from tests.harness.routers import require_router
from tests.harness.sites import LocalSite, fresh_name


def body_of(model: Path) -> dict[str, Any]:
    """One pair on one virtual node."""
    real = real_sglang()
    env = {**real["env"], "MC_FORCE_TCP": "1"}
    args = {
        **real["engine_args"],
        "max_total_tokens": 8192,
        "skip_server_warmup": True,
        "disaggregation_transfer_backend": "mooncake_tcp",
    }
    retraction = {"disaggregation_decode_retraction_backup": "cpu_tensor"}
    groups = [
        {"worker_type": "prefill", "gpus": 1},
        {"worker_type": "decode", "gpus": 1, "engine_args": retraction},
    ]
    policy = {"model_path": str(model), "gpus": 2, "gpus_per_engine": 1, "engine_args": args, "groups": groups}
    return {
        "placement": "decoupled",
        "engine": {
            "program": "sglang",
            "startup_seconds": 400,
            "python": real["python"],
            "router_python": require_router(),
            "env": env,
        },
        "pools": {"p": {"nodes": 1, "gpus_per_node": 2}},
        "roles": {"rollout": {"pool": "p", "models": {"policy": policy}}},
    }


@pytest.mark.timeout(1200)
def test_a_pair_answers_with_real_text(tmp_path: Path, chat_model: Path) -> None:
    if without := os.environ.get("RELAX_TEST_NO_MOONCAKE"):
        pytest.skip(without)
    body = body_of(chat_model)
    with new_run(LocalSite(tmp_path / "runs"), body, tmp_path, fresh_name()) as run:
        done = run.launch("--json", seconds=500)
        assert done.rc == 0, done.said + run.logs()
        model = json.loads(done.out)["roles"]["rollout"]["models"]["policy"]
        assert (model["state"], model["engines"]) == ("READY", [])
        http = run.http(seconds=120)
        sampling = {"max_new_tokens": 4, "temperature": 0}
        plain = {"text": "The capital of France is", "sampling_params": sampling}
        answer = http.post("/rollout/generate", json=plain)
        assert "Paris" in answer.raise_for_status().json()["text"]
        with http.stream("POST", "/rollout/generate", json={**plain, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert "Paris" in lines[-2]
        assert lines[-1] == "data: [DONE]"
        assert run.call("stop").rc == 0
        run.nothing_left()
