"""A run with SGLang behind every role, as a user has it: run file, command line, gateway, three engines, stop."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.contract.engine_program import launch, real_sglang, spec_of
from tests.harness.launch import LaunchedRun, new_run
from tests.harness.sites import LocalSite, fresh_name

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = ROOT / "tools" / "real" / "smollm2.yaml"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCORE = {
    "input_ids": [504, 3575, 282, 4649, 314, 7042, 30],
    "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
}


def settings(model: Path) -> list[str]:
    """What the run file leaves to the machine."""
    real = real_sglang()
    values = {
        "engine.python": real["python"],
        **{f"engine.env.{name}": value for name, value in real["env"].items()},
        "roles.rollout.models.policy.model_path": str(model),
        "roles.genrm.models.judge.model_path": str(model),
        "roles.teacher.models.math.model_path": str(model),
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]


def megabytes(run: LaunchedRun) -> float:
    """Memory of the run's engines, what they share counted once (PSS)."""
    total = 0
    for process in run.processes():
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs(answer: dict[str, Any]) -> Any:
    """What a teacher's answer says about its input."""
    meta = answer["meta_info"]
    assert [row[1] for row in meta["input_token_logprobs"]] == SCORE["input_ids"]
    return meta["input_token_logprobs"], meta["input_top_logprobs"]


@pytest.mark.timeout(600)
def test_three_roles_answer_with_real_text(tmp_path: Path, chat_model: Path) -> None:
    body = yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))
    with new_run(LocalSite(tmp_path / "runs"), body, tmp_path, fresh_name()) as run:
        done = run.launch("--json", *settings(chat_model), seconds=300)
        assert done.rc == 0, done.said + run.logs()
        print(done.err)
        client = run.http(seconds=120)
        chat = post(client, "/rollout/v1/chat/completions", {"model": "policy", "messages": QUESTION, "temperature": 0})
        assert "Paris" in chat["choices"][0]["message"]["content"]
        opening = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        plain = post(client, "/rollout/generate", opening)
        assert "Paris" in plain["text"]
        verdict = post(client, "/genrm/generate", {"messages": QUESTION, "sampling_params": {"temperature": 0}})
        assert set(verdict) == {"response"}
        assert "Paris" in verdict["response"]
        scored = logprobs(post(client, "/teacher/generate", SCORE))
        print(f"all processes of the run: {megabytes(run):.0f} MB")

        stopped = run.call("stop", "--json", seconds=90)
        assert stopped.rc == 0, stopped.said + run.logs()
        assert stopped.json["unproven"] == []
        run.nothing_left()

    engine = spec_of("sglang", tmp_path, model_path=str(chat_model), served_model_name="math")
    with launch(engine) as straight:
        assert logprobs(straight.post("/generate", SCORE).json()) == scored, "nothing is lost or changed on the way"


def test_the_run_file_is_for_the_environment_that_is_built() -> None:
    """The arguments in the run file and those of the tests say the same."""
    body = yaml.safe_load(RUN_FILE.read_text(encoding="utf-8"))
    arguments = body["roles"]["rollout"]["models"]["policy"]["engine_args"]
    known = json.loads(os.environ["RELAX_TEST_SGLANG_ARGS"])
    assert {**known, "max_total_tokens": arguments["max_total_tokens"]} == arguments
    assert body["engine"]["env"].items() <= real_sglang()["env"].items()
