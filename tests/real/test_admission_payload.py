"""Requests that would end SGLang are kept from it by the guard, which learns the vocabulary from the engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from relax_slurm.forward import Upstream
from sidecars.admission import AdmissionGuard
from sidecars.engine_http import EngineHttp
from sidecars.payload_check import PayloadCheck
from sidecars.vocabulary import configured, vocabulary
from tests.contract.engine_program import launch, spec_of
from tests.unit.core.test_payload import PASSED, REFUSED, VOCABULARY

NOT_FOR_EVERY_ENGINE = ("input_embeds", "n", "session_params")
"""Fields of requests that pass the check and need an engine with other flags, or take long."""


@pytest.mark.timeout(900)
def test_the_deadly_are_answered_400_and_the_engine_lives(tmp_path: Path) -> None:
    with launch(spec_of("sglang", tmp_path, api_key="key")) as engine:

        async def scenario() -> None:
            upstream = Upstream()
            size = await vocabulary(engine.spec, EngineHttp(engine.spec, upstream))
            await upstream.close()
            assert size == VOCABULARY == configured(engine.spec.model_path, {})
            guard = AdmissionGuard(
                engine.spec.base_url, "key", generation=1, is_alive=lambda: True, payload_check=PayloadCheck(size)
            )
            port = await guard.start("127.0.0.1")
            guard.open()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as client:
                for path, _, body in REFUSED:
                    answer = await client.post(path, json=body)
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_request"), body
                for path, body in PASSED:
                    parameters = body.get("sampling_params")
                    asked = {*body, *(parameters if isinstance(parameters, dict) else ())}
                    if path != "/abort_request" and asked.isdisjoint(NOT_FOR_EVERY_ENGINE):
                        # Whatever the engine says to it, it survives.
                        await client.post(path, json={"max_tokens": 1, **body})
                short = {"max_new_tokens": 1}
                answer = await client.post("/generate", json={"input_ids": [7, 511], "sampling_params": short})
                assert answer.status_code == 200, answer.text
            await guard.stop(0.2)

        asyncio.run(scenario())
        assert engine.process.poll() is None
