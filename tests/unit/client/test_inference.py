"""The direct client: discovery rarely, resolution alike, a POST at most once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from relax_slurm.client.inference import (
    InferenceClient,
    PolledDiscovery,
    SubscribedDiscovery,
    SyncInferenceClient,
)
from relax_slurm.core.discovery import ReplicaState
from relax_slurm.core.plan import Role
from relax_slurm.core.routing import RouteResolver
from relax_slurm.errors import (
    BadRequest,
    DeadlineExceeded,
    RelaxError,
    Unauthorized,
    Unavailable,
    UpstreamFailed,
)
from relax_slurm.forward import Exchange, HttpServer
from tests.unit.gateway.stage import COMPLETION, SERVED, TOKEN, Source, Stage, answers, complete, echo, run, view

ASK = {"text": "2+3="}


def polling(stage: Stage, **options: Any) -> tuple[PolledDiscovery, InferenceClient]:
    discovery = PolledDiscovery(stage.url, TOKEN, **options)
    return discovery, InferenceClient(discovery, engine_key="engine-key", timeout_seconds=20)


def test_two_calls_one_discovery_and_no_gateway_in_between() -> None:
    async def body(stage: Stage) -> None:
        discovery, client = polling(stage)
        async with client:
            for _ in range(2):
                answer = await client.generate({**ASK, "route_key": "math-data"}, Role.ROLLOUT, affinity_key="s-1")
                assert answer["path"] == "/generate"
                headers = dict(answer["headers"])
                assert headers["authorization"] == "Bearer engine-key"
                assert headers["x-smg-routing-key"] == "s-1"
                assert answer["body"] == '{"text":"2+3="}'
        assert discovery.fetches == 1
        assert len(stage.engine.requests) == 2
        text = (await stage.client.get("/metrics")).text
        assert 'role="rollout",route="engines",status="200"} 1' in text
        assert 'route="generate"' not in text

    run(body)


def test_callers_at_the_same_time_share_one_discovery() -> None:
    async def body(stage: Stage) -> None:
        discovery, client = polling(stage)
        async with client:
            await asyncio.gather(*(client.generate(ASK, Role.ROLLOUT) for _ in range(20)))
        assert discovery.fetches == 1

    run(body)


def test_chat_speaks_logical_names() -> None:
    async def body(stage: Stage) -> None:
        _, client = polling(stage)
        async with client:
            answer = await client.chat({"model": "maths", "messages": []}, Role.TEACHER)
            assert answer == {**COMPLETION, "model": "math"}
            assert stage.engine.body == {"messages": [], "model": SERVED}

    run(body, complete)


def test_a_batch_is_answered_with_a_list() -> None:
    async def body(stage: Stage) -> None:
        _, client = polling(stage)
        async with client:
            assert await client.generate({"text": ["a", "b"]}, Role.ROLLOUT) == [1, 2]

    run(body, answers(200, b"[1,2]"))


def test_the_gateway_and_the_client_choose_alike() -> None:
    async def body(stage: Stage) -> None:
        second = HttpServer(echo)
        urls = [stage.engine.url, f"http://127.0.0.1:{await second.start()}"]
        stage.source.views[Role.ROLLOUT] = view(Role.ROLLOUT, urls)
        _, client = polling(stage)
        async with client:
            for key in ("session-1", "ключ", "a b", "x" * 300):
                direct = await client.generate(ASK, Role.ROLLOUT, affinity_key=key)
                header = {"x-smg-routing-key": key.encode()}
                through = await stage.client.post("/rollout/generate", json=ASK, headers=header)  # type: ignore[arg-type]
                assert dict(direct["headers"])["host"] == dict(through.json()["headers"])["host"]
        await second.stop(0.2)

    run(body)


@pytest.mark.parametrize(
    ("status", "kind"), [(400, BadRequest), (401, Unauthorized), (503, Unavailable), (500, UpstreamFailed)]
)
def test_an_engines_refusal_keeps_its_status_and_words(status: int, kind: type[RelaxError]) -> None:
    async def body(stage: Stage) -> None:
        _, client = polling(stage)
        async with client:
            with pytest.raises(kind, match="no good") as caught:
                await client.generate(ASK, Role.ROLLOUT)
        assert caught.value.detail == {"status": status, "body": '{"error":"no good"}'}
        assert len(stage.engine.requests) == 1

    run(body, answers(status, b'{"error":"no good"}'))


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda c: c.generate(ASK, Role.ROLLOUT, model="physics"), BadRequest),
        (lambda c: c.generate({**ASK, "model": 7}, Role.ROLLOUT), BadRequest),
        (lambda c: c.generate({**ASK, "stream": True}, Role.ROLLOUT), BadRequest),
        (lambda c: c.generate({"text": object()}, Role.ROLLOUT), BadRequest),
        (lambda c: c.generate(ASK, Role.ROLLOUT, affinity_key="a\r\nx: y"), BadRequest),
        (lambda c: c.generate(ASK, Role.ROLLOUT, affinity_key=""), BadRequest),
    ],
)
def test_bad_calls_reach_nobody(call: Callable[[InferenceClient], Any], kind: type[RelaxError]) -> None:
    async def body(stage: Stage) -> None:
        _, client = polling(stage)
        async with client:
            with pytest.raises(kind):
                await call(client)
        assert stage.engine.requests == []

    run(body)


@pytest.mark.parametrize("reply", [b"", b"no json", b"[" * 50_000])
def test_a_broken_answer_is_an_upstream_failure(reply: bytes) -> None:
    async def body(stage: Stage) -> None:
        _, client = polling(stage)
        async with client:
            with pytest.raises(UpstreamFailed):
                await client.generate(ASK, Role.ROLLOUT)
            with pytest.raises(UpstreamFailed):
                await client.chat({"messages": []}, Role.ROLLOUT)

    run(body, answers(200, reply))


def test_a_lost_connection_is_not_replayed_and_puts_the_view_in_doubt() -> None:
    async def cut(exchange: Exchange) -> None:
        exchange.cut()

    async def body(stage: Stage) -> None:
        discovery, client = polling(stage, pause_seconds=0.0)
        async with client:
            for calls in (1, 2):
                with pytest.raises(UpstreamFailed):
                    await client.generate(ASK, Role.ROLLOUT)
                assert len(stage.engine.requests) == calls
                assert discovery.fetches == calls

    run(body, cut)


def test_timeout_and_cancellation_put_the_view_in_doubt() -> None:
    async def body(stage: Stage) -> None:
        reached = asyncio.Event()

        async def hang(exchange: Exchange) -> None:
            gone = asyncio.Event()
            exchange.on_gone(gone.set)
            reached.set()
            await gone.wait()
            exchange.cut()

        stage.engine.script = hang
        async with InferenceClient.subscribed(stage.source) as client:
            with pytest.raises(DeadlineExceeded):
                await client.generate(ASK, Role.ROLLOUT, timeout_seconds=0.1)
            assert stage.source.invalidated == [Role.ROLLOUT]
            reached.clear()
            asking = asyncio.create_task(client.generate(ASK, Role.TEACHER))
            await asyncio.wait_for(reached.wait(), 10)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert stage.source.invalidated == [Role.ROLLOUT, Role.TEACHER]
            assert len(stage.engine.requests) == 2

    run(body)


def test_a_view_that_says_not_ready_is_looked_at_once_more() -> None:
    async def body(stage: Stage) -> None:
        discovery, client = polling(stage, pause_seconds=0.0)
        async with client:
            stage.show(state=ReplicaState.SLEEPING)
            with pytest.raises(Unavailable):
                await client.generate(ASK, Role.ROLLOUT)
            assert discovery.fetches == 2
            stage.show()
            assert await client.generate(ASK, Role.ROLLOUT)
            assert discovery.fetches == 3
            assert len(stage.engine.requests) == 1

    run(body)


def test_looking_again_is_paced() -> None:
    async def body(stage: Stage) -> None:
        discovery, client = polling(stage, pause_seconds=60.0)
        stage.show(state=ReplicaState.SLEEPING)
        async with client:
            for _ in range(5):
                with pytest.raises(Unavailable):
                    await client.generate(ASK, Role.ROLLOUT)
        assert discovery.fetches == 1

    run(body)


def test_an_old_view_stands_in_for_a_silent_gateway_within_its_bound() -> None:
    async def body(stage: Stage) -> None:
        now = [100.0]
        discovery, client = polling(
            stage, clock=lambda: now[0], max_age_seconds=5.0, stale_seconds=10.0, pause_seconds=0.0
        )
        async with client:
            await client.generate(ASK, Role.ROLLOUT)
            stage.source.views.clear()
            now[0] = 108.0
            await client.generate(ASK, Role.ROLLOUT)
            assert discovery.fetches == 2
            now[0] = 111.0
            with pytest.raises(Unavailable):
                await client.generate(ASK, Role.ROLLOUT)
            assert len(stage.engine.requests) == 2

    run(body)


def test_a_wrong_token_is_said_at_once() -> None:
    async def body(stage: Stage) -> None:
        async with InferenceClient.polling(stage.url, "wrong") as client:
            with pytest.raises(Unauthorized, match="token"):
                await client.generate(ASK, Role.ROLLOUT)

    run(body)


def test_discovery_that_is_not_discovery_is_503() -> None:
    async def body(stage: Stage) -> None:
        for reply in (b"{}", b"no json", b'{"schema_version":1}'):
            stage.engine.script = answers(200, reply)
            async with InferenceClient.polling(stage.engine.url, None) as client:
                with pytest.raises(Unavailable):
                    await client.generate(ASK, Role.ROLLOUT)

    run(body)


def test_a_subscription_is_waited_for() -> None:
    async def body(stage: Stage) -> None:
        source, change = Source(), asyncio.Event()
        client = InferenceClient(SubscribedDiscovery(source, change.wait, wait_seconds=10.0))
        async with client:
            asking = asyncio.create_task(client.generate(ASK, Role.ROLLOUT))
            await asyncio.sleep(0)
            source.views[Role.ROLLOUT] = stage.source.views[Role.ROLLOUT]
            change.set()
            assert (await asking)["path"] == "/generate"
        with pytest.raises(Unavailable):
            await SubscribedDiscovery(Source()).view(Role.ROLLOUT)

    run(body)


def test_resolve_takes_turns_like_the_resolver() -> None:
    async def body(stage: Stage) -> None:
        held = view(Role.ROLLOUT, ["http://a:1", "http://b:1", "http://c:1"])
        source = Source({Role.ROLLOUT: held})
        resolver = RouteResolver()
        async with InferenceClient.subscribed(source) as client:
            for _ in range(5):
                assert await client.resolve(Role.ROLLOUT) == resolver.resolve(held)
            source.views[Role.ROLLOUT] = replace(held, epoch="000002-abcdef")
            assert (await client.resolve(Role.ROLLOUT)).url == "http://a:1"

    run(body)


def test_one_client_on_several_loops() -> None:
    async def body(stage: Stage) -> None:
        _, client = polling(stage)

        async def once() -> Any:
            answer = await client.generate(ASK, Role.ROLLOUT)
            await client.close()
            return answer

        for _ in range(2):
            assert (await asyncio.to_thread(lambda: asyncio.run(once())))["path"] == "/generate"
        assert (await client.generate(ASK, Role.ROLLOUT))["path"] == "/generate"
        await client.close()

    run(body)


def test_sync_client_from_several_threads() -> None:
    def work(stage: Stage) -> None:
        with SyncInferenceClient(lambda: polling(stage)[1]) as client, ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda i: client.generate({"text": str(i)}, Role.ROLLOUT), range(12)))
            assert [result["body"] for result in results] == [f'{{"text":"{i}"}}' for i in range(12)]
            with pytest.raises(BadRequest):
                client.generate(ASK, Role.ROLLOUT, model="physics")
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.generate(ASK, Role.ROLLOUT)

    async def body(stage: Stage) -> None:
        await asyncio.to_thread(work, stage)

    run(body)


def test_a_sync_client_that_cannot_be_made_leaves_no_thread() -> None:
    def broken() -> InferenceClient:
        raise BadRequest("no such run")

    with pytest.raises(BadRequest):
        SyncInferenceClient(broken)
