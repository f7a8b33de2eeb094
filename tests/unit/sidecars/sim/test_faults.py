"""Faults of the simulated engine, seen from outside; and what it must not cost."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from relax_slurm.core.plan import Role
from tests.contract.engine_program import launch, worker


def faulty(tmp_path: Path, kind: str, value: float = 0.0, **sim: Any) -> Any:
    return worker(tmp_path, sim={"faults": [{"kind": kind, "value": value}], **sim})


def test_it_dies_while_it_works(tmp_path: Path) -> None:
    with launch(faulty(tmp_path, "die_after_requests", 2, tokens_per_second=100)) as engine:
        assert engine.post("/generate", {"text": "2+3="}).status_code == 200
        with pytest.raises(httpx.TransportError):
            engine.post("/generate", {"text": "go on", "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}})
        assert engine.process.wait(20) == 1
        assert "injected fault die_after_requests" in engine.log()


def test_it_hangs_and_may_still_be_aborted(tmp_path: Path) -> None:
    with launch(faulty(tmp_path, "hang_generate", 1)) as engine:
        with pytest.raises(httpx.ReadTimeout):
            engine.post("/generate", {"text": "2+3="}, timeout=0.5)
        deadline = time.monotonic() + 10
        while engine.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline


def test_it_answers_rubbish(tmp_path: Path) -> None:
    with launch(faulty(tmp_path, "bad_json")) as engine:
        answer = engine.post("/generate", {"text": "2+3="})
        assert answer.status_code == 200
        with pytest.raises(json.JSONDecodeError):
            answer.json()


def test_it_ignores_term(tmp_path: Path) -> None:
    with launch(faulty(tmp_path, "ignore_term")) as engine:
        engine.process.terminate()
        assert engine.get("/health").status_code == 200


def test_it_asks_for_too_much(tmp_path: Path) -> None:
    with launch(faulty(tmp_path, "oom_start"), wait=False) as engine:
        assert engine.process.wait(20) == 12
        assert "CUDA out of memory" in engine.log()


def test_a_taken_port_is_said_plainly(tmp_path: Path) -> None:
    with launch(worker(tmp_path, sim={"ledger": None})) as first:
        spec = worker(tmp_path, ports=first.spec.ports, sim={"ledger": None}, log_path=str(tmp_path / "2.log"))
        with launch(spec, wait=False) as second:
            assert second.process.wait(20) == 1
            assert "is the port taken?" in second.log()


def test_generating_on_a_sleeping_engine_kills_it(tmp_path: Path) -> None:
    with launch(worker(tmp_path)) as engine:
        engine.post("/release_memory_occupation", {})
        with pytest.raises(httpx.TransportError):
            engine.get("/health_generate")
        assert engine.process.wait(20) == 1


def test_health_generates_unless_told_otherwise(tmp_path: Path) -> None:
    with launch(worker(tmp_path)) as engine:
        started = time.monotonic()
        assert engine.get("/health").status_code == 200
        plain = time.monotonic() - started
        started = time.monotonic()
        assert engine.get("/health_generate").status_code == 200
        assert time.monotonic() - started >= 1.0 > plain
        engine.post("/pause_generation")
        assert engine.get("/health").status_code == 200


def test_a_judge_judges_and_a_teacher_goes_on(tmp_path: Path) -> None:
    judge = worker(tmp_path, role=Role.GENRM, sim={"ledger": None})
    with launch(judge) as engine:
        body = {"messages": [{"role": "user", "content": "Reference answer: 7\nStudent answer: 7"}]}
        answer = engine.post("/v1/chat/completions", body).json()
        assert answer["choices"][0]["message"]["content"] == "1"
    teacher = worker(tmp_path, role=Role.TEACHER, sim={"ledger": None}, log_path=str(tmp_path / "t.log"))
    with launch(teacher) as engine:
        assert len(engine.post("/generate", {"text": "2+3="}).json()["text"]) > 5


def test_the_official_sdk_works(tmp_path: Path) -> None:
    with launch(worker(tmp_path, api_key="k", sim={"error_rate": 0.0})) as engine:
        client = openai.OpenAI(base_url=engine.spec.base_url + "/v1", api_key="k", max_retries=0)
        messages: Any = [{"role": "user", "content": "What is 12 + 30?"}]
        whole = client.chat.completions.create(model="policy", messages=messages, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == "42"
        assert whole.choices[0].logprobs is not None
        stream = client.chat.completions.create(model="policy", messages=messages, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "42"
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="policy", messages=[])
        client.close()


def test_it_stays_small(tmp_path: Path) -> None:
    with launch(worker(tmp_path)) as engine:
        for _ in range(20):
            engine.post("/generate", {"text": "2+3="})
        status = Path(f"/proc/{engine.process.pid}/status").read_text()
        resident = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert resident is not None
        assert int(resident.group(1)) < 45_000
        modules = Path(f"/proc/{engine.process.pid}/maps").read_text()
        assert "pydantic" not in modules
