"""What every engine has to do over HTTP, the simulated one and SGLang alike. Only shapes and effects, never wording."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.contract.engine_program import Launched, require_engine

LONG = {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 0}
PROMPT = [7, 8, 9, 10, 11, 12]


def test_the_real_engine_takes_the_same_tests() -> None:
    require_engine()


class Background:
    """Requests that run while the test does something else."""

    def __init__(self, engine: Launched) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(8)

    def generate(self, **body: Any) -> Future[httpx.Response]:
        return self._pool.submit(self._engine.post, "/generate", {"input_ids": PROMPT, **body})

    def wait_running(self, count: int = 1) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            loads = self._engine.get("/v1/loads").json()["loads"]
            if sum(load["num_running_reqs"] for load in loads) >= count:
                return
            time.sleep(0.01)
        raise AssertionError("no request is running")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@pytest.fixture
def background(engine: Launched) -> Iterator[Background]:
    work = Background(engine)
    yield work
    engine.post("/continue_generation")
    engine.post("/abort_request", {"abort_all": True})
    work.close()


def expect_death(engine: Launched, act: Callable[[], httpx.Response]) -> None:
    """The connection closes without an answer and the process ends by itself, not with success."""
    with pytest.raises(httpx.TransportError):
        act()
    assert engine.process.wait(60) != 0


# ---- generation ----------------------------------------------------------------------------------------------------


def test_generate_answers_with_text_ids_and_meta_info(engine: Launched) -> None:
    answer = engine.post(
        "/generate", {"input_ids": PROMPT, "rid": "one-0001", "sampling_params": {"max_new_tokens": 5}}
    )
    assert answer.status_code == 200
    body = answer.json()
    assert isinstance(body["text"], str)
    meta = body["meta_info"]
    assert meta["id"] == "one-0001"
    assert meta["prompt_tokens"] == len(PROMPT)
    assert meta["completion_tokens"] == len(body["output_ids"]) <= 5
    assert meta["finish_reason"]["type"] in {"stop", "length"}
    assert meta["cached_tokens"] >= 0
    assert meta["e2e_latency"] > 0
    assert isinstance(meta["weight_version"], str)
    assert meta["weight_versions"][0]["version"] == meta["weight_version"]


def test_greedy_answers_repeat(engine: Launched) -> None:
    body = {"text": "What is 12 + 30?", "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    first, second = (engine.post("/generate", body).json() for _ in range(2))
    assert first["output_ids"] == second["output_ids"]


def test_length_is_respected(engine: Launched) -> None:
    body = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {**LONG, "max_new_tokens": 7}}).json()
    assert len(body["output_ids"]) == 7
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 7}


def test_log_probs_have_sglang_shapes(engine: Launched) -> None:
    body = engine.post(
        "/generate",
        {
            "input_ids": PROMPT,
            "sampling_params": {**LONG, "max_new_tokens": 3},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 4,
            "token_ids_logprob": [5, 6],
        },
    ).json()
    meta = body["meta_info"]
    inputs, outputs = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert [row[1] for row in inputs] == PROMPT
    assert [row[1] for row in outputs] == body["output_ids"]
    assert inputs[0][0] is None
    assert all(len(row) == 3 and row[2] is None for row in inputs + outputs)
    assert all(row[0] <= 0 and math.isfinite(row[0]) for row in inputs[1:] + outputs)
    for side, length in (("input", len(PROMPT)), ("output", 3)):
        top = meta[f"{side}_top_logprobs"]
        chosen = meta[f"{side}_token_ids_logprobs"]
        assert len(top) == len(chosen) == length
        if side == "input":
            assert top[0] is None
            assert chosen[0] is None
        for row in top[side == "input" :]:
            values = [entry[0] for entry in row]
            assert len(row) == 4
            assert values == sorted(values, reverse=True)
        for row in chosen[side == "input" :]:
            assert [entry[1] for entry in row] == [5, 6]


def test_scoring_returns_one_value_more_than_the_response(engine: Launched) -> None:
    response = [21, 22, 23, 24]
    body = engine.post(
        "/generate",
        {
            "input_ids": PROMPT + response,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": len(PROMPT) - 1,
        },
    ).json()
    rows = body["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == [PROMPT[-1], *response]
    assert all(math.isfinite(row[0]) for row in rows[1:])
    assert body["output_ids"] == []


def test_batches_answer_in_order(engine: Launched) -> None:
    body = {"input_ids": [PROMPT, PROMPT[:3]], "rid": ["b-1", "b-2"], "sampling_params": {"max_new_tokens": 2}}
    answers = engine.post("/generate", body).json()
    assert [entry["meta_info"]["id"] for entry in answers] == ["b-1", "b-2"]
    assert [entry["meta_info"]["prompt_tokens"] for entry in answers] == [6, 3]


def test_generate_streams_cumulatively(engine: Launched) -> None:
    events = engine.events(
        "/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": {**LONG, "max_new_tokens": 6}}
    )
    assert events[-1] == b"[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert len(parts) > 1
    for before, after in itertools.pairwise(parts):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"].rstrip("\ufffd"))
    assert [part["meta_info"]["finish_reason"] is None for part in parts] == [True] * (len(parts) - 1) + [False]


@pytest.mark.parametrize("stream", [False, True])
def test_chat(engine: Launched, stream: bool) -> None:
    body = {
        "model": "a name nobody serves",
        "messages": [{"role": "user", "content": "2+3="}],
        "max_tokens": 6,
        "temperature": 0,
        "stream": stream,
    }
    if not stream:
        answer = engine.post("/v1/chat/completions", body).json()
        assert answer["object"] == "chat.completion"
        assert answer["model"] == body["model"], "any name is accepted: the gateway has to check it"
        assert isinstance(answer["choices"][0]["message"]["content"], str)
        assert (
            answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]
        )
        return
    whole = engine.post("/v1/chat/completions", {**body, "stream": False}).json()
    events = engine.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == b"[DONE]"
    parts = [json.loads(event) for event in events[:-1]]
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] > 0
    deltas = [part["choices"][0]["delta"] for part in parts[:-1]]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert parts[-2]["choices"][0]["finish_reason"] in {"stop", "length"}


def test_completions(engine: Launched) -> None:
    answer = engine.post("/v1/completions", {"model": "m", "prompt": "2+3=", "max_tokens": 4}).json()
    assert answer["object"] == "text_completion"
    assert isinstance(answer["choices"][0]["text"], str)


# ---- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", ["-1", "99999999"])
def test_a_bias_for_no_token_is_refused_and_tells_the_vocabulary(engine: Launched, token: str) -> None:
    """What a sidecar learns the size of the vocabulary from."""
    params = {"max_new_tokens": 1, "logit_bias": {token: 0.0}}
    answer = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
    assert answer.status_code == 400
    assert re.search(r"logit_bias must has keys in \[0, \d+\]", answer.json()["error"]["message"])


def test_a_bias_for_a_token_is_taken(engine: Launched) -> None:
    params = {"max_new_tokens": 1, "logit_bias": {"5": 1.0}}
    assert engine.post("/generate", {"input_ids": PROMPT, "sampling_params": params}).status_code == 200


@pytest.mark.parametrize("shortest", [-1, 5])
def test_a_shortest_length_below_zero_or_above_the_longest_is_refused(engine: Launched, shortest: int) -> None:
    params = {"max_new_tokens": 4, "min_new_tokens": shortest}
    assert engine.post("/generate", {"input_ids": PROMPT, "sampling_params": params}).status_code == 400


def test_a_load_is_what_the_scheduler_wrote_down_and_moves_while_it_works(
    engine: Launched, background: Background
) -> None:
    """What health is judged by: a long answer that comes whole changes it all the time."""
    running = background.generate(sampling_params={**LONG, "max_new_tokens": 300})
    background.wait_running()
    seen = set()
    while not running.done():
        (load,) = engine.get("/v1/loads").json()["loads"]
        seen.add((load["num_running_reqs"], load["num_used_tokens"], load["timestamp"]))
        time.sleep(0.02)
    assert running.result().status_code == 200
    assert len(seen) > 3


def test_semantic_and_validation_errors_have_different_bodies(engine: Launched) -> None:
    semantic = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {"temperature": -1}})
    assert (semantic.status_code, list(semantic.json())) == (400, ["error"])
    assert isinstance(semantic.json()["error"]["message"], str)
    shape = engine.post("/generate", {"text": {"not": "text"}})
    assert shape.status_code == 400
    garbage = engine.http.post("/generate", content=b"{", headers={"content-type": "application/json"})
    assert (garbage.status_code, garbage.json()["object"]) == (400, "error")
    chat = engine.post("/v1/chat/completions", {"model": "m", "messages": []})
    assert (chat.status_code, chat.json()["object"]) == (400, "error")
    assert engine.get("/get_load").status_code == 404


def test_a_stream_that_fails_is_200_with_an_error_event(engine: Launched) -> None:
    events = engine.events("/generate", {"input_ids": PROMPT, "stream": True, "sampling_params": {"top_p": 7}})
    assert json.loads(events[0])["error"]["code"] == 400
    assert events[-1] == b"[DONE]"


def test_a_request_id_in_flight_is_refused(engine: Launched, background: Background) -> None:
    background.generate(rid="twice", sampling_params=LONG)
    background.wait_running()
    assert engine.post("/generate", {"input_ids": PROMPT, "rid": "twice"}).status_code == 400


def test_the_wrong_key_is_unauthorized(start: Callable[..., Launched]) -> None:
    engine = start(api_key="generate-key", admin_key="admin-key")
    normal = {"authorization": "Bearer generate-key"}
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
    assert engine.post("/generate", body, headers=normal).status_code == 200
    assert engine.post("/generate", body, headers={"authorization": "Bearer nonsense"}).status_code == 401
    for path in ("/flush_cache", "/abort_request", "/pause_generation", "/release_memory_occupation"):
        refused = engine.post(path, headers=normal)
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
    engine.flush()
    bare = httpx.get(engine.spec.base_url + "/health", trust_env=False, timeout=30)
    assert bare.status_code == 200


# ---- information ---------------------------------------------------------------------------------------------------


def test_information_routes(engine: Launched) -> None:
    for new, old in (("/model_info", "/get_model_info"), ("/server_info", "/get_server_info")):
        assert set(engine.get(new).json()) == set(engine.get(old).json())
    info = engine.get("/model_info").json()
    assert info["served_model_name"] == "policy"
    assert info["is_generation"] is True
    assert info["weight_version"] == "default"
    assert engine.get("/server_info").json()["served_model_name"] == "policy"
    assert [card["id"] for card in engine.get("/v1/models").json()["data"]] == ["policy"]
    assert engine.get("/ready").status_code == 200
    assert engine.get("/metrics").status_code == 404


# ---- abort, pause, flush -------------------------------------------------------------------------------------------


def test_abort_matches_by_prefix(engine: Launched, background: Background) -> None:
    long = {name: background.generate(rid=name, sampling_params=LONG) for name in ("job-1", "job-10", "job-2")}
    background.wait_running(3)
    assert engine.post("/abort_request", {"rid": "job-1"}).status_code == 200
    for name in ("job-1", "job-10"):
        answer = long[name].result(30)
        assert answer.status_code == 200
        assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(answer.json()["output_ids"]) < LONG["max_new_tokens"]
    assert not long["job-2"].done()
    engine.post("/abort_request", {"abort_all": True})
    assert long["job-2"].result(30).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.post("/abort_request", {"rid": "never heard of"}).status_code == 200


def test_flush_fails_while_something_runs(engine: Launched, background: Background) -> None:
    engine.flush()
    background.generate(sampling_params=LONG)
    background.wait_running()
    assert engine.post("/flush_cache").status_code == 400


def test_pausing_with_abort_ends_what_runs_and_holds_what_comes(engine: Launched, background: Background) -> None:
    running = background.generate(sampling_params=LONG)
    background.wait_running()
    assert engine.post("/pause_generation", {}).status_code == 200
    assert running.result(30).json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.get("/ready").status_code == 503
    held = background.generate(sampling_params={"max_new_tokens": 2})
    assert engine.get("/model_info").status_code == 200
    engine.flush()
    assert not held.done()
    engine.post("/continue_generation")
    assert held.result(30).status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_other_pauses_keep_what_runs(engine: Launched, background: Background, mode: str) -> None:
    running = background.generate(rid="kept", sampling_params={**LONG, "max_new_tokens": 300})
    background.wait_running()
    assert engine.post("/pause_generation", {"mode": mode}).status_code == 200
    time.sleep(0.3)
    assert not running.done()
    engine.post("/continue_generation")
    answer = running.result(60).json()
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 300}


def test_an_unknown_pause_mode_does_not_validate(engine: Launched) -> None:
    assert engine.post("/pause_generation", {"mode": "nap"}).status_code == 400
    assert engine.get("/ready").status_code == 200


def test_a_client_that_leaves_aborts_its_stream(engine: Launched) -> None:
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": LONG}
    with engine.http.stream("POST", "/generate", json=body) as answer:
        next(answer.iter_raw())
    engine.flush()


# ---- memory --------------------------------------------------------------------------------------------------------


def test_memory_tags_come_and_go(engine: Launched) -> None:
    engine.flush()
    for tags in (["kv_cache"], ["weights", "cuda_graph"]):
        answer = engine.post("/release_memory_occupation", {"tags": tags})
        assert (answer.status_code, answer.json()) == (200, None)
    assert engine.get("/model_info").status_code == 200
    assert engine.post("/resume_memory_occupation", {"tags": None}).status_code == 200
    assert engine.post("/release_memory_occupation", {"tags": ["no such tag"]}).status_code == 200
    assert engine.http.post("/release_memory_occupation").status_code == 400, "a body is needed"


def test_requests_held_by_retract_may_sleep_through_a_release(engine: Launched, background: Background) -> None:
    running = background.generate(sampling_params={**LONG, "max_new_tokens": 100})
    background.wait_running()
    engine.post("/pause_generation", {"mode": "retract"})
    assert engine.post("/release_memory_occupation", {}).status_code == 200
    assert engine.post("/resume_memory_occupation", {}).status_code == 200
    engine.post("/continue_generation")
    assert running.result(60).json()["meta_info"]["completion_tokens"] == 100


# ---- weights -------------------------------------------------------------------------------------------------------


def test_an_update_from_disk_changes_path_and_served_name(updatable: Launched) -> None:
    engine = updatable
    before = engine.get("/model_info").json()
    bad = engine.post("/update_weights_from_disk", {"model_path": "/no/such/checkpoint"})
    assert (bad.status_code, bad.json()["success"]) == (400, False)
    assert engine.get("/model_info").json() == before
    path = engine.spec.model_path
    good = engine.post("/update_weights_from_disk", {"model_path": path, "weight_version": "0"})
    assert (good.status_code, good.json()["success"]) == (200, True)
    info = engine.get("/model_info").json()
    assert (info["model_path"], info["served_model_name"], info["weight_version"]) == (path, path, "0")


def test_weight_version_and_checksum(updatable: Launched) -> None:
    engine = updatable
    answer = engine.post("/update_weight_version", {"new_version": "v7"})
    assert (answer.status_code, answer.json()["new_version"]) == (200, "v7")
    assert engine.get("/model_info").json()["weight_version"] == "v7"
    first, second = (engine.post("/weights_checker", {"action": "checksum"}).json() for _ in range(2))
    assert first["success"] is True
    assert first == second
    assert engine.post("/weights_checker", {"action": "guess"}).status_code == 400


def test_an_update_works_while_paused_and_waits_otherwise(updatable: Launched) -> None:
    engine = updatable
    work = Background(engine)
    running = work.generate(sampling_params={**LONG, "max_new_tokens": 120})
    work.wait_running()
    body = {"model_path": engine.spec.model_path, "weight_version": "1"}
    assert engine.post("/update_weights_from_disk", body).status_code == 200
    assert running.result(5).json()["meta_info"]["finish_reason"]["type"] == "length", "it was waited for"
    engine.post("/pause_generation", {})
    assert engine.post("/update_weights_from_disk", {**body, "weight_version": "2"}).status_code == 200
    engine.post("/continue_generation")
    answer = engine.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}).json()
    assert answer["meta_info"]["weight_version"] == "2"
    work.close()


# ---- what kills ----------------------------------------------------------------------------------------------------


DEADLY = {
    "token outside the vocabulary": ("/generate", {"input_ids": [1, 2, 99_999_999]}),
    "negative start": ("/generate", {"input_ids": PROMPT, "return_logprob": True, "logprob_start_len": -2}),
    "too many top log-probs": (
        "/generate",
        {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 9_999_999},
    ),
    "empty text": ("/generate", {"text": ""}),
    # Beside others an empty prompt may live: SGLang dies of a step without any token.
    "empty prompts in a batch": ("/generate", {"input_ids": [[], []]}),
    "empty ids beside a text": ("/generate", {"input_ids": [], "text": "2 + 3"}),
    "completion of a token outside the vocabulary": ("/v1/completions", {"model": "m", "prompt": [1, 99_999_999]}),
    "completion with too many log-probs": ("/v1/completions", {"model": "m", "prompt": "2", "logprobs": 9_999_999}),
    "chat with too many log-probs": (
        "/v1/chat/completions",
        {
            "model": "m",
            "messages": [{"role": "user", "content": "2"}],
            "logprobs": True,
            "top_logprobs": 9_999_999,
        },
    ),
}
"""Each death costs a start, and of SGLang that is most of this suite's time: both are asked the same all the same."""


@pytest.mark.parametrize("case", DEADLY)
def test_deadly_requests(start: Callable[..., Launched], case: str) -> None:
    path, body = DEADLY[case]
    engine = start()
    expect_death(engine, lambda: engine.post(path, body))


def test_a_resume_of_resident_memory_kills(start: Callable[..., Launched]) -> None:
    engine = start()
    expect_death(engine, lambda: engine.post("/resume_memory_occupation", {}))


def test_a_release_under_way_kills(start: Callable[..., Launched]) -> None:
    engine = start(sim={"tokens_per_second": 400})
    work = Background(engine)
    running = work.generate(sampling_params=LONG)
    work.wait_running()
    expect_death(engine, lambda: engine.post("/release_memory_occupation", {}))
    assert isinstance(running.exception(30), httpx.TransportError)
    work.close()


def test_sigterm_drains(start: Callable[..., Launched]) -> None:
    engine = start(sim={"tokens_per_second": 400})
    work = Background(engine)
    running = work.generate(sampling_params={**LONG, "max_new_tokens": 120})
    work.wait_running()
    threading.Thread(target=engine.process.terminate).start()
    assert running.result(60).json()["meta_info"]["completion_tokens"] == 120
    engine.process.wait(60)
    work.close()
