"""Off the card and back: real simulated engines, a guard that records, and meters that lie."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.core.plan import WeightSource
from relax_slurm.forward import Upstream
from sidecars import residency
from sidecars.engine import ALL_TAGS, SGLangEngine, Tag
from sidecars.ledger import GIB, NodeLedger
from sidecars.residency import MemoryMeter, Result, Tenancy, WeightRestore
from sidecars.worker import EnginePorts
from tests.contract.engine_program import free_port, worker


class RecordingGuard:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.is_open = True
        self.calls: list[str] = []

    def open(self, *, backend_drained: bool = False) -> None:
        assert backend_drained
        self.is_open = True
        self.calls.append("open")

    async def close(self, drain_deadline_seconds: float) -> None:
        assert drain_deadline_seconds >= 0
        self.is_open = False
        self.calls.append("close")


class Stage:
    """An engine, its guard and its tenancy."""

    def __init__(self, engine: SGLangEngine, tmp_path: Path, meter: MemoryMeter | None) -> None:
        self.engine = engine
        self.guard = RecordingGuard()
        self.ledger = NodeLedger(tmp_path / "ledger", "localhost")
        self.tenancy = Tenancy(engine, self.guard, meter or self.ledger.used_by_gpu)

    async def request(self, upstream: Upstream, **body: Any) -> int:
        raw = b'{"text": "a", "sampling_params": {"max_new_tokens": 20000, "ignore_eos": true}}'
        answer = await upstream.request("POST", self.engine.worker.base_url + "/generate", (), raw, 60)
        return answer.status


@asynccontextmanager
async def stage(tmp_path: Path, *, meter: MemoryMeter | None = None, **changes: Any) -> AsyncIterator[Stage]:
    upstream = Upstream()
    engine = SGLangEngine(worker(tmp_path, **changes), upstream)
    made = Stage(engine, tmp_path, meter)
    try:
        await made.tenancy.note_before_start()
        await engine.start()
        await engine.wait_ready(time.monotonic() + 20)
        await made.tenancy.note_loaded()
        made.tenancy.opened()
        yield made
    finally:
        await engine.stop(0.2, 10)
        await upstream.close()


def test_there_and_back_with_requests_under_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        upstream = Upstream()
        async with stage(tmp_path, sim={"tokens_per_second": 50}) as it:
            flights = [asyncio.create_task(it.request(upstream)) for _ in range(3)]
            await asyncio.sleep(0.1)
            asleep = await it.tenancy.offload(20)
            assert asleep.result is Result.RELEASED, asleep.message
            assert asleep.ok
            assert it.guard.calls == ["close"]
            assert all(asleep.before[gpu] > 60 * GIB > 1 * GIB > asleep.after[gpu] for gpu in (0, 1))
            assert await asyncio.gather(*flights) == [200, 200, 200], "aborted requests are answered"
            again = await it.tenancy.offload(20)
            assert again.result is Result.ALREADY_RELEASED
            awake = await it.tenancy.onload(20)
            assert awake.result is Result.READY, awake.message
            assert it.guard.calls == ["close", "close", "open"]
            assert (await it.tenancy.onload(20)).result is Result.ALREADY_READY
            assert it.guard.calls[-1] == "open"
            assert it.engine.running
            assert not it.engine.paused
            assert awake.as_json()["ok"] is True
        await upstream.close()

    asyncio.run(scenario())


def test_a_card_that_is_slow_to_empty_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, sim={"release_seconds": 0.6}) as it:
            outcome = await it.tenancy.offload(20)
            assert outcome.result is Result.RELEASED
            assert outcome.seconds >= 0.55
            assert it.ledger.used(0) < GIB

    asyncio.run(scenario())


def test_a_card_that_stays_full_is_not_free_and_may_be_asked_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        held = {0: 70 * GIB, 1: 70 * GIB}

        def meter(gpus: Sequence[int]) -> Mapping[int, int]:
            return {gpu: held[gpu] for gpu in gpus}

        async with stage(tmp_path, meter=meter) as it:
            outcome = await it.tenancy.offload(0.5)
            assert outcome.result is Result.MEMORY_HELD
            assert not outcome.ok
            assert "GPU 0, 1" in outcome.message
            assert not it.guard.is_open
            held[0] = GIB
            assert (await it.tenancy.offload(0.2)).message.count("GPU 1 ") == 1
            held[1] = GIB
            assert (await it.tenancy.offload(5)).result is Result.RELEASED

    asyncio.run(scenario())


def test_what_others_hold_does_not_count(tmp_path: Path) -> None:
    """Training leaves some memory on the card; the drop is measured against what the engine took."""

    async def scenario() -> None:
        trainer = NodeLedger(tmp_path / "ledger", "localhost")
        trainer.take("trainer", [0, 1], 8 * GIB)
        async with stage(tmp_path, engine_args={"mem_fraction_static": 0.5}) as it:
            outcome = await it.tenancy.offload(20)
            assert outcome.result is Result.RELEASED
            assert outcome.after[0] >= 8 * GIB

    asyncio.run(scenario())


def test_a_cpu_engine_has_nothing_to_measure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, gpus=(), gpu_indexes=()) as it:
            outcome = await it.tenancy.offload(20)
            assert (outcome.result, outcome.before) == (Result.RELEASED, {})

    asyncio.run(scenario())


def test_an_unclear_release_is_doubtful_for_good(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, sim={"faults": ["hang_release"]}) as it:
            assert (await it.tenancy.offload(0.6)).result is Result.DOUBTFUL
            assert (await it.tenancy.offload(5)).result is Result.DOUBTFUL
            assert (await it.tenancy.onload(5)).result is Result.DOUBTFUL
            assert not it.guard.is_open

    asyncio.run(scenario())


def test_a_stuck_request_means_not_drained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as it:

            async def never(timeout_seconds: float = 0) -> bool:
                await asyncio.sleep(0)
                return False

            it.engine.flush = never  # type: ignore[method-assign]
            outcome = await it.tenancy.offload(0.4)
            assert outcome.result is Result.NOT_DRAINED
            assert it.engine.resident == ALL_TAGS, "nothing was released"
            assert not it.guard.is_open

    asyncio.run(scenario())


def test_an_engine_that_is_gone(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as it:
            await it.engine.stop(0, 5)
            for outcome in (await it.tenancy.offload(5), await it.tenancy.onload(5)):
                assert outcome.result is Result.ENGINE_GONE
            assert not it.guard.is_open

    asyncio.run(scenario())


def test_waking_up_on_a_card_that_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as it:
            assert (await it.tenancy.offload(20)).ok
            it.ledger.take("somebody else", [1], 40 * GIB)
            outcome = await it.tenancy.onload(20)
            assert outcome.result is Result.ENGINE_GONE
            assert not it.guard.is_open

    asyncio.run(scenario())


def test_actor_weights_are_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, weight_source=WeightSource.ACTOR) as it:
            assert (await it.tenancy.offload(20)).ok
            pending = await it.tenancy.onload(20)
            assert pending.result is Result.WEIGHTS_PENDING
            assert not it.guard.is_open
            await it.engine.update_weights_from_disk("sim/step-9", "9")
            assert (await it.tenancy.onload(20)).result is Result.READY
            assert it.guard.is_open

    asyncio.run(scenario())


@pytest.mark.parametrize("backup", [True, False])
def test_static_weights_are_right_after_waking(tmp_path: Path, backup: bool) -> None:
    async def scenario() -> None:
        upstream = Upstream()
        arguments = {"enable_weights_cpu_backup": backup}

        async def answer(engine: SGLangEngine) -> bytes:
            raw = b'{"text": "2+3=", "return_logprob": true}'
            result = await upstream.request("POST", engine.worker.base_url + "/generate", (), raw, 20)
            return result.body.split(b'"output_token_logprobs":')[1].split(b'"output_token_logprobs_length"')[0]

        async with stage(tmp_path, engine_args=arguments) as it:
            before = await answer(it.engine)
            assert (await it.tenancy.offload(20)).ok
            assert (await it.tenancy.onload(20)).result is Result.READY
            assert await answer(it.engine) == before
        await upstream.close()

    asyncio.run(scenario())


def test_weights_first_and_the_rest_later(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, weight_source=WeightSource.ACTOR) as it:
            assert (await it.tenancy.offload(20)).ok
            assert (await it.tenancy.onload(20, [Tag.WEIGHTS])).result is Result.PARTIAL
            await it.engine.update_weights_from_disk("sim/step-2", "2")
            assert not it.guard.is_open
            assert (await it.tenancy.onload(20)).result is Result.READY

    asyncio.run(scenario())


def test_both_at_once_take_turns(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path) as it:
            off, on = await asyncio.gather(it.tenancy.offload(20), it.tenancy.onload(20, restore=WeightRestore.BACKUP))
            assert (off.result, on.result) == (Result.RELEASED, Result.READY)
            assert it.guard.is_open

    asyncio.run(scenario())


def test_a_follower_is_asleep_when_its_own_cards_are_free(tmp_path: Path) -> None:
    """The head speaks to the engine; the follower's sidecar believes nothing but its own measurement."""

    async def scenario() -> None:
        upstream = Upstream()
        rendezvous = free_port()
        workers = [
            worker(
                tmp_path,
                worker_id=f"policy/replica-0#{rank}",
                node_rank=rank,
                nnodes=2,
                ports=EnginePorts(free_port(), free_port(), rendezvous, free_port()),
                log_path=str(tmp_path / f"engine{rank}.log"),
                sim={"node": f"n{rank}", "release_seconds": 0.3},
            )
            for rank in (0, 1)
        ]
        engines = [SGLangEngine(each, upstream) for each in workers]
        cards = [NodeLedger(tmp_path / "ledger", f"n{rank}") for rank in (0, 1)]
        stays = [Tenancy(engines[rank], RecordingGuard(), cards[rank].used_by_gpu) for rank in (0, 1)]
        try:
            await asyncio.gather(*(engine.start() for engine in engines))
            await asyncio.gather(*(engine.wait_ready(time.monotonic() + 20) for engine in engines))
            for stay in stays:
                await stay.note_loaded()
            alone = await stays[1].offload(0.2)
            assert alone.result is Result.MEMORY_HELD, "nothing was released yet"
            head, follower = await asyncio.gather(*(stay.offload(20) for stay in stays))
            assert (head.result, follower.result) == (Result.RELEASED, Result.RELEASED)
            assert all(used < GIB for ledger in cards for used in ledger.used_by_gpu((0, 1)).values())
            assert (await stays[1].offload(20)).result is Result.ALREADY_RELEASED
            head, follower = await asyncio.gather(*(stay.onload(20) for stay in stays))
            assert follower.ok
            assert head.result in {Result.READY, Result.WEIGHTS_PENDING}
            assert all(used > 60 * GIB for ledger in cards for used in ledger.used_by_gpu((0, 1)).values())
        finally:
            await asyncio.gather(*(engine.stop(0.2, 10) for engine in engines))
            await upstream.close()

    asyncio.run(scenario())


