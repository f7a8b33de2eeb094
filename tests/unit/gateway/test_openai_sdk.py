"""The official SDK, unmodified, against every role."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

from relax_slurm.core.plan import Role
from relax_slurm.forward import Exchange
from tests.unit.gateway.stage import COMPLETION, SERVED, TOKEN, Stage, run

WORDS = ["The", " capital", " is", " Paris"]


async def chat(exchange: Exchange) -> None:
    """An engine's chat route, whole or streamed."""
    if not json.loads(exchange.request.body).get("stream"):
        exchange.respond_json(200, COMPLETION)
        return
    exchange.start(200, [(b"content-type", b"text/event-stream")])
    for word in WORDS:
        chunk = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": SERVED,
            "choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}],
        }
        await exchange.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await exchange.write(b"data: [DONE]\n\n")
    exchange.end()


def client(stage: Stage, role: Role, token: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stage.url}/{role}/v1", api_key=token, max_retries=0, timeout=20)


@pytest.mark.parametrize("role", list(Role))
def test_models_chat_and_stream(role: Role) -> None:
    def work(stage: Stage) -> None:
        with client(stage, role) as sdk:
            model = sdk.models.list().data[0].id
            assert model == "math"
            answer = sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
            assert (answer.model, answer.choices[0].message.content) == ("math", "Paris")
            chunks = sdk.chat.completions.create(
                model=model, messages=[{"role": "user", "content": "hi"}], stream=True, max_tokens=8
            )
            assert [chunk.choices[0].delta.content for chunk in chunks] == WORDS

    async def body(stage: Stage) -> None:
        await asyncio.to_thread(work, stage)

    run(body, chat)


def test_errors_are_the_sdks_own() -> None:
    def work(stage: Stage) -> None:
        ask = {"messages": [{"role": "user", "content": "hi"}]}
        with client(stage, Role.ROLLOUT, "wrong") as sdk, pytest.raises(openai.AuthenticationError):
            sdk.models.list()
        with client(stage, Role.ROLLOUT) as sdk:
            with pytest.raises(openai.BadRequestError) as caught:
                sdk.chat.completions.create(model="physics", **ask)  # type: ignore[call-overload]
            assert "physics" in caught.value.message
            assert caught.value.code == "bad_request"
            stage.source.views.clear()
            with pytest.raises(openai.InternalServerError) as lost:
                sdk.chat.completions.create(model="math", **ask)  # type: ignore[call-overload]
            assert lost.value.status_code == 503

    async def body(stage: Stage) -> None:
        await asyncio.to_thread(work, stage)

    run(body, chat)
