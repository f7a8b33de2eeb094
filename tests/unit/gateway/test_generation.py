"""Generation through the gateway: bodies, headers, errors, streams."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest

from relax_slurm.core.discovery import EngineEntry, ReplicaState
from relax_slurm.core.plan import Role
from relax_slurm.forward import Exchange
from relax_slurm.gateway import app
from tests.unit.gateway.stage import COMPLETION, SERVED, TOKEN, Stage, answers, complete, run, view

GENERATE = [f"/{role}/generate" for role in Role]
CHAT = [f"/{role}/{path}" for role in Role for path in ("chat/completions", "v1/chat/completions")]


def test_a_payload_without_logical_fields_goes_through_untouched() -> None:
    raw = b'{ "text":"\\u00e9 caf\\u00e9", "sampling_params": {"temperature": 1.50, "stop":[ ]},\n"rid" : "a"}'

    async def body(stage: Stage) -> None:
        for path in GENERATE:
            answer = (await stage.client.post(path, content=raw)).json()
            assert answer["body"].encode() == raw
            assert answer["path"] == "/generate"

    run(body)


def test_logical_fields_are_removed_and_the_rest_is_kept_as_written() -> None:
    raw = b'{"model":"maths","text":"\\u00e9","n":1.50,"big":123456789012345678901234567890,"route_key":"math-data"}'

    async def body(stage: Stage) -> None:
        for path in GENERATE:
            answer = (await stage.client.post(path, content=raw)).json()
            assert answer["body"] == '{"text":"\\u00e9","n":1.50,"big":123456789012345678901234567890}'

    run(body)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b'"text"',
        b"null",
        b'{"text": "x"} trailing',
        b'{"text": NaN}',
        b"[" * 100_000,
        b'{"text":' + b"[" * 100_000,
        b'{"text":"x","model":""}',
        b'{"text":"x","model":7}',
        b'{"text":"x","model":null}',
        b'{"text":"x","model":"physics"}',
        b'{"text":"x","route_key":"physics"}',
        b'{"text":"x","route_key":["math-data"]}',
    ],
)
def test_bad_generate_bodies_are_400_and_reach_nobody(content: bytes) -> None:
    async def body(stage: Stage) -> None:
        for path in [*GENERATE, "/rollout/v1/chat/completions"]:
            answer = await stage.client.post(path, content=content)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"]
        assert stage.engine.requests == []

    run(body)


@pytest.mark.parametrize("content", [b'{"stream":1}', b'{"stream":"true"}', b'{"stream":[]}', b'{"stream":0}'])
def test_stream_must_be_a_boolean(content: bytes) -> None:
    async def body(stage: Stage) -> None:
        for path in [*CHAT, "/genrm/generate"]:
            sent = content if "chat" in path else content[:-1] + b',"text":"x"}'
            assert (await stage.client.post(path, content=sent)).status_code == 400
        assert stage.engine.requests == []

    run(body)


def test_chat_rewrites_the_model_there_and_back() -> None:
    async def body(stage: Stage) -> None:
        for path in CHAT:
            for model in ({"model": "math"}, {"model": "maths"}, {}, {"route_key": "math-data"}):
                question = {**model, "messages": [{"role": "user", "content": "é"}], "stream": False}
                answer = await stage.client.post(path, json=question)
                assert answer.json() == {**COMPLETION, "model": "math"}
                assert answer.headers["content-type"] == "application/json"
                assert stage.engine.body["model"] == SERVED
                assert "route_key" not in stage.engine.body
                assert stage.engine.requests[-1].path == "/v1/chat/completions"

    run(body, complete)


def test_headers_both_ways() -> None:
    def script(exchange: Exchange) -> None:
        names = [name.decode() for name, _ in exchange.request.headers]
        headers = [
            (b"content-type", b"application/json"),
            (b"x-engine", b"yes"),
            (b"x-request-id", b"engine-made"),
            (b"keep-alive", b"timeout=5"),
            (b"x-hop", b"1"),
            (b"connection", b"x-hop"),
        ]
        exchange.respond(200, json.dumps(names).encode(), headers)

    async def body(stage: Stage) -> None:
        for path, content in (
            ("/rollout/generate", b'{"text":"x"}'),
            ("/rollout/generate", b'{"text":"x","model":"math"}'),
        ):
            headers = {
                "x-request-id": "client-7",
                "x-smg-routing-key": "session-1",
                "x-custom": "kept",
                "connection": "keep-alive, x-secret-hop",
                "x-secret-hop": "1",
                "cookie": "a=b",
                "te": "trailers",
                "x-relax-key": "forged",
            }
            answer = await stage.client.post(path, content=content, headers=headers)
            seen = dict(stage.engine.requests[-1].headers)
            assert seen[b"x-request-id"] == b"client-7"
            assert seen[b"x-smg-routing-key"] == b"session-1"
            assert seen[b"x-custom"] == b"kept"
            assert seen[b"authorization"] == b"Bearer engine-key"
            assert seen[b"host"] == stage.engine.url.removeprefix("http://").encode()
            for gone in (b"x-secret-hop", b"cookie", b"te", b"x-relax-key"):
                assert gone not in seen
            assert TOKEN.encode() not in b"".join(seen.values())
            assert answer.headers["x-request-id"] == "client-7"
            assert answer.headers["x-engine"] == "yes"
            assert "x-hop" not in answer.headers
            assert "keep-alive" not in answer.headers

    run(body, script)


@pytest.mark.parametrize("path", ["/rollout/generate", "/rollout/v1/chat/completions", "/genrm/generate"])
def test_a_client_cannot_have_our_own_headers_removed(path: str) -> None:
    async def body(stage: Stage) -> None:
        named = "authorization, x-request-id, content-type, content-length, host, x-hop, X-Relax-Key"
        headers = {"connection": named, "x-request-id": "client-7", "x-hop": "1", "content-type": "text/plain"}
        messages = [{"role": "user", "content": "x"}]
        question = {"text": "x"} if path == "/rollout/generate" else {"messages": messages}
        answer = await stage.client.post(path, content=json.dumps(question), headers=headers)
        assert answer.is_success, answer.text
        assert answer.headers["x-request-id"] == "client-7"
        request = stage.engine.requests[-1]
        names = [name for name, _ in request.headers]
        assert len(names) == len(set(names))
        seen = dict(request.headers)
        assert seen[b"authorization"] == b"Bearer engine-key"
        assert seen[b"x-request-id"] == b"client-7"
        # a raw body's type was the client's own to withdraw; a body that was written here is JSON
        assert seen.get(b"content-type") == (None if path == "/rollout/generate" else b"application/json")
        assert int(seen[b"content-length"]) == len(request.body) > 0
        assert b"x-hop" not in seen
        assert b"connection" not in seen

    run(body, complete)


def test_without_an_engine_key_no_authorization_goes_on() -> None:
    async def body(stage: Stage) -> None:
        await stage.client.post("/rollout/generate", json={"text": "x"})
        assert b"authorization" not in dict(stage.engine.requests[-1].headers)

    run(body, engine_key=None)


def test_request_ids_are_made_when_missing_or_odd() -> None:
    async def body(stage: Stage) -> None:
        made = set()
        for headers in ({}, {}, {"x-request-id": ""}, {"x-request-id": "x" * 201}, {"x-request-id": b"\xff"}):
            answer = await stage.client.post("/rollout/generate", json={"text": "x"}, headers=headers)
            name = answer.headers["x-request-id"]
            assert dict(stage.engine.requests[-1].headers)[b"x-request-id"].decode() == name
            made.add(name)
        assert len(made) == 5
        refused = await stage.client.post("/rollout/generate", content=b"{", headers={"x-request-id": "mine"})
        assert refused.headers["x-request-id"] == "mine"

    run(body)


def test_the_affinity_header_may_not_be_empty() -> None:
    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/rollout/generate", json={"text": "x"}, headers={"x-smg-routing-key": ""})
        assert answer.status_code == 400

    run(body)


@pytest.mark.parametrize("state", [state for state in ReplicaState if state is not ReplicaState.READY])
def test_not_ready_is_503_and_sends_nothing(state: ReplicaState) -> None:
    async def body(stage: Stage) -> None:
        stage.show(state=state)
        for path in [*GENERATE, *CHAT]:
            answer = await stage.client.post(
                path, json={"text": "x", "messages": []} if "chat" in path else {"text": "x"}
            )
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert stage.engine.requests == []

    run(body)


def test_a_lost_registry_is_503() -> None:
    async def body(stage: Stage) -> None:
        stage.source.views.clear()
        for path in GENERATE:
            answer = await stage.client.post(path, json={"text": "x"})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        stage.show()
        assert (await stage.client.post("/rollout/generate", json={"text": "x"})).status_code == 200

    run(body)


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_an_engines_own_error_is_passed_on(status: int) -> None:
    error = b'{"object":"error", "message":"too long" }'
    script = answers(status, error, (b"content-type", b"application/json"), (b"retry-after", b"7"))

    async def body(stage: Stage) -> None:
        for path, sent in [
            ("/rollout/generate", {"text": "x"}),
            ("/rollout/v1/chat/completions", {"messages": []}),
            ("/rollout/v1/chat/completions", {"messages": [], "stream": True}),
            ("/genrm/generate", {"messages": [{"role": "user", "content": "x"}]}),
        ]:
            answer = await stage.client.post(path, json=sent)
            assert (answer.status_code, answer.content, answer.headers["retry-after"]) == (status, error, "7")

    run(body, script)


@pytest.mark.parametrize("reply", [b"", b"not json", b"[1]", b'{"choices":[]}', b'{"choices":[{"message":7}]}'])
def test_bad_upstream_json_is_502(reply: bytes) -> None:
    async def body(stage: Stage) -> None:
        judged = await stage.client.post("/genrm/generate", json={"messages": [{"role": "user", "content": "x"}]})
        assert (judged.status_code, judged.json()["error"]["code"]) == (502, "upstream_failed")
        chat = await stage.client.post("/rollout/v1/chat/completions", json={"messages": []})
        assert chat.status_code == (200 if reply.startswith(b"{") else 502)

    run(body, answers(200, reply, (b"content-type", b"application/json")))


def test_a_dead_engine_is_502_and_the_post_is_sent_once() -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    async def body(stage: Stage) -> None:
        for path in ("/rollout/generate", "/rollout/v1/chat/completions"):
            before = len(stage.engine.requests)
            answer = await stage.client.post(path, json={"text": "x"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
            assert len(stage.engine.requests) == before + 1
        assert stage.source.invalidated == [Role.ROLLOUT]
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]
        stage.engine.url = f"http://127.0.0.1:{port}"
        stage.show()
        assert (await stage.client.post("/teacher/generate", json={"text": "x"})).status_code == 502
        assert stage.source.invalidated == [Role.ROLLOUT, Role.TEACHER]

    run(body, cut)


def test_the_deadline_is_504_and_invalidates() -> None:
    async def hang(exchange: Exchange) -> None:
        gone = asyncio.Event()
        exchange.on_gone(gone.set)
        await gone.wait()
        exchange.cut()

    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/rollout/generate", json={"text": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        assert stage.source.invalidated == [Role.ROLLOUT]
        assert len(stage.engine.requests) == 1

    run(body, hang, deadline_seconds=0.1)


def test_a_client_that_leaves_closes_the_engines_connection_and_invalidates() -> None:
    async def body(stage: Stage) -> None:
        reached, closed = asyncio.Event(), asyncio.Event()

        async def hang(exchange: Exchange) -> None:
            exchange.on_gone(closed.set)
            reached.set()
            await closed.wait()
            exchange.cut()

        stage.engine.script = hang
        asking = asyncio.create_task(stage.client.post("/rollout/generate", json={"text": "x"}))
        await asyncio.wait_for(reached.wait(), 10)
        asking.cancel()
        await asyncio.wait_for(closed.wait(), 10)
        assert stage.source.invalidated == [Role.ROLLOUT]
        text = (await stage.client.get("/metrics")).text
        assert 'relax_gateway_in_flight{role="rollout"} 0' in text
        assert 'relax_gateway_requests_total{role="rollout",route="generate",status="0"} 1' in text

    run(body)


def test_a_body_that_is_too_large_is_413() -> None:
    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/rollout/generate", content=b'{"text":"' + b"x" * 3000 + b'"}')
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
        assert stage.engine.requests == []

    run(body, max_body_bytes=2000)


PIECES = [
    b'data: {"model":"',
    SERVED.encode(),
    b'"}\n',
    b"\n: ping\r\n\r\n",
    b"data: \xff\x00\n\n",
    b"data: [DONE]\n\n",
]


@pytest.mark.parametrize("path", ["/rollout/generate", "/teacher/v1/chat/completions", "/genrm/generate"])
def test_sse_bytes_out_are_bytes_in(path: str) -> None:
    async def body(stage: Stage) -> None:
        step = asyncio.Event()

        async def script(exchange: Exchange) -> None:
            exchange.start(200, [(b"content-type", b"text/event-stream"), (b"x-engine", b"1")])
            for piece in PIECES:
                await exchange.write(piece)
                await step.wait()
                step.clear()
            exchange.end()

        stage.engine.script = script
        request = {"stream": True, "messages": []} if "chat" in path else {"stream": True, "text": "x"}
        async with stage.client.stream("POST", path, json=request) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            got = []
            async for piece in answer.aiter_raw():
                # The engine waits for us: nothing on the way may hold a piece back.
                got.append(piece)
                step.set()
        assert got == PIECES

    run(body)


def test_a_stream_that_breaks_is_cut_and_not_tried_elsewhere() -> None:
    async def script(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        await exchange.write(b"data: 1\n\n")
        exchange.cut()

    async def body(stage: Stage) -> None:
        import httpx

        with pytest.raises(httpx.RemoteProtocolError):
            await stage.client.post("/rollout/generate", json={"text": "x", "stream": True})
        assert len(stage.engine.requests) == 1
        assert stage.source.invalidated == [Role.ROLLOUT]

    run(body, script)


def test_turns_are_taken_over_replicas_and_keys_stick() -> None:
    async def body(stage: Stage) -> None:
        from relax_slurm.forward import HttpServer
        from tests.unit.gateway.stage import echo, view

        second = HttpServer(echo)
        url = f"http://127.0.0.1:{await second.start()}"
        stage.source.views[Role.ROLLOUT] = view(Role.ROLLOUT, [stage.engine.url, url])

        async def host(**headers: str) -> Any:
            answer = await stage.client.post("/rollout/generate", json={"text": "x"}, headers=headers)
            return dict(answer.json()["headers"])["host"]

        turns = [await host() for _ in range(4)]
        assert turns[0] != turns[1]
        assert turns[:2] == turns[2:]
        for key in ("a", "b", "c", "d"):
            assert len({await host(**{"x-smg-routing-key": key}) for _ in range(3)}) == 1
        await second.stop(0.2)

    run(body)


def test_a_request_at_a_lost_engine_is_answered_and_never_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "WATCH_SECONDS", 0.02)

    def never(exchange: Exchange) -> None:
        """Takes it and says nothing."""

    async def body(stage: Stage) -> None:
        asking = [asyncio.create_task(stage.client.post("/teacher/generate", json={"text": "1"})) for _ in range(3)]
        async with asyncio.timeout(10):
            while len(stage.engine.requests) < 3:
                await asyncio.sleep(0.01)
        stage.show(state=ReplicaState.UNKNOWN, engines=shown(stage, ReplicaState.STOPPING))
        await asyncio.sleep(0.3)
        assert not any(each.done() for each in asking), "its sidecar still has the say"
        stage.show(state=ReplicaState.UNKNOWN, engines=shown(stage, ReplicaState.UNKNOWN))
        for each in asking:
            answer = await each
            assert answer.status_code == 502
            assert "not sent elsewhere" in answer.json()["error"]["message"]
        assert len(stage.engine.requests) == 3

    run(body, never, doubt_seconds=0.1)


def shown(stage: Stage, state: ReplicaState) -> tuple[EngineEntry, ...]:
    return (EngineEntry("math/replica-0", stage.engine.url, state, state is ReplicaState.READY, 1),)


def outside(stage: Stage) -> None:
    """Everything behind the gateway is somebody else's now."""
    for role in Role:
        model = view(role, [stage.engine.url]).models["math"]
        engines = tuple(replace(engine, engine_id="math/external-0", external=True) for engine in model.engines)
        stage.show(engines=engines)


def test_somebody_elses_engine_gets_its_own_key_or_none_and_never_ours() -> None:
    async def body(stage: Stage) -> None:
        outside(stage)
        for role, path in [(role, f"/{role}/generate") for role in Role]:
            assert (await stage.client.post(path, json={"text": "x"})).status_code == 200
            sent = stage.engine.requests[-1].headers.get(b"authorization")
            assert sent == (b"Bearer theirs" if role is Role.TEACHER else None)
            assert b"engine-key" not in repr(stage.engine.requests[-1].headers).encode()

    run(body, external_keys={(Role.TEACHER, "math/external-0"): "theirs"})


def test_without_a_guard_in_front_the_gateway_looks_at_payloads() -> None:
    async def body(stage: Stage) -> None:
        outside(stage)
        for deadly in ({"input_ids": [-1]}, {"text": "x", "return_logprob": True, "logprob_start_len": -5}):
            for path in GENERATE:
                assert (await stage.client.post(path, json=deadly)).status_code == 400
        assert stage.engine.requests == []

    run(body)
