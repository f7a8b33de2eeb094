"""Questions to SmolLM2, what their answers hold, and how the run file of the real lane gets its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.contract.engine_program import real_sglang

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCORE: dict[str, Any] = {
    "input_ids": [504, 3575, 282, 4649, 314, 7042, 30],
    "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
    "return_logprob": True,
    "logprob_start_len": 0,
    "top_logprobs_num": 3,
}
CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Japan": "Tokyo",
    "Germany": "Berlin",
    "Russia": "Moscow",
    "Greece": "Athens",
}
OPENINGS = {f"The capital of {country} is": capital for country, capital in CAPITALS.items()}
"""Beginnings that SmolLM2 knows how to go on from, each with the word that follows: no two answers are alike."""


def generation(text: str, **more: Any) -> dict[str, Any]:
    """A greedy request. Alone on an engine the whole answer repeats itself; in a batch sums are made in another order,
    and only words that the model is sure of do."""
    return {"text": text, "sampling_params": {"max_new_tokens": 8, "temperature": 0}, **more}


def scored(answer: dict[str, Any]) -> Any:
    """What an answer to `SCORE` says about its input."""
    meta = answer["meta_info"]
    assert [row[1] for row in meta["input_token_logprobs"]] == SCORE["input_ids"]
    return meta["input_token_logprobs"], meta["input_top_logprobs"]


@dataclass(frozen=True, slots=True)
class Straight:
    """Answers of an engine with SmolLM2 that was asked without anything of ours in between."""

    scores: Any
    texts: dict[str, str]


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The document of an answer that has to be 200."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def smollm2(model: Path) -> list[str]:
    """`--set` words for what tools/real/smollm2.yaml leaves to the machine."""
    real = real_sglang()
    values = {
        "engine.python": real["python"],
        **{f"engine.env.{name}": value for name, value in real["env"].items()},
        "roles.rollout.models.policy.model_path": str(model),
        "roles.genrm.models.judge.model_path": str(model),
        "roles.teacher.models.math.model_path": str(model),
    }
    return [word for name, value in values.items() for word in ("--set", f"{name}={json.dumps(value)}")]
