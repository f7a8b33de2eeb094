"""The payload check in the guard: nothing deadly gets through, and everything else gets through as it came."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.payload import CHECKS, Rules, check
from relax_slurm.errors import BadRequest
from relax_slurm.forward import HttpServer
from sidecars.admission import ALLOWED, AdmissionGuard
from sidecars.payload_check import PayloadCheck, looks
from tests.contract.engine_program import Launched, launch, worker
from tests.unit.core.test_payload import FIELDS, JSON, PASSED, REFUSED, VOCABULARY
from tests.unit.sidecars.test_hosted import ask, host

RULES = Rules(VOCABULARY)
LOOKS = looks(RULES)
CHECK = PayloadCheck(VOCABULARY)


def encoded(body: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(body, separators=(",", ":")).encode()


@pytest.mark.parametrize(("path", "where", "body"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_refused(path: str, where: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        CHECK(path, encoded(body))
    assert caught.value.message.startswith(where)


@pytest.mark.parametrize(("path", "body"), PASSED, ids=lambda value: json.dumps(value)[:60])
def test_passed(path: str, body: dict[str, Any]) -> None:
    CHECK(path, encoded(body))


def test_every_checked_route_is_known() -> None:
    assert {path for path, route in ALLOWED.items() if route.checked} == set(CHECKS) == set(LOOKS)


def accepts(path: str, body: bytes) -> bool:
    """Whether the typed look lets the body pass."""
    try:
        LOOKS[path](body)
    except ValueError:  # what msgspec raises is one
        return False
    return True


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-3, 515)
    | st.just(10**30)
    | st.just("")
    | st.just("5")
    | st.lists(st.integers(-1, 512), max_size=3)
    | st.lists(st.lists(st.integers(-1, 512), max_size=2), max_size=2)
    | st.dictionaries(st.sampled_from(["n", "top_k", "stop_token_ids", "logit_bias"]), JSON)
)


@given(st.sampled_from(sorted(CHECKS)), st.dictionaries(st.sampled_from(FIELDS), PLAIN | JSON))
def test_the_typed_look_accepts_nothing_that_the_rules_refuse(path: str, body: dict[str, Any]) -> None:
    if accepts(path, encoded(body)):
        check(path, json.loads(encoded(body)), RULES)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"temperature": 0, "n": 2, "stop": ["x"]}, "rid": "a"}),
        ("/generate", {"text": "2", "stream": True, "return_logprob": True, "logprob_start_len": 0, "extra": {}}),
        ("/v1/chat/completions", {"messages": [], "logprobs": True, "top_logprobs": 3, "temperature": 1}),
        ("/v1/completions", {"prompt": "2", "logprobs": 3, "stop_token_ids": [7]}),
        ("/v1/completions", {"prompt": [2, 3]}),
    ],
)
def test_usual_requests_pass_at_the_first_look(path: str, body: dict[str, Any]) -> None:
    assert accepts(path, encoded(body))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing",
        b'{"text":"2"}{}',
        b'{"text":"2"',
        b"\xef\xbb\xbf" + b'{"text":"2"}',
        '{"input_ids":[-1]}'.encode("utf-16"),
        b'{"x":NaN}',
        b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: str(body[:20]),
)
def test_a_body_that_others_might_read_differently_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="send one JSON object in UTF-8"):
        CHECK("/generate", body)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"input\u005fids":[512]}',
        b'{"input_ids":[1],"input_ids":[512]}',
        b'{"sampling_params":{"n":1},"sampling_params":{"n":99999},"text":"2"}',
        b'{ "input_ids" : [ 512 ] }',
        b'{"input_ids":[18446744073709551617]}',
        b'{"input_ids":[1e3]}',
    ],
)
def test_spelling_does_not_help(body: bytes) -> None:
    with pytest.raises(BadRequest):
        CHECK("/generate", body)


def test_a_check_learns_its_vocabulary() -> None:
    fresh = PayloadCheck()
    fresh("/generate", b'{"input_ids":[100000],"top_logprobs_num":100000}')
    for path, body in [("/generate", b'{"input_ids":[-1]}'), ("/v1/completions", b'{"prompt":[-1]}')]:
        with pytest.raises(BadRequest, match="from 0 on"):
            fresh(path, body)
    fresh.learn(100)
    with pytest.raises(BadRequest, match="from 0 to 99"):
        fresh("/generate", b'{"input_ids":[100]}')


# --- through a guard ------------------------------------------------------------------------------------------------

Scenario = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def guarded(engine_url: str, scenario: Scenario) -> None:
    """Run the scenario with a client of an open guard before the engine at `engine_url`."""

    async def main() -> None:
        guard = AdmissionGuard(engine_url, None, generation=1, is_alive=lambda: True, payload_check=CHECK)
        port = await guard.start("127.0.0.1")
        guard.open()
        try:
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20, headers={"x-api-key": "k"}
            ) as client:
                await scenario(client)
        finally:
            await guard.stop(0.2)

    asyncio.run(main())


def test_bytes_pass_untouched() -> None:
    bodies = [
        b'{ "input_ids":[1,2] ,"x":1.50e+1,\n"y":"\\u00e9","x":2}',
        '{"text":"é日本","z":[null,{}]}'.encode(),
        b'{"input_ids":[[1],[2]],"sampling_params":[{"n":1},{}]}',
    ]
    seen: list[bytes] = []

    async def main() -> None:
        def handle(exchange: Any) -> None:
            seen.append(exchange.request.body)
            exchange.respond_json(200, {})

        server = HttpServer(handle)
        url = f"http://127.0.0.1:{await server.start()}"
        guard = AdmissionGuard(url, None, generation=1, is_alive=lambda: True, payload_check=CHECK)
        port = await guard.start("127.0.0.1")
        guard.open()
        async with httpx.AsyncClient(trust_env=False) as client:
            for body in bodies:
                answer = await client.post(f"http://127.0.0.1:{port}/generate", content=body)
                assert answer.status_code == 200
        await guard.stop(0.2)
        await server.stop(0.2)

    asyncio.run(main())
    assert seen == bodies


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A simulated engine, which dies of what kills a real one."""
    folder: Path = tmp_path_factory.mktemp("sim")
    with launch(worker(folder)) as launched:
        yield launched


def test_the_deadly_are_answered_400_and_the_engine_lives(engine: Launched) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for path, where, body in REFUSED:
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, (body, answer.text)
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == ("bad_request", "invalid_request_error")
            assert error["message"].startswith(where)
        good = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        answer = await client.post("/generate", json={**good, "logprob_start_len": 0, "top_logprobs_num": VOCABULARY})
        assert answer.status_code == 200, answer.text

    guarded(engine.spec.base_url, scenario)
    assert engine.process.poll() is None


def test_a_streamed_request_is_refused_before_the_stream(engine: Launched) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/generate", json={"input_ids": [-1], "stream": True})
        assert (answer.status_code, answer.headers["content-type"]) == (400, "application/json")

    guarded(engine.spec.base_url, scenario)


def test_a_hosted_worker_checks_with_the_vocabulary_of_its_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(sim={"vocab_size": 1024})
            await made.start()
            made.open_admission()
            good = {"input_ids": [1023], "sampling_params": {"max_new_tokens": 1}}
            assert await ask(made, body=good) == 200
            assert await ask(made, body={**good, "input_ids": [1024]}) == 400
            assert made.engine.running

    asyncio.run(scenario())
