"""Closed batches on a live run: the command line makes them, another process trains on them, nobody overlaps."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.workload.publishers.reader import partitions, read_partition
from tests.harness.launch import LaunchedRun, Ran
from tests.harness.sites import LOCAL, NewRun, merged, small
from tests.harness.turns import TRAINING, LedgerWatch
from tests.harness.wait import until

ROOT = Path(__file__).resolve().parents[2]
TIMELINE = runpy.run_path(str(ROOT / "tools" / "timeline.py"))
BATCH: dict[str, Any] = {
    "batch_size": 8,
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


def trained(run: LaunchedRun, tmp_path: Path, count: int, *words: str) -> tuple[Ran, list[dict[str, Any]]]:
    """`batch` and the trainer side by side, the trainer with memory of its own on the cards and a push per step."""
    program = [sys.executable, "-m", "tests.harness.turns", str(run.run_dir.path), "--batches", str(count)]
    program += ["--checkpoints", str(tmp_path / "checkpoints"), "--push", "policy", *words]
    environment = dict(run.site.env) | {"PYTHONPATH": str(ROOT)}
    trainer = subprocess.Popen(program, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        done = run.call("batch", written(tmp_path), "--batches", str(count), "--json", seconds=110)
        assert done.rc == 0, done.said + run.logs()
        out = trainer.communicate(timeout=60)[0]
    finally:
        trainer.kill()
        trainer.wait(10)
    assert trainer.returncode == 0, out
    return done, [json.loads(line) for line in out.splitlines()]


def asleep(run: LaunchedRun) -> bool:
    """Whether no lease is held."""
    state = run.state()
    return state is not None and set(state["leases"].values()) == {"SLEEPING"}


def test_batches_are_made_and_trained_on(new: NewRun, tmp_path: Path) -> None:
    run = new(deferred())
    run.up()
    with LedgerWatch(run.run_dir.ledger) as watch:
        done, metrics = trained(run, tmp_path, 3)
    watch.check(4)
    assert all(card.owners <= {"policy", "judge", "teacher", TRAINING} for card in watch.cards.values())
    assert [(row["batch"], row["samples"], row["reward_mean"]) for row in metrics] == [(n, 16, 1.0) for n in range(3)]
    # Every step's weights were noted while the policy slept, and are those that wrote the next batch.
    assert [row["weight_versions"] for row in metrics] == [["0"], ["1"], ["2"]]
    summary = done.json
    assert {key: summary[key] for key in ("batches", "samples", "reward_mean", "teacher_coverage")} == {
        "batches": 3,
        "samples": 48,
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
    turns = TIMELINE["timeline"](run.events())
    assert [(batch["batch"], batch["state"]) for batch in turns["batches"]] == [(n, "COMMITTED") for n in range(3)]
    assert turns["at_once"] == 1
    order = ["rollout", "genrm", "teacher", "rollout", "training"]
    assert [[lease["holder"] for lease in batch["leases"]] for batch in turns["batches"]] == [order] * 3
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
    assert (done.json["samples"], done.json["reward_mean"]) == (32, 1.0)


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_roles_that_stand_on_trainings_gpus_leave_and_come_back(new: NewRun, tmp_path: Path) -> None:
    policy = {"models": {"policy": {"engine_args": {"enable_weights_cpu_backup": True}}}}
    run = new(small(batch=BATCH | {"student_scoring": False}, roles={"rollout": policy}))
    run.up()
    before = {row["replica"]: run.worker(f"{row['replica']}#0")["pid"] for row in (run.state() or {})["replicas"]}
    with LedgerWatch(run.run_dir.ledger) as watch:
        _, metrics = trained(run, tmp_path, 2)
    watch.check(4)
    assert all(len(card.owners - {TRAINING}) == 1 for card in watch.cards.values())
    assert [row["weight_versions"] for row in metrics] == [["0"], ["1"]]
    state = run.state()
    assert state is not None
    assert state["leases"] == {"rollout": "ACTIVE", "genrm": "ACTIVE", "teacher": "ACTIVE", "training": "SLEEPING"}
    assert {(row["state"], row["generation"]) for row in state["replicas"]} == {("READY", 1)}
    assert {name: run.worker(f"{name}#0")["pid"] for name in before} == before, "asleep, never ended"
    answer = run.http().post("/rollout/generate", json={"text": "1 + 1 = ", "sampling_params": {"max_new_tokens": 4}})
    assert (answer.status_code, answer.json()["meta_info"]["weight_version"]) == (200, "2")
    assert run.call("stop").rc == 0
    run.nothing_left()


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
