"""The route table, the token, and the answers that need no engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from relax_slurm.core.discovery import ReplicaState, from_json
from relax_slurm.core.plan import Role
from relax_slurm.errors import MethodNotAllowed, NotFound
from relax_slurm.gateway.routes import ROUTES, Kind, find
from tests.unit.gateway.stage import TOKEN, Stage, run

CONTRACT = {
    "rollout": "POST generate, chat/completions, v1/chat/completions, scale_out, scale_out/{id}/cancel, scale_in; "
    "GET v1/models, engines, health, scale_out, scale_out/{id}, scale_in, scale_in/{id}",
    "genrm": "POST generate, chat/completions, v1/chat/completions; GET v1/models, engines, health, metrics",
    "teacher": "POST generate, chat/completions, v1/chat/completions; GET v1/models, engines, health",
}


def test_the_table_is_the_contract() -> None:
    wanted = {("GET", "/health"), ("GET", "/metrics"), ("GET", "/")}
    for role, rows in CONTRACT.items():
        for part in rows.split("; "):
            method, _, paths = part.partition(" ")
            wanted |= {(method, f"/{role}/{path}") for path in paths.split(", ")}
    assert {(route.method, route.path) for route in ROUTES} == wanted
    assert len(ROUTES) == len(wanted)
    for word in ("activate", "offload", "onload", "commit", "weights", "release"):
        assert not any(word in route.path for route in ROUTES)


def test_find() -> None:
    assert find("GET", "/rollout/scale_out/abc-1").path == "/rollout/scale_out/{id}"
    assert find("HEAD", "/health").kind is Kind.HEALTH
    for path in ("/rollout", "/rollout/scale_out/a/b", "/rollout/scale_out/", "/critic/generate", "/rollout/generate/"):
        with pytest.raises(NotFound):
            find("GET", path)
    with pytest.raises(MethodNotAllowed, match="POST"):
        find("GET", "/rollout/generate")
    with pytest.raises(MethodNotAllowed):
        find("DELETE", "/rollout/scale_out/abc")


def test_nothing_but_health_without_the_token() -> None:
    async def body(stage: Stage) -> None:
        for route in ROUTES:
            path = route.path.replace("{id}", "x")
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {TOKEN}"}):
                answer = await stage.stranger.request(route.method, path, headers=headers)
                if route.kind is Kind.HEALTH:
                    assert answer.status_code == 200
                    continue
                assert answer.status_code == 401, path
                assert answer.json()["error"]["code"] == "unauthorized"
                assert answer.headers["www-authenticate"] == "Bearer"
                assert TOKEN not in answer.text
        assert (await stage.stranger.get("/no/such/route")).status_code == 401
        assert (await stage.stranger.get("/rollout/health", headers={"authorization": f"bearer {TOKEN}"})).is_success
        assert stage.engine.requests == []

    run(body)


def test_models_and_engines() -> None:
    async def body(stage: Stage) -> None:
        for role in Role:
            models = (await stage.client.get(f"/{role}/v1/models")).json()
            entry = {"id": "math", "object": "model", "created": 0, "owned_by": role.value}
            assert models == {"object": "list", "data": [entry]}
            engines = await stage.client.get(f"/{role}/engines")
            assert from_json(engines.json()) == stage.source.views[role]
            assert (await stage.client.get(f"/{role}/engines?schema=2")).json() == engines.json()
            assert (await stage.client.get(f"/{role}/engines?schema=3")).status_code == 400
        first = (await stage.client.get("/rollout/engines?schema=1")).json()
        assert first["total_engines"] == 1
        assert first["models"]["math"]["engine_groups"][0]["engines"][0]["url"] == stage.engine.url
        assert (await stage.client.get("/genrm/engines?schema=1")).status_code == 400

    run(body)


def test_health_follows_the_registry() -> None:
    async def body(stage: Stage) -> None:
        ready = (await stage.client.get("/teacher/health")).json()
        assert ready == {
            "schema_version": 2,
            "role": "teacher",
            "gateway_alive": True,
            "registry_available": True,
            "ready": True,
            "models": {"math": {"state": "READY", "ready": True}},
        }
        assert (await stage.client.get("/genrm/health")).json() == {"status": "healthy", "service": "genrm"}
        assert (await stage.client.get("/genrm/health?schema=2")).json()["role"] == "genrm"
        assert (await stage.stranger.get("/health")).json()["ready"] is True
        stage.show(state=ReplicaState.SLEEPING)
        asleep = (await stage.client.get("/teacher/health")).json()
        assert (asleep["ready"], asleep["models"]["math"]) == (False, {"state": "SLEEPING", "ready": False})
        stage.source.views.clear()
        lost = await stage.client.get("/teacher/health")
        assert lost.status_code == 200
        assert (lost.json()["registry_available"], lost.json()["ready"], lost.json()["models"]) == (False, False, {})
        judge = await stage.client.get("/genrm/health")
        assert (judge.status_code, judge.json()["status"]) == (503, "unhealthy")
        open_to_all = await stage.stranger.get("/health")
        assert (open_to_all.status_code, open_to_all.json()["ready"]) == (200, False)
        assert "math" not in open_to_all.text
        for path in ("engines", "v1/models"):
            answer = await stage.client.get(f"/teacher/{path}")
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")

    run(body)


def test_a_role_that_the_run_does_not_have_is_404() -> None:
    async def body(stage: Stage) -> None:
        assert (await stage.client.get("/genrm/health")).status_code == 404
        assert (await stage.client.post("/genrm/generate", json={"text": "x"})).status_code == 404
        assert (await stage.client.get("/rollout/health")).status_code == 200
        assert "genrm" not in (await stage.client.get("/")).text

    run(body, roles=(Role.ROLLOUT,))


def test_scale_routes_say_which_row_is_missing() -> None:
    async def body(stage: Stage) -> None:
        for route in ROUTES:
            if route.kind is Kind.SCALE:
                answer = await stage.client.request(route.method, route.path.replace("{id}", "x"))
                assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_built")
                assert "R2" in answer.json()["error"]["message"]

    run(body)


def test_metrics_and_index() -> None:
    async def body(stage: Stage) -> None:
        await stage.client.post("/genrm/generate", json={"text": "x"})
        await stage.client.post("/rollout/generate", content=b"no json")
        text = (await stage.client.get("/metrics")).text
        assert 'relax_gateway_requests_total{role="genrm",route="generate",status="200"} 1' in text
        assert 'relax_gateway_requests_total{role="rollout",route="generate",status="400"} 1' in text
        assert 'relax_gateway_request_seconds_count{role="genrm",route="generate"} 1' in text
        assert 'relax_gateway_request_seconds_bucket{role="genrm",route="generate",le="+Inf"} 1' in text
        assert 'relax_gateway_in_flight{role="genrm"} 0' in text
        assert 'relax_gateway_ready{role="teacher"} 1' in text
        only = (await stage.client.get("/genrm/metrics")).text
        assert 'role="genrm"' in only
        assert "rollout" not in only
        page = await stage.client.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert all(route.path in page.text for route in ROUTES)
        head = await stage.client.head("/health")
        assert (head.status_code, head.content) == (200, b"")

    run(body)


def test_an_open_gateway_only_when_told_so() -> None:
    async def body(stage: Stage) -> None:
        assert (await stage.stranger.get("/rollout/engines")).status_code == 200

    run(body, token=None)


def test_states_are_shown_as_published() -> None:
    async def body(stage: Stage) -> None:
        held = stage.source.views[Role.ROLLOUT]
        assert held is not None
        stage.source.views[Role.ROLLOUT] = replace(held, revision=8)
        assert (await stage.client.get("/rollout/engines")).json()["topology_revision"] == 8

    run(body)


def test_a_body_without_the_token_is_refused_before_it_is_read() -> None:
    async def ask(stage: Stage, path: str, *lines: str) -> str:
        """The answer to a head whose body never comes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(stage.url.rpartition(":")[2]))
        try:
            writer.write("\r\n".join([f"POST {path} HTTP/1.1", "host: x", *lines, "", ""]).encode())
            return (await asyncio.wait_for(reader.read(), 10)).decode()
        finally:
            writer.close()

    async def body(stage: Stage) -> None:
        for path in ("/rollout/generate", "/rollout/v1/chat/completions", "/no/such/route", "/health"):
            for framing in ("content-length: 60000000", "transfer-encoding: chunked"):
                for token in ("x: y", "authorization: Bearer wrong", f"authorization: Basic {TOKEN}"):
                    head, _, text = (await ask(stage, path, framing, token, "x-request-id: mine")).partition("\r\n\r\n")
                    lines = head.split("\r\n")
                    assert lines[0] == "HTTP/1.1 401 Unauthorized"
                    assert {"www-authenticate: Bearer", "connection: close", "x-request-id: mine"} <= set(lines)
                    assert json.loads(text)["error"]["code"] == "unauthorized"
        assert "www-authenticate" in await ask(stage, "/rollout/generate", "content-length: 5", "connection: close")
        assert "401" in (await stage.client.get("/metrics")).text
        assert (await stage.stranger.get("/health")).status_code == 200
        assert stage.engine.requests == []

    run(body)
