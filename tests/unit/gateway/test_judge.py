"""GenRM's two forms of request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from relax_slurm.core.discovery import ReplicaState
from relax_slurm.core.plan import Role
from relax_slurm.gateway.judge import SAMPLING_TO_CHAT, chat_answer, chat_body, read_question
from tests.unit.gateway.stage import SERVED, Stage, answers, complete, run, view

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "grade é"}]}


def test_messages_become_a_chat_and_the_text_comes_back() -> None:
    async def body(stage: Stage) -> None:
        question = {
            **ASK,
            "model": "maths",
            "sampling_params": {"max_new_tokens": 8, "temperature": 0, "stop": ["\n"], "n": 1},
            "chat_template_kwargs": {"enable_thinking": False},
        }
        answer = await stage.client.post("/genrm/generate", json=question)
        assert (answer.status_code, answer.json()) == (200, {"response": "Paris"})
        assert stage.engine.requests[-1].path == "/v1/chat/completions"
        assert stage.engine.body == {
            "model": SERVED,
            "messages": ASK["messages"],
            "stream": False,
            "separate_reasoning": False,
            "max_tokens": 8,
            "temperature": 0,
            "stop": ["\n"],
            "chat_template_kwargs": {"enable_thinking": False},
        }

    run(body, complete)


@pytest.mark.parametrize(
    "question",
    [
        {},
        {**ASK, "text": "x"},
        {**ASK, "input_ids": [1]},
        {**ASK, "stream": True},
        {**ASK, "stream": None},
        {"messages": []},
        {"messages": "grade"},
        {"messages": ["grade"]},
        {"messages": [{"content": "x"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {**ASK, "sampling_params": []},
        {**ASK, "sampling_params": {"n": 2}},
        {**ASK, "sampling_params": {"spaces_between_special_tokens": False}},
        {**ASK, "sampling_params": {"tempratur": 1}},
        {**ASK, "chat_template_kwargs": 1},
        {**ASK, "return_logprob": True},
        {**ASK, "model": "physics"},
        {**ASK, "route_key": 7},
        {"text": "x", "stream": "no"},
    ],
)
def test_bad_questions_are_400_and_reach_nobody(question: dict[str, Any]) -> None:
    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/genrm/generate", json=question)
        assert answer.status_code == 400, answer.text
        assert stage.engine.requests == []

    run(body, complete)


def test_messages_belong_to_genrm_only() -> None:
    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/rollout/generate", json=ASK)
        assert answer.json()["path"] == "/generate"

    run(body)


def test_readiness_is_looked_at_again_after_rendering() -> None:
    async def body(stage: Stage) -> None:
        first = stage.source.looks + 1

        def fall_asleep(look: int) -> None:
            if look > first:
                sleeping = view(Role.GENRM, [stage.engine.url], state=ReplicaState.SLEEPING)
                stage.source.views[Role.GENRM] = sleeping

        stage.source.before_look = fall_asleep
        answer = await stage.client.post("/genrm/generate", json=ASK)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert stage.source.looks == first + 1
        assert stage.engine.requests == []

    run(body, complete)


def test_one_turn_per_question() -> None:
    async def body(stage: Stage) -> None:
        other = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
        port = other.sockets[0].getsockname()[1]
        stage.source.views[Role.GENRM] = view(Role.GENRM, [stage.engine.url, f"http://127.0.0.1:{port}"])
        codes = [(await stage.client.post("/genrm/generate", json=ASK)).status_code for _ in range(4)]
        assert codes == [200, 502, 200, 502]
        other.close()

    run(body, complete)


def test_a_compressed_answer_is_not_guessed_at() -> None:
    script = answers(200, b"\x1f\x8b", (b"content-encoding", b"gzip"), (b"content-type", b"application/json"))

    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/genrm/generate", json=ASK)
        assert answer.status_code == 502
        assert b"accept-encoding" not in dict(stage.engine.requests[-1].headers)

    run(body, script)


def test_every_sampling_parameter_has_its_place() -> None:
    body = json.dumps({**ASK, "sampling_params": dict.fromkeys(SAMPLING_TO_CHAT, 1)}).encode()
    chat = json.loads(chat_body(read_question(body), "m"))
    assert set(SAMPLING_TO_CHAT.values()) <= set(chat)


def test_without_a_length_both_ways_end_alike() -> None:
    assert json.loads(chat_body(read_question(json.dumps(ASK).encode()), "m"))["max_tokens"] == 128


def test_no_content_is_an_empty_response() -> None:
    assert chat_answer(b'{"choices":[{"message":{"content":null}}]}', "e") == b'{"response":""}'
