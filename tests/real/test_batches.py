"""Closed batches with SGLang in every role, taking turns; then the same questions by hand, and the same answers.

The memory saver is a stand-in on a CPU, so nothing here says that memory comes back (docs/real-engine.md).
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_slurm.client.lifecycle import LifecycleClient
from relax_slurm.workload.publishers.reader import partitions, read_partition
from relax_slurm.workload.rewards.answers import answer_of
from relax_slurm.workload.rewards.genrm import LOOKED_AT, SAMPLING, TEMPLATE
from tests.contract.engine_program import real_sglang
from tests.harness.launch import LaunchedRun, new_run
from tests.harness.sites import LocalSite, fresh_name

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "tools" / "real" / "smollm2.yaml"
NOISE = 0.4
"""As in test_prefill_scoring.py: bfloat16 on a CPU, other batches and windows."""
PROMPTS = {"The capital of France is": "Paris", "2 + 2 =": "4", "Roses are red, violets are": "blue", "3 * 3 =": "9"}


def deferred(model: Path) -> dict[str, Any]:
    """The run file of the lane, all roles on one pretended GPU."""
    body: dict[str, Any] = yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))
    real = real_sglang()
    body["placement"] = "defer"
    body["engine"] |= {"python": real["python"], "env": real["env"]}
    body["pools"]["actor"]["gpus_per_node"] = body["training"]["gpus"] = 1
    for role in body["roles"].values():
        for each in role["models"].values():
            each["model_path"] = str(model)
    body["batch"] = {
        "batch_size": 4,
        "n_samples_per_prompt": 2,
        "sampling": {"max_new_tokens": 12, "temperature": 1.0},
        "reward": {"adapter": "genrm", "bare_answers": True, "concurrency": 1},
        "teacher": {"selection": "teacher_topk", "top_k": 3},
        "student_scoring": True,
    }
    return body


def ask_judge(run: LaunchedRun, row: dict[str, Any]) -> float:
    """The reward of a row as a person would find it."""
    answer = answer_of(row["response"], bare=True)
    if answer is None:
        return 0.0
    (asked,) = [text for text, label in PROMPTS.items() if label == row["label"]]
    question = TEMPLATE.format(question=asked, label=row["label"], answer=answer)
    body = {"messages": [{"role": "user", "content": question}], "sampling_params": SAMPLING}
    said = run.http(seconds=120).post("/genrm/generate", json=body).raise_for_status().json()["response"]
    return 1.0 if "1" in said[:LOOKED_AT] else 0.0


def ask_teacher(run: LaunchedRun, row: dict[str, Any]) -> list[float]:
    """The log-probs of a row's response, one request and no windows."""
    body = {
        "input_ids": row["tokens"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(row["tokens"]) - row["response_length"] - 1,
    }
    meta = run.http(seconds=120).post("/teacher/generate", json=body).raise_for_status().json()["meta_info"]
    return [value for value, *_ in meta["input_token_logprobs"][1:]]


async def by_hand(run: LaunchedRun, rows: list[dict[str, Any]], batch: int) -> tuple[list[float], list[list[float]]]:
    """Wake judge and teacher in turn and ask them."""
    async with await LifecycleClient.of(run.run_dir.path) as lifecycle:
        await lifecycle.begin_batch(batch)
        await lifecycle.offload_rollout(batch)
        await lifecycle.acknowledge_rollout_offloaded(batch)
        await lifecycle.activate("genrm", batch)
        rewards = [await asyncio.to_thread(ask_judge, run, row) for row in rows]
        await lifecycle.deactivate("genrm", batch)
        await lifecycle.activate("teacher", batch)
        told = [await asyncio.to_thread(ask_teacher, run, row) for row in rows]
        await lifecycle.deactivate("teacher", batch)
        await lifecycle.commit_batch(batch)
    return rewards, told


@pytest.mark.timeout(1500)
def test_two_batches_and_the_same_by_hand(tmp_path: Path, chat_model: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "label": label}) + "\n" for text, label in PROMPTS.items()))
    with new_run(LocalSite(tmp_path / "runs"), deferred(chat_model), tmp_path, fresh_name()) as run:
        launched = run.launch("--json", seconds=800)
        assert launched.rc == 0, launched.said + run.logs()
        made = run.call("batch", str(prompts), "--batches", "2", "--json", seconds=300)
        assert made.rc == 0, made.said + run.logs()
        print(json.dumps({key: made.json[key] for key in ("samples", "reward_mean", "teacher_coverage", "seconds")}))
        assert (made.json["samples"], made.json["teacher_coverage"]) == (16, 1.0)
        root = run.run_dir.path / "partitions"
        assert partitions(root) == ["train_0", "train_1"]
        rows: list[dict[str, Any]] = [row for name in partitions(root) for row in read_partition(root, name)]
        assert len(rows) == 16
        rewards, told = asyncio.run(by_hand(run, rows, 2))
        print(json.dumps({"rewards": [row["reward"] for row in rows], "by_hand": rewards}))
        assert [row["reward"] for row in rows] == rewards
        worst = 0.0
        for row, other in zip(rows, told, strict=True):
            assert row["teacher_log_probs"] == pytest.approx(other, abs=NOISE)
            # Policy and teacher are one model, at one temperature.
            assert row["teacher_log_probs"] == pytest.approx(row["rollout_log_probs"], abs=NOISE)
            for own, student in zip(
                row["teacher_topk_log_probs"], row["student_at_teacher_topk_log_probs"], strict=True
            ):
                assert own == pytest.approx(student, abs=NOISE)
            worst = max([worst, *(abs(one - two) for one, two in zip(row["teacher_log_probs"], other, strict=True))])
        print(f"teacher by hand: differs by at most {worst:.4f} over {sum(map(len, told))} tokens")
        state = run.state()
        assert state is not None
        assert {row["generation"] for row in state["replicas"]} == {1}
        stopped = run.call("stop", "--json", seconds=120)
        assert stopped.rc == 0, stopped.said + run.logs()
        run.nothing_left()