def test_a_meter_that_hangs_holds_neither_the_loop_nor_the_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_LAST_LOOK_SECONDS", 0.2)
    hangs, release = threading.Event(), threading.Event()

    def meter(gpus: Sequence[int]) -> Mapping[int, int]:
        if hangs.is_set():
            release.wait(30)
        return dict.fromkeys(gpus, 70 * GIB)

    async def scenario() -> None:
        async with stage(tmp_path, meter=meter) as it:
            hangs.set()
            turns = 0

            async def turn() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0.01)

            turning = asyncio.create_task(turn())
            outcome = await it.tenancy.offload(0.5)
            turning.cancel()
            assert outcome.result is Result.MEMORY_HELD
            assert "could not be measured" in outcome.message
            assert outcome.after == {}
            assert turns > 5
            assert it.engine.resident == ALL_TAGS, "what cannot be measured is not released"
            release.set()

    asyncio.run(scenario())


def test_a_meter_that_fails_says_so(tmp_path: Path) -> None:
    broken = False

    def meter(gpus: Sequence[int]) -> Mapping[int, int]:
        if broken:
            raise OSError("the driver is gone")
        return dict.fromkeys(gpus, 70 * GIB)

    async def scenario() -> None:
        nonlocal broken
        async with stage(tmp_path, meter=meter) as it:
            broken = True
            outcome = await it.tenancy.offload(5)
            assert outcome.result is Result.MEMORY_HELD
            assert "the driver is gone" in outcome.message

    asyncio.run(scenario())
