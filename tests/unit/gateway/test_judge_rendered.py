"""Messages to a judge whose model folder this machine can read: rendered in a process, sent as token ids."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from relax_slurm.core.discovery import ReplicaState
from relax_slurm.core.plan import Role
from relax_slurm.forward import Exchange
from relax_slurm.gateway import judges
from relax_slurm.gateway.render_pool import RenderLimits
from relax_slurm.gateway.sources import RenderSource
from tests.unit.gateway.chat_folders import CHATML, write_folder
from tests.unit.gateway.stage import COMPLETION, Script, Stage, answers, run, view
from tests.unit.gateway.test_render import GOLDEN

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hello world"}]}
TEMPLATE = (
    "{% if messages[0].content == 'bad' %}{{ raise_exception('no bad words') }}{% endif %}"
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% endif %}" + CHATML
)
Body = Callable[[Stage], Coroutine[Any, Any, None]]


def engine(exchange: Exchange) -> None:
    """Answers both ways of asking."""
    text = exchange.request.path == "/generate"
    exchange.respond_json(200, {"text": "Paris", "meta_info": {}} if text else COMPLETION)


def judged(tmp_path: Path, body: Body, script: Script = engine, **limits: Any) -> Path:
    """Run the test with a gateway that renders for `math`; the folder."""
    folder = write_folder(tmp_path / "m", TEMPLATE)
    rendering = RenderLimits(**{"processes": 1, **limits})
    run(body, script, judges={"math": RenderSource(str(folder))}, rendering=rendering)
    return folder


def test_the_engine_gets_ids_and_the_text_comes_back(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        sampling = {"max_new_tokens": 8, "temperature": 0, "spaces_between_special_tokens": False, "n": 1}
        answer = await stage.client.post("/genrm/generate", json={**ASK, "model": "maths", "sampling_params": sampling})
        assert (answer.status_code, answer.json()) == (200, {"response": "Paris"})
        assert answer.headers["x-request-id"]
        assert stage.engine.requests[-1].path == "/generate"
        assert stage.engine.body == {"input_ids": GOLDEN, "sampling_params": sampling, "stream": False}
        assert (await stage.client.post("/genrm/generate", json=ASK)).status_code == 200
        assert stage.engine.body == {"input_ids": GOLDEN, "sampling_params": {}, "stream": False}
        metrics = (await stage.client.get("/genrm/metrics")).text
        assert 'relax_gateway_requests_total{role="genrm",route="generate",status="200"} 2' in metrics
        assert 'relax_gateway_in_flight{role="genrm"} 0' in metrics

    judged(tmp_path, body)


def test_a_body_of_ours_is_json_whatever_the_client_called_its_own(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        form = {"content-type": "application/x-www-form-urlencoded"}
        for path in ("/genrm/generate", "/genrm/v1/chat/completions"):
            answer = await stage.client.post(path, content=json.dumps(ASK), headers=form)
            assert answer.status_code == 200
            kinds = [value for name, value in stage.engine.requests[-1].headers if name == b"content-type"]
            assert kinds == [b"application/json"]

    judged(tmp_path, body)


def test_other_forms_need_no_renderer(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        assert (await stage.client.post("/genrm/generate", json={"text": "x"})).status_code == 200
        chat = {"model": "math", **ASK}
        assert (await stage.client.post("/genrm/v1/chat/completions", json=chat)).status_code == 200
        assert [request.path for request in stage.engine.requests] == ["/generate", "/v1/chat/completions"]

    judged(tmp_path, body)


def test_the_gateway_imports_no_renderer() -> None:
    code = "import sys, relax_slurm.control.gateway_process; print({'jinja2', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        ({"messages": [{"role": "user", "content": "bad"}]}, "no bad words"),
        ({"messages": [{"role": "user"}]}, ""),
        ({**ASK, "chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({**ASK, "sampling_params": {"n": 2}}, "sampling_params.n"),
        ({**ASK, "return_logprob": True}, "return_logprob"),
    ],
)
def test_bad_questions_are_400_and_reach_nobody(tmp_path: Path, question: dict[str, Any], reason: str) -> None:
    async def body(stage: Stage) -> None:
        answer = await stage.client.post("/genrm/generate", json=question)
        if reason:
            assert answer.status_code == 400, answer.text
            assert reason in answer.json()["error"]["message"]
            assert stage.engine.requests == []
        else:
            assert answer.status_code == 200, "the template decides what a message must have"

    judged(tmp_path, body)


def test_a_template_that_loops_is_504_and_nothing_else_suffers(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        await stage.client.post("/genrm/generate", json=ASK)
        hang = {"messages": [{"role": "user", "content": "hang"}]}
        hanging = asyncio.create_task(stage.client.post("/genrm/generate", json=hang))
        await asyncio.sleep(0.05)
        others = await asyncio.gather(*(stage.client.get("/health") for _ in range(20)))
        assert {answer.status_code for answer in others} == {200}
        assert not hanging.done(), "the loop was free all the time"
        answer = await hanging
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")
        assert (await stage.client.post("/genrm/generate", json=ASK)).status_code == 200
        assert len(stage.engine.requests) == 2

    judged(tmp_path, body, render_seconds=1.0)


def test_readiness_is_looked_at_again_after_rendering(tmp_path: Path) -> None:
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

    judged(tmp_path, body)


def test_a_folder_that_is_not_there_is_left_to_the_engine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "later"

    async def body(stage: Stage) -> None:
        for _ in range(2):
            answer = await stage.client.post("/genrm/generate", json=ASK)
            assert answer.json() == {"response": "Paris"}
            assert stage.engine.requests[-1].path == "/v1/chat/completions"
        monkeypatch.setattr(judges, "LOOK_AGAIN_SECONDS", -1.0)
        stage.gateway._generation._judges._unusable.clear()
        await stage.client.post("/genrm/generate", json=ASK)
        write_folder(folder)
        assert (await stage.client.post("/genrm/generate", json=ASK)).status_code == 200
        assert stage.engine.requests[-1].path == "/generate"

    run(body, engine, judges={"math": RenderSource(str(folder))})
    told = [record.getMessage() for record in caplog.records if "chat route" in record.getMessage()]
    assert len(told) == 1
    assert "tokenizer.json cannot be read" in told[0]


def test_a_judge_that_only_its_engine_knows_is_named_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    async def body(stage: Stage) -> None:
        assert (await stage.client.post("/genrm/generate", json=ASK)).status_code == 200
        assert stage.engine.requests[-1].path == "/v1/chat/completions"

    run(body, engine, judges={"math": "'sim/judge' is no absolute path"})
    assert [record.getMessage() for record in caplog.records if "math" in record.getMessage()] == [
        "genrm model math: messages are rendered by its engine's chat route: 'sim/judge' is no absolute path"
    ]


def test_who_leaves_while_rendering_is_not_asked_for(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        await stage.client.post("/genrm/generate", json=ASK)
        hang = {"messages": [{"role": "user", "content": "hang"}]}
        with pytest.raises(httpx.ReadTimeout):
            await stage.client.post("/genrm/generate", json=hang, timeout=0.2)
        while stage.gateway._generation._tasks:
            await asyncio.sleep(0.005)
        text = (await stage.client.get("/genrm/metrics")).text
        assert 'relax_gateway_requests_total{role="genrm",route="generate",status="0"} 1' in text
        assert len(stage.engine.requests) == 1

    judged(tmp_path, body, render_seconds=20)


def test_a_stopping_gateway_does_not_wait_for_a_template(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        await stage.client.post("/genrm/generate", json=ASK)
        hang = {"messages": [{"role": "user", "content": "hang"}]}
        hanging = asyncio.create_task(stage.client.post("/genrm/generate", json=hang))
        await asyncio.sleep(0.1)
        began = asyncio.get_running_loop().time()
        await stage.gateway.stop(0.1)
        assert asyncio.get_running_loop().time() - began < 5
        with pytest.raises(httpx.HTTPError):
            (await hanging).raise_for_status()

    judged(tmp_path, body, render_seconds=20)


@pytest.mark.parametrize("answer", [b'{"output_ids":[1]}', b"[]", b"nothing", b'{"text":null}'])
def test_an_answer_without_text_is_502(tmp_path: Path, answer: bytes) -> None:
    async def body(stage: Stage) -> None:
        got = await stage.client.post("/genrm/generate", json=ASK)
        assert (got.status_code, got.json()["error"]["code"]) == (502, "upstream_failed")

    judged(tmp_path, body, answers(200, answer, (b"content-type", b"application/json")))


def test_an_engine_s_refusal_is_passed_on(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        got = await stage.client.post("/genrm/generate", json={**ASK, "sampling_params": {"tempratur": 1}})
        assert (got.status_code, got.content) == (400, b'{"error":"unknown field"}')

    judged(tmp_path, body, answers(400, b'{"error":"unknown field"}'))


def test_a_crowd_of_questions(tmp_path: Path) -> None:
    async def body(stage: Stage) -> None:
        results = await asyncio.gather(*(stage.client.post("/genrm/generate", json=ASK) for _ in range(200)))
        assert {answer.status_code for answer in results} == {200}
        assert len(stage.engine.requests) == 200
        assert all(json.loads(request.body)["input_ids"] == GOLDEN for request in stage.engine.requests)

    judged(tmp_path, body)
