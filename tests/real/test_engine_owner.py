"""The engine owner and its stay on the cards with SGLang itself: one engine, from its start to the proof of its end.

On a CPU the memory saver is a stand-in, so nothing here says that memory comes back: there is no meter.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.core.plan import WeightSource
from relax_slurm.errors import EngineFailed
from relax_slurm.forward import Response, Upstream
from sidecars import proc
from sidecars.admission import AdmissionGuard
from sidecars.engine import SGLangEngine, TagState
from sidecars.process import find_tagged
from sidecars.residency import Result, Tenancy
from sidecars.worker import WorkerSpec
from tests.contract.engine_program import START_SECONDS, free_port, spec_of
from tests.harness.launch import arguments

JSON = (b"content-type", b"application/json")
PROMPT = [7, 8, 9, 10, 11, 12]
LONG = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 0}}
SHORT = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0}}


class Scene:
    """One engine, the guard in front of it, and its stay."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.upstream = Upstream()
        self.engine = SGLangEngine(spec, self.upstream)
        self.guard = AdmissionGuard(
            spec.base_url, spec.api_key, generation=1, is_alive=lambda: self.engine.running, require_key="front"
        )
        self.guard_port = free_port()
        self.tenancy = Tenancy(self.engine, self.guard, None)

    async def generate(self, body: dict[str, Any], *, guarded: bool = True) -> Response:
        """One request, through the guard or straight to the engine."""
        base = f"http://127.0.0.1:{self.guard_port}" if guarded else self.spec.base_url
        key = b"front" if guarded else (self.spec.api_key or "").encode()
        headers = [JSON, (b"authorization", b"Bearer " + key)]
        return await self.upstream.request("POST", base + "/generate", headers, json.dumps(body).encode(), 120.0)

    async def output(self) -> list[int]:
        """What the engine says to the short prompt."""
        answer = await self.generate(SHORT)
        assert answer.status == 200, answer.body
        found: list[int] = json.loads(answer.body)["output_ids"]
        return found

    async def running(self, count: int) -> None:
        """Wait until the engine works on so many requests."""
        headers = [(b"authorization", b"Bearer " + (self.spec.api_key or "").encode())]
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            answer = await self.upstream.request("GET", self.spec.base_url + "/v1/loads", headers)
            if sum(load["num_running_reqs"] for load in json.loads(answer.body)["loads"]) >= count:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"fewer than {count} requests run")


@asynccontextmanager
async def scene(tmp: Path) -> AsyncIterator[Scene]:
    spec = spec_of(
        "sglang",
        tmp,
        weight_source=WeightSource.ACTOR,
        api_key="generate-key",
        admin_key="admin-key",
        engine_args={"enable_weights_cpu_backup": True},
    )
    stage = Scene(spec)
    try:
        yield stage
    finally:
        await stage.guard.stop()
        await stage.engine.stop(0.0, 20.0)
        await stage.upstream.close()


async def timed(work: Awaitable[Any]) -> tuple[Any, float]:
    began = time.monotonic()
    return await work, time.monotonic() - began


async def starts_ready_with_its_keys_hidden(stage: Scene) -> None:
    keys = Path(stage.spec.log_path).with_suffix(".keys.yaml")
    await stage.engine.start()
    assert keys.stat().st_mode & 0o077 == 0
    _, seconds = await timed(stage.engine.wait_ready(time.monotonic() + START_SECONDS))
    print(f"ready after {seconds:.1f} s")
    assert not keys.exists(), "it is read once"
    assert stage.engine.weights_valid
    for member in find_tagged(stage.spec.run_tag):
        words = arguments(member.pid)
        assert words
        assert not any("generate-key" in word or "admin-key" in word for word in words)
    await stage.guard.start("127.0.0.1", stage.guard_port)
    stage.guard.open()
    stage.tenancy.opened()
    naked = await stage.upstream.request("POST", stage.spec.base_url + "/generate", [JSON], b"{}")
    assert naked.status == 401


async def health_generates_nothing(stage: Scene) -> None:
    await stage.engine.pause()
    healthy, seconds = await timed(stage.engine.health())
    assert healthy
    assert seconds < 0.9, "a health check that generates takes a second, and 20 on a paused engine"
    await stage.engine.continue_()


async def offloads_under_load_and_comes_back(stage: Scene) -> None:
    before = await stage.output()
    guarded = [asyncio.create_task(stage.generate(LONG)) for _ in range(3)]
    direct = asyncio.create_task(stage.generate(LONG, guarded=False))
    await stage.running(4)
    outcome = await stage.tenancy.offload(30.0, drain_seconds=0.2)
    print(f"offloaded under load after {outcome.seconds:.2f} s")
    assert outcome.result is Result.RELEASED, outcome.message
    assert set(stage.engine.tags.values()) == {TagState.RELEASED}
    cut = json.loads((await direct).body)
    assert cut["meta_info"]["finish_reason"]["type"] == "abort"
    assert {(await task).status for task in guarded} <= {502, 503, 504}, "never a whole answer"
    assert (await stage.generate(SHORT)).status == 503
    healthy, seconds = await timed(stage.engine.health())
    assert healthy
    assert seconds < 0.9
    assert (await stage.tenancy.offload(10.0)).result is Result.ALREADY_RELEASED

    back = await stage.tenancy.onload(30.0)
    print(f"onloaded after {back.seconds:.2f} s")
    assert back.result is Result.READY, back.message
    assert await stage.output() == before
    assert (await stage.tenancy.onload(10.0)).result is Result.ALREADY_READY


async def goes_to_sleep_and_back_again_and_again(stage: Scene) -> None:
    before = await stage.output()
    for _ in range(3):
        assert (await stage.tenancy.offload(30.0)).ok
        assert (await stage.tenancy.onload(30.0)).ok
        assert await stage.output() == before


async def takes_weights_from_disk(stage: Scene) -> None:
    engine, path = stage.engine, stage.spec.model_path
    assert await engine.weight_version() == "default"
    with pytest.raises(EngineFailed):
        await engine.update_weights_from_disk("/no/such/checkpoint", "1")
    assert await engine.weight_version() == "default", "what failed changes nothing"
    before = await stage.output()
    await engine.update_weights_from_disk(path, "0")
    info = await engine.info()
    assert (info["weight_version"], info["served_model_name"]) == ("0", path), "0 is a version"
    assert engine.served_model_name == path
    assert await stage.output() == before


async def ends_without_a_trace(stage: Scene) -> None:
    members = find_tagged(stage.spec.run_tag)
    assert len(members) >= 3, "launcher, scheduler, detokenizer"
    end, seconds = await timed(stage.engine.stop(15.0, 10.0))
    print(f"stopped after {seconds:.1f} s with {end}")
    assert find_tagged(stage.spec.run_tag) == []
    assert not any(proc.alive(member.pid, member.start_ticks) for member in members)
    assert not await stage.engine.health()


STEPS: tuple[Callable[[Scene], Awaitable[None]], ...] = (
    starts_ready_with_its_keys_hidden,
    health_generates_nothing,
    offloads_under_load_and_comes_back,
    goes_to_sleep_and_back_again_and_again,
    takes_weights_from_disk,
    ends_without_a_trace,
)


@pytest.mark.timeout(900)
def test_one_engine_from_start_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with scene(tmp_path) as stage:
            for step in STEPS:
                print(step.__name__)
                await step(stage)

    asyncio.run(scenario())
