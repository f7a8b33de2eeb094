"""One SGLang replica over two virtual nodes: tensor parallel 2, two sidecars, gloo between them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine_program import real_sglang
from tests.harness.launch import LaunchedRun, arguments, new_run
from tests.harness.sites import LocalSite, fresh_name
from tests.harness.slurm_proc import Proc, wait_gone
from tests.harness.wait import until

REPLICA = "policy/replica-0"
SEEN_SECONDS = 30.0
"""The health budget, three looks that take their time: as long may a death go unseen."""
PROMPT = {"input_ids": [7, 8, 9, 10], "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}


def body_of(model: Path) -> dict[str, Any]:
    """One replica over two nodes of one GPU. Its ranks must not bind themselves to the same core's threads."""
    real = real_sglang()
    return {
        "placement": "decoupled",
        "engine": {
            "program": "sglang",
            "python": real["python"],
            "startup_seconds": 400,
            "env": {**real["env"], "SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        },
        "pools": {"p": {"nodes": 2, "gpus_per_node": 1}},
        "roles": {
            "rollout": {
                "pool": "p",
                "models": {
                    "policy": {
                        "model_path": str(model),
                        "gpus": 2,
                        "gpus_per_engine": 2,
                        "engine_args": {**real["engine_args"], "max_total_tokens": 8192},
                    }
                },
            }
        },
    }


def members(run: LaunchedRun) -> list[Proc]:
    """Every living process of the replica, on both nodes."""
    return [process for process in run.processes() if process.environ().get("RELAX_WORKER_TAG", "").startswith(REPLICA)]


def option(words: list[str], name: str) -> str:
    """The value of an option of a command line."""
    return words[words.index(name) + 1]


@pytest.mark.timeout(1200)
def test_a_killed_follower_ends_the_replica_which_is_built_again(tmp_path: Path) -> None:
    model = Path(os.environ["RELAX_TEST_SGLANG_MODEL"])
    with new_run(LocalSite(tmp_path / "runs"), body_of(model), tmp_path, fresh_name()) as run:
        done = run.launch("--json", seconds=500)
        assert done.rc == 0, done.said + run.logs()
        leaders = [int(run.worker(f"{REPLICA}#{rank}")["pid"]) for rank in (0, 1)]
        words = [arguments(pid) for pid in leaders]
        assert [option(line, "--node-rank") for line in words] == ["0", "1"]
        assert {option(line, "--nnodes") for line in words} == {"2"}
        assert {option(line, "--tp-size") for line in words} == {"2"}
        (rendezvous,) = {option(line, "--dist-init-addr") for line in words}
        http = run.http(seconds=120)
        (engine,) = http.get("/rollout/engines").json()["models"]["policy"]["engines"]
        assert (engine["engine_id"], engine["generation"]) == (REPLICA, 1), "one head, nothing of the follower"
        print(f"rendezvous {rendezvous}, published {engine['base_url']}")
        first = http.post("/rollout/generate", json=PROMPT).raise_for_status().json()
        assert len(first["output_ids"]) == 8

        old = members(run)
        follower = Proc.of(leaders[1])
        assert follower is not None
        follower.send(signal.SIGKILL)
        until(
            lambda: any(event["before"] == "READY" for event in run.events("replica")),
            SEEN_SECONDS,
            lambda: f"nobody saw it{run.logs()}",
        )
        run.wait_replica(REPLICA, generation=2, seconds=500)
        assert wait_gone(old, 5.0) == [], "nothing of the old one is left on either node"
        states = [event["after"] for event in run.events("replica")]
        assert (states[0], states[-2], states[-1]) == ("READY", "GONE", "READY"), "proven gone, then built again"
        assert set(states[1:-2]) <= {"FAILED", "STOPPING"}
        run.wait_state("READY", seconds=60)
        (again,) = http.get("/rollout/engines").json()["models"]["policy"]["engines"]
        assert (again["engine_id"], again["state"], again["generation"]) == (REPLICA, "READY", 2)
        assert again["base_url"] != engine["base_url"]
        answer = http.post("/rollout/generate", json=PROMPT).raise_for_status().json()
        assert answer["output_ids"] == first["output_ids"]
        stopped = run.call("stop", "--json", seconds=90)
        assert stopped.rc == 0, stopped.said + run.logs()
        run.nothing_left()
