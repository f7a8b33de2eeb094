"""The admission guard in front of a real HTTP engine."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import BadRequest, Forbidden, MethodNotAllowed, NotFound, RecoveryRequired
from relax_slurm.forward import Deadlines, HttpServer
from sidecars.admission import (
    ALLOWED,
    INFO_FIELDS,
    PASSES,
    Admission,
    AdmissionGuard,
    DrainResult,
    Kind,
    find,
    harmless,
)

CONTRACT = {
    "POST": "/generate /v1/chat/completions /chat/completions /v1/completions /abort_request /close_session",
    "GET": "/v1/models /server_info /get_server_info /model_info /get_model_info /health /health_generate",
}
SECRETS = {
    "api_key": "engine-key",
    "admin_api_key": "admin",
    "ssl_keyfile": "/etc/key.pem",
    "command": ["--api-key", "engine-key"],
    "internal_states": [{"api_key": "engine-key"}],
    "server_args": {"api_key": "engine-key"},
    "served_model_name": "judge",
    "tp_size": 2,
    "weight_version": "3",
}


class Engine:
    """Answers like an engine; /generate with {"wait": true} answers when released."""

    def __init__(self):
        self.requests = []
        self.gone = 0
        self.release = asyncio.Event()
        self.server = HttpServer(self.handle)

    async def handle(self, exchange):
        request = exchange.request
        self.requests.append(request)
        if request.method == "GET":
            if request.path == "/v1/models":
                exchange.respond_json(200, {"object": "list", "data": [{"id": "judge", "permission": [{"secret": 1}]}]})
            elif request.path == "/get_server_info":
                exchange.respond(500, b"Traceback: api_key=engine-key")
            elif request.path == "/get_model_info":
                exchange.respond_json(404, {"error": "api_key=engine-key"})
            else:
                exchange.respond_json(200, SECRETS)
            return
        body = json.loads(request.body or b"{}")
        if body.get("wait"):
            exchange.on_gone(self.left)
            await self.release.wait()
        if body.get("stream"):
            exchange.start(200, [(b"content-type", b"text/event-stream")])
            for index in range(3):
                await exchange.write(b"data: %d\n\n" % index)
                if index == 0 and body["stream"] == "wait":
                    await self.release.wait()
            exchange.end()
        else:
            exchange.respond_json(200, {"text": "hi"})

    def left(self):
        self.gone += 1


def guarded(scenario, *, loop="asyncio", **options):
    """Run `scenario(guard, engine, client)` with an open guard before a real engine."""

    async def main():
        engine = Engine()
        engine_port = await engine.server.start()
        options.setdefault("is_alive", lambda: True)
        guard = AdmissionGuard(f"http://127.0.0.1:{engine_port}", "engine-key", generation=4, **options)
        guard.open()
        port = await guard.start("127.0.0.1")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10) as client:
            try:
                await asyncio.wait_for(scenario(guard, engine, client), 20)
            finally:
                engine.release.set()
                await guard.stop(0.2)
                await engine.server.stop(0.2)

    if loop == "uvloop":
        uvloop.run(main())
    else:
        asyncio.run(main())


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


def test_the_table_is_the_contract():
    listed = {(method, path) for method, paths in CONTRACT.items() for path in paths.split()}
    assert {(route.method, path) for path, route in ALLOWED.items()} == listed
    assert set(PASSES) == set(Kind)
    assert [path for path, route in ALLOWED.items() if route.checked] == CONTRACT["POST"].split()[:4]


@given(st.text(max_size=40), st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"]))
def test_nothing_else_is_found(path, method):
    if path not in ALLOWED:
        with pytest.raises((NotFound, Forbidden)):
            find(method, path)


def test_methods_and_privileged_paths():
    assert find("HEAD", "/health").kind is Kind.LIVENESS
    for method, path in [("GET", "/generate"), ("POST", "/health"), ("DELETE", "/v1/models"), ("HEAD", "/generate")]:
        with pytest.raises(MethodNotAllowed):
            find(method, path)
    for path in (
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/flush_cache",
        "/pause_generation",
        "/continue_generation",
        "/update_weights_from_disk",
        "/update_weight_version",
        "/init_weights_update_group",
        "/weights_checker",
    ):
        with pytest.raises(Forbidden):
            find("POST", path)
    for path in ("/", "/metrics", "/generate/", "//generate", "/Generate", "/v1/embeddings", "/docs"):
        with pytest.raises(NotFound):
            find("GET", path)


@LOOPS
def test_requests_are_passed_on_with_the_engines_key(loop):
    async def scenario(guard, engine, client):
        headers = {"Authorization": "Bearer client", "X-Relax-Generation": "4", "X-SMG-Routing-Key": "g"}
        answer = await client.post("/generate?x=1", json={}, headers=headers)
        assert (answer.status_code, answer.json()) == (200, {"text": "hi"})
        seen = engine.requests[0]
        assert seen.target == b"/generate"
        assert seen.headers.get(b"authorization") == b"Bearer engine-key"
        assert seen.headers.get(b"x-relax-generation") is None
        assert seen.headers.get(b"x-smg-routing-key") == b"g"
        assert (await client.post("/abort_request", json={"rid": "1"})).status_code == 200
        assert (guard.in_flight, guard.admitted) == (0, 2)

    guarded(scenario, loop=loop)


@LOOPS
def test_streams_are_byte_exact(loop):
    async def scenario(guard, engine, client):
        answer = await client.post("/v1/chat/completions", json={"stream": True})
        assert answer.content == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"

    guarded(scenario, loop=loop)


def test_closed_doors():
    async def scenario(guard, engine, client):
        assert (await client.post("/flush_cache")).status_code == 403
        assert (await client.get("/metrics")).status_code == 404
        assert (await client.get("/generate")).status_code == 405
        assert (await client.post("/v1%2Fcompletions", json={})).status_code == 200
        assert engine.requests[0].target == b"/v1/completions"
        stale = await client.post("/generate", json={}, headers={"X-Relax-Generation": "3"})
        assert (stale.status_code, stale.headers["retry-after"]) == (503, "1")
        await guard.close(1)
        for method, path in [("POST", "/generate"), ("POST", "/abort_request"), ("GET", "/v1/models")]:
            answer = await client.request(method, path)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "unavailable"
        assert len(engine.requests) == 1

    guarded(scenario)


def test_info_is_filtered():
    async def scenario(guard, engine, client):
        for path in ("/server_info", "/model_info"):
            answer = await client.get(path)
            assert answer.json() == {"served_model_name": "judge", "tp_size": 2, "weight_version": "3"}
        assert (await client.get("/v1/models")).json() == {"object": "list", "data": [{"id": "judge"}]}
        broken = await client.get("/get_server_info")
        assert broken.status_code == 502
        assert "engine-key" not in broken.text
        missing = await client.get("/get_model_info")
        assert missing.status_code == 404
        assert "engine-key" not in missing.text
        assert (await client.head("/server_info")).status_code == 200

    guarded(scenario)


def test_the_name_of_a_model_survives_its_updates() -> None:
    info = {"served_model_name": "/checkpoints/7", "model_path": "/checkpoints/7"}
    assert harmless(info, INFO_FIELDS, "policy") == {"served_model_name": "policy", "model_path": "/checkpoints/7"}
    rows = [
        {"id": "/checkpoints/7", "object": "model", "root": "/checkpoints/7", "parent": None},
        {"id": "adapter", "object": "model", "root": "/adapters/1", "parent": "/checkpoints/7"},
    ]
    named = harmless({"object": "list", "data": rows}, INFO_FIELDS, "policy")["data"]
    assert [(row["id"], row["root"]) for row in named] == [("policy", "policy"), ("adapter", "/adapters/1")]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["api_key", "data", "id", "tp_size", "ssl"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON)
def test_no_unlisted_field_survives_at_any_depth(answer):
    def names(value):
        if isinstance(value, dict):
            return set(value).union(*map(names, value.values()))
        return set().union(*map(names, value)) if isinstance(value, list) else set()

    assert names(harmless(answer, INFO_FIELDS)) <= INFO_FIELDS


def test_health_is_the_process_and_health_generate_the_guard():
    alive = True

    async def scenario(guard, engine, client):
        nonlocal alive

        async def both():
            return [(await client.get(path)).status_code for path in ("/health", "/health_generate")]

        assert await both() == [200, 200]
        guard.hold()
        assert await both() == [200, 503]
        await guard.close(1)
        assert await both() == [200, 503]
        guard.open(backend_drained=True)
        assert await both() == [200, 200]
        alive = False
        assert await both() == [503, 503]
        assert not engine.requests, "the engine is never asked"

    guarded(scenario, is_alive=lambda: alive)


def test_a_required_key():
    async def scenario(guard, engine, client):
        assert (await client.get("/health")).status_code == 200
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "run-token"}):
            answer = await client.post("/generate", json={}, headers=headers)
            assert answer.status_code == 401
        good = await client.post("/generate", json={}, headers={"Authorization": "Bearer run-token"})
        assert good.status_code == 200
        assert engine.requests[0].headers.get(b"authorization") == b"Bearer engine-key"

    guarded(scenario, require_key="run-token")


def test_payload_checks_come_before_the_engine():
    def check(path, body):
        if b"killer" in body:
            raise BadRequest("input_ids: outside the vocabulary")

    async def scenario(guard, engine, client):
        assert (await client.post("/generate", json={"x": "killer"})).status_code == 400
        assert (await client.post("/abort_request", json={"rid": "killer"})).status_code == 200
        assert (await client.post("/generate", json={})).status_code == 200
        assert [request.path for request in engine.requests] == ["/abort_request", "/generate"]

    guarded(scenario, payload_check=check)


@LOOPS
def test_close_waits_for_what_runs(loop):
    async def scenario(guard, engine, client):
        running = [asyncio.create_task(client.post("/generate", json={"wait": True})) for _ in range(3)]
        await until(lambda: guard.in_flight == 3)
        closing = asyncio.create_task(guard.close(5))
        await until(lambda: guard.state is Admission.DRAINING)
        assert (await client.post("/generate", json={})).status_code == 503
        assert (await client.post("/abort_request", json={})).status_code == 200, "aborts help a drain"
        with pytest.raises(RecoveryRequired, match="draining"):
            guard.open(backend_drained=True)
        engine.release.set()
        assert await closing == DrainResult(drained=3, cancelled=0)
        assert [(await task).status_code for task in running] == [200, 200, 200]
        assert guard.state is Admission.CLOSED

    guarded(scenario, loop=loop)


@LOOPS
def test_close_cuts_what_is_left_at_the_deadline(loop):
    async def scenario(guard, engine, client):
        plain = asyncio.create_task(client.post("/generate", json={"wait": True}))
        stream = asyncio.create_task(client.post("/generate", json={"stream": "wait"}))
        await until(lambda: guard.in_flight == 2 and len(engine.requests) == 2)
        await asyncio.sleep(0.05)
        assert await guard.close(0.1) == DrainResult(drained=0, cancelled=2)
        assert guard.in_flight == 0
        answer = await plain
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        with pytest.raises(httpx.RemoteProtocolError):
            await stream
        await until(lambda: engine.gone == 1)
        assert await guard.close(0.1) == DrainResult(drained=0, cancelled=0)

    guarded(scenario, loop=loop)


def test_opening_again_needs_proof():
    async def scenario(guard, engine, client):
        guard.open()
        await guard.close(1)
        with pytest.raises(RecoveryRequired, match="not confirmed"):
            guard.open()
        assert guard.state is Admission.CLOSED
        guard.open(backend_drained=True)
        assert (await client.post("/generate", json={})).status_code == 200
        guard.hold()
        guard.hold()
        assert (await client.post("/generate", json={})).status_code == 503
        guard.open()
        assert (await client.post("/generate", json={})).status_code == 200
        await guard.close(1)
        guard.hold()
        assert guard.state is Admission.CLOSED

    guarded(scenario)


def test_a_leaving_client_frees_its_place_and_the_engine():
    async def scenario(guard, engine, client):
        task = asyncio.create_task(client.post("/generate", json={"wait": True}))
        await until(lambda: guard.in_flight == 1 and engine.requests)
        task.cancel()
        await until(lambda: guard.in_flight == 0)
        await until(lambda: engine.gone == 1)

    guarded(scenario)


def test_a_dead_or_silent_engine():
    async def scenario(guard, engine, client):
        silent = await client.post("/generate", json={"wait": True})
        assert silent.status_code == 504
        engine.release.set()
        await engine.server.stop(0.1)
        dead = await client.post("/generate", json={})
        assert dead.status_code == 502
        assert guard.in_flight == 0

    guarded(scenario, deadlines=Deadlines(0.2, 1))


async def announce(port, line, *headers):
    """The answer to a head whose body never comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            "\r\n".join([f"{line} HTTP/1.1", "host: x", "content-length: 60000000", *headers, "", ""]).encode()
        )
        return (await asyncio.wait_for(reader.read(), 10)).decode()
    finally:
        writer.close()


