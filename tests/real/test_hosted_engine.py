"""SGLang as a sidecar hosts it: frozen and back, given up with its requests answered, and off the card under load.

On a CPU the memory saver is a stand-in, so nothing here says that memory comes back: there is no meter.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from relax_slurm.forward import Upstream
from relax_slurm.wire.messages import WorkerState
from sidecars import hosted
from sidecars.hosted import HostedWorker, HostSettings
from sidecars.process import find_tagged
from tests.contract.engine_program import START_SECONDS, free_port, spec_of

KEY = "front"
PROMPT = [7, 8, 9, 10, 11, 12]
HEALTH = {
    "every_seconds": 0.5,
    "idle_seconds": 0.5,
    "answer_seconds": 10.0,
    "generate_seconds": 1.0,
    "mute_suspect": 1,
    "mute_failed": 3,
    "stalled_suspect": 3,
    "stalled_failed": 1000,
}


class Scene:
    """One hosted engine and a client of its guard."""

    def __init__(self, tmp: Path) -> None:
        self.upstream = Upstream()
        spec = spec_of("sglang", tmp, engine_args={"enable_weights_cpu_backup": True}, weight_source="ACTOR").to_wire()
        guard = {"host": "127.0.0.1", "port": free_port(), "generation": 1}
        settings = HostSettings(
            run_tag=f"hosted-real-{os.getpid()}",
            node="n1",
            logs=tmp,
            ledger=tmp / "ledger",
            guard_key=KEY,
            upstream=self.upstream,
        )
        self.told: list[str] = []
        args = {"worker_id": spec["worker_id"], "spec": spec, "guard": guard, "health": HEALTH}
        self.worker = HostedWorker.from_args(args, settings, lambda worker, event, detail: self.told.append(event))
        self.client = httpx.AsyncClient(
            base_url=str(self.worker.base_url),
            headers={"authorization": f"Bearer {KEY}"},
            timeout=120,
            trust_env=False,
            limits=httpx.Limits(max_connections=100),
        )

    async def ask(self, tokens: int, *, stream: bool = False) -> str:
        """`200`, another status, or `cut`."""
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": PROMPT, "sampling_params": params, "stream": stream}
        try:
            answer = await self.client.post("/generate", json=body)
        except httpx.TransportError:
            return "cut"
        return str(answer.status_code)

    async def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (self.told, self.worker.status())
            await asyncio.sleep(0.05)

    def schedulers(self) -> list[int]:
        """Pids of the engine's schedulers."""
        found = find_tagged(self.worker.spec.run_tag, self.worker.spec.worker_id)
        return [member.pid for member in found if b"scheduler" in Path(f"/proc/{member.pid}/cmdline").read_bytes()]


async def a_long_answer_and_a_probe_are_no_stall(at: Scene) -> None:
    assert await at.ask(900) == "200"
    await asyncio.sleep(3)  # idle long enough to be asked for a token, more than once
    assert at.told == []


async def a_frozen_scheduler_is_suspect_and_comes_back(at: Scene) -> None:
    waiting = asyncio.create_task(at.ask(4))
    pids = at.schedulers()
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    asking = asyncio.create_task(at.ask(4))
    await at.until(lambda: at.told == ["suspect"])
    assert await at.ask(4) == "503"
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    await at.until(lambda: at.told == ["suspect", "healthy"])
    assert (await waiting, await asking, await at.ask(4)) == ("200", "200", "200")
    at.told.clear()


async def it_leaves_and_comes_back_under_load(at: Scene) -> None:
    pid = at.worker.engine.pid
    many = [asyncio.create_task(at.ask(900, stream=number % 2 == 0)) for number in range(50)]
    await at.until(lambda: at.worker.status()["in_flight"] >= 40)
    await at.worker.close_admission(0.5)
    outcome = await at.worker.offload({"deadline_seconds": 60.0})
    assert outcome["result"] == "released"
    ends = Counter(await asyncio.gather(*many))
    print(f"50 requests: {dict(ends)}; offload took {outcome['seconds']:.2f} s")
    assert set(ends) <= {"200", "503", "cut"}
    assert (await at.worker.offload({"deadline_seconds": 60.0}))["result"] == "already_released"
    assert (at.worker.state, at.worker.engine.pid) == (WorkerState.ASLEEP, pid)
    assert (await at.worker.onload({"deadline_seconds": 60.0}))["result"] == "ready"
    at.worker.open_admission()
    assert (await at.worker.onload({"deadline_seconds": 60.0}))["result"] == "already_ready"
    assert await at.ask(4) == "200"
    assert (at.worker.state, at.worker.engine.pid, at.told) == (WorkerState.UP, pid, [])


async def one_that_stays_frozen_is_given_up(at: Scene) -> None:
    waiting = asyncio.create_task(at.ask(3000))
    await at.until(lambda: at.worker.status()["in_flight"] == 1)
    for member in find_tagged(at.worker.spec.run_tag, at.worker.spec.worker_id):
        os.kill(member.pid, signal.SIGSTOP)
    assert await waiting == "502"
    await at.until(lambda: at.told == ["suspect", "unhealthy"])
    await at.worker.stop(30.0)
    assert at.worker.state is WorkerState.EXITED
    assert find_tagged(at.worker.spec.run_tag) == []


STEPS: tuple[Callable[[Scene], Awaitable[None]], ...] = (
    a_long_answer_and_a_probe_are_no_stall,
    a_frozen_scheduler_is_suspect_and_comes_back,
    it_leaves_and_comes_back_under_load,
    one_that_stays_frozen_is_given_up,
)


@pytest.mark.timeout(600)
def test_an_engine_that_hangs_and_one_that_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "MUTE_TERM_SECONDS", 0.2)

    async def scenario() -> None:
        at = Scene(tmp_path)
        try:
            await asyncio.wait_for(at.worker.start(), START_SECONDS)
            at.worker.open_admission()
            for step in STEPS:
                began = time.monotonic()
                await step(at)
                print(f"{step.__name__}: {time.monotonic() - began:.1f} s")
        finally:
            await at.worker.stop(0.0)
            await at.client.aclose()
            await at.upstream.close()

    asyncio.run(scenario())
