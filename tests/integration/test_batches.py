"""Closed batches on a live run: the command line makes them, another process trains on them, nobody overlaps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.workload.publishers.reader import partitions, read_partition
from tests.harness.launch import LaunchedRun
from tests.harness.sites import LOCAL, NewRun, merged, small
from tests.harness.wait import until

pytestmark = pytest.mark.skipif(
    find_spec("relax_slurm.client.lifecycle") is None, reason="there is no lifecycle client to ask for leases (row B1)"
)
ROOT = Path(__file__).resolve().parents[2]
BATCH: dict[str, Any] = {
    "batch_size": 4,
    "n_samples_per_prompt": 2,
    "seed": 3,
    "sampling": {"max_new_tokens": 16},
    "reward": {"adapter": "genrm", "bare_answers": True},
    "teacher": {"selection": "teacher_topk", "top_k": 2},
    "student_scoring": True,
    "consumers": ["trainer"],
}


def deferred(**changes: Any) -> dict[str, Any]:
    """All roles and training on the same four GPUs."""
    policy = {"gpus": 4, "gpus_per_engine": 2, "engine_args": {"enable_weights_cpu_backup": True}}
    base = {
        "placement": "defer",
        "roles": {
            "rollout": {"models": {"policy": policy}},
            "genrm": {"models": {"judge": {"gpus": 4, "gpus_per_engine": 2}}},
            "teacher": {"models": {"teacher": {"gpus": 4, "gpus_per_engine": 2}}},
        },
        "batch": BATCH,
    }
    return merged(small(**base), changes)


def written(tmp_path: Path) -> str:
    """A prompt file."""
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {number} + 25?", "label": str(number + 25)} for number in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def asleep(run: LaunchedRun) -> bool:
    """Whether no lease is held."""
    state = run.state()
    return state is not None and set(state["leases"].values()) == {"SLEEPING"}


def test_batches_are_made_and_trained_on(new: NewRun, tmp_path: Path) -> None:
    run = new(deferred())
    run.up()
    program = [sys.executable, str(ROOT / "examples" / "trainer.py"), str(run.run_dir.path), "--batches", "3"]
    environment = dict(run.site.env) | {"PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        done = run.call("batch", written(tmp_path), "--batches", "3", "--json", seconds=110)
        assert done.rc == 0, done.said + run.logs()
        metrics = [json.loads(line) for line in trainer.communicate(timeout=60)[0].splitlines()]
    finally:
        trainer.kill()
        trainer.wait(10)
    assert trainer.returncode == 0
    assert [(row["batch"], row["samples"], row["reward_mean"]) for row in metrics] == [(n, 8, 1.0) for n in range(3)]
    summary = done.json
    assert {key: summary[key] for key in ("batches", "samples", "reward_mean", "teacher_coverage")} == {
        "batches": 3,
        "samples": 24,
        "reward_mean": 1.0,
        "teacher_coverage": 1.0,
    }
    assert summary["handovers"]["count"] == 24
    root = run.run_dir.path / "partitions"
    assert partitions(root) == ["train_0", "train_1", "train_2"]
    for row in read_partition(root, "train_2"):
        assert row["response"] == row["label"]
        for name in ("teacher_log_probs", "teacher_topk_token_ids", "student_at_teacher_topk_log_probs"):
            assert len(row[name]) == row["response_length"] > 0
    state = run.state()
    assert state is not None
    assert state["batch"]["state"] == "COMMITTED"
    assert asleep(run)
    # An engine that had found its card taken would have ended, and been built again.
    assert {row["generation"] for row in state["replicas"]} == {1}
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_roles_with_gpus_of_their_own(new: NewRun, tmp_path: Path) -> None:
    run = new(small(batch=BATCH | {"student_scoring": False, "consumers": []}))
    run.up()
    done = run.call("batch", written(tmp_path), "--batches", "2", "--json", seconds=110)
    assert done.rc == 0, done.said + run.logs()
    assert (done.json["samples"], done.json["reward_mean"]) == (16, 1.0)


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_an_interrupted_batch_leaves_nobody_on_the_gpus(new: NewRun, tmp_path: Path) -> None:
    slow = {"tokens_per_second": 20}
    endless = {"sampling": {"max_new_tokens": 4000, "ignore_eos": True}}
    run = new(deferred(engine={"sim": slow}, batch=endless))
    run.up()
    command = [sys.executable, "-m", "relax_slurm", "batch", run.name, written(tmp_path)]
    environment = dict(run.site.env) | {"RELAX_RUNS_ROOT": str(run.site.root), "PYTHONPATH": str(ROOT)}
    making = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        until(lambda: (run.state() or {"leases": {}})["leases"].get("rollout") == "ACTIVE", 60.0, run.logs)
        os.kill(making.pid, signal.SIGINT)
        assert making.wait(60) == 130
    finally:
        making.kill()
        making.wait(10)
    until(lambda: asleep(run), 30.0, run.logs)
    state = run.state()
    assert state is not None
    assert state["batch"]["state"] == "FAILED"
    assert not (run.run_dir.path / "partitions").exists()
    again = run.call("batch", written(tmp_path), "--json")
    assert again.rc == 7
    assert "`recover` comes first" in again.err