@LOOPS
def test_a_body_is_read_only_for_who_may_send_it(loop):
    key = "authorization: Bearer guard-key"

    async def scenario(guard, engine, client):
        port = client.base_url.port
        for line in ("POST /generate", "POST /abort_request", "GET /v1/models", "GET /health"):
            for wrong in ("x: y", "authorization: Bearer other", "authorization: guard-key"):
                answer = await announce(port, line, wrong)
                assert answer.startswith("HTTP/1.1 401 ")
                assert "connection: close" in answer
        assert (await announce(port, "POST /flush_cache", key)).startswith("HTTP/1.1 403 ")
        assert (await announce(port, "POST /nowhere", key)).startswith("HTTP/1.1 404 ")
        assert (await announce(port, "POST /health", key)).startswith("HTTP/1.1 405 ")
        guard.hold()
        answer = await announce(port, "POST /generate", key)
        assert answer.startswith("HTTP/1.1 503 ")
        assert "retry-after: " in answer
        guard.open()
        assert (await client.get("/health")).status_code == 200
        sent = await client.post("/generate", json={}, headers={"authorization": "Bearer guard-key"})
        assert sent.json() == {"text": "hi"}
        assert guard.server.buffered_bytes == 0

    guarded(scenario, loop=loop, require_key="guard-key")


def test_admission_that_closes_while_a_body_comes_lets_nothing_through():
    async def scenario(guard, engine, client):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{")
        await until(lambda: guard.server.buffered_bytes == 1)
        guard.hold()
        writer.write(b"}")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 503 ")
        writer.close()
        assert engine.requests == []

    guarded(scenario)
