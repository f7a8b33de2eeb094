"""The engine owner against real simulated engines."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.core.engine_spec import OperationRefused
from relax_slurm.core.plan import Role, WeightSource
from relax_slurm.errors import EngineFailed, RecoveryRequired, StartupFailed, UpstreamFailed
from relax_slurm.forward import Upstream
from sidecars import proc
from sidecars.engine import ALL_TAGS, PauseMode, SGLangEngine, Tag, TagState
from sidecars.ledger import NodeLedger
from sidecars.process import tail
from sidecars.worker import EnginePorts, WorkerSpec
from tests.contract.engine_program import free_port, worker


@asynccontextmanager
async def engine_for(spec: WorkerSpec, *, ready: bool = True) -> AsyncIterator[SGLangEngine]:
    upstream = Upstream()
    engine = SGLangEngine(spec, upstream)
    try:
        await engine.start()
        if ready:
            await engine.wait_ready(time.monotonic() + 20)
        yield engine
    finally:
        await engine.stop(0.2, 10)
        await upstream.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def quiet(engine: SGLangEngine) -> None:
    await engine.pause()
    assert await engine.flush()


def test_start_look_and_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = worker(tmp_path, api_key="k", admin_key="admin")
        async with engine_for(spec) as engine:
            assert engine.running
            assert engine.weights_valid
            assert await engine.health()
            assert (await engine.info())["served_model_name"] == "policy"
            assert await engine.weight_version() == "default"
            assert NodeLedger(tmp_path / "ledger", "localhost").used(0) > 0
            pid = engine.pid
            end = await engine.stop(5, 5)
            assert end is not None
            assert end.code == 0
            assert not await engine.health()
            assert proc.info(pid or 0) is None
            assert NodeLedger(tmp_path / "ledger", "localhost").entries() == []

    run(scenario)


def test_a_failed_start_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path, sim={"faults": ["fail_start"]}), ready=False) as engine:
            with pytest.raises(StartupFailed) as caught:
                await engine.wait_ready(time.monotonic() + 20)
            assert "exit code 1" in caught.value.message
            assert "injected fault fail_start" in caught.value.message
            assert caught.value.detail["log"]

    run(scenario)


def test_a_start_that_takes_too_long(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path, sim={"faults": ["hang_start"]}), ready=False) as engine:
            with pytest.raises(StartupFailed, match="not healthy within"):
                await engine.wait_ready(time.monotonic() + 0.5)
            assert engine.running, "giving up is not ending: that is stop()"

    run(scenario)


def test_alarming_lines_before_ready_are_not_a_failure(tmp_path: Path) -> None:
    shell = tmp_path / "python"
    line = "libfabric:132:cxip_ep_close():869<warn> node: Unable to free EP object -16 : Device or resource busy"
    shell.write_text(
        f"#!/bin/sh\necho '{line}' >&2\necho 'ERROR: Stale file handle' >&2\nexec {worker(tmp_path).python} \"$@\"\n"
    )
    shell.chmod(0o755)

    async def scenario() -> None:
        async with engine_for(worker(tmp_path, python=str(shell))) as engine:
            assert await engine.health()
            assert line in "\n".join(tail(tmp_path / "engine.log"))

    run(scenario)


def test_an_exit_is_seen_and_told(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path)) as engine:
            seen: list[str] = []
            engine.on_exit(lambda end: seen.append(str(end)))
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            assert str(await asyncio.wait_for(engine.exited, 10)) == "signal SIGKILL"
            await asyncio.sleep(0)
            assert seen == ["signal SIGKILL"]
            assert not engine.running

    run(scenario)


def test_an_earlier_life_is_killed_before_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        spec = worker(tmp_path)
        async with engine_for(spec) as first:
            second = SGLangEngine(spec, Upstream())
            await second.start()
            assert str(await asyncio.wait_for(first.exited, 10)) == "signal SIGKILL"
            await second.wait_ready(time.monotonic() + 20)
            await second.stop(1, 5)

    run(scenario)


def test_hanging_health_is_not_health(tmp_path: Path) -> None:
    async def scenario() -> None:
        faults = [{"kind": "hang_health", "value": 0.6}]
        async with engine_for(worker(tmp_path, sim={"faults": faults})) as engine:
            deadline = time.monotonic() + 10
            while await engine.health(0.3):
                assert time.monotonic() < deadline
            assert engine.running

    run(scenario)


def test_release_and_resume_keep_account(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path)) as engine:
            ledger = NodeLedger(tmp_path / "ledger", "localhost")
            full = ledger.used(0)
            await quiet(engine)
            await engine.release([Tag.KV_CACHE])
            assert engine.tags[Tag.KV_CACHE] is TagState.RELEASED
            assert engine.resident == {Tag.WEIGHTS, Tag.CUDA_GRAPH}
            assert engine.weights_valid
            await engine.release()
            assert engine.resident == frozenset()
            assert not engine.weights_valid
            assert ledger.used(0) < full / 50
            await engine.release()
            with pytest.raises(OperationRefused, match="not resident"):
                await engine.continue_()
            await engine.resume([Tag.WEIGHTS])
            await engine.resume()
            await engine.resume()
            assert engine.resident == ALL_TAGS
            assert ledger.used(0) == full
            assert engine.weights_valid, "a static engine has a backup"
            await engine.continue_()
            assert engine.running

    run(scenario)


def test_what_would_kill_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path)) as engine:
            with pytest.raises(OperationRefused, match="pause, abort and flush"):
                await engine.release()
            await engine.flush()
            with pytest.raises(OperationRefused):
                await engine.release()
            await engine.pause()
            with pytest.raises(OperationRefused):
                await engine.release()
            await engine.flush()
            await engine.continue_()
            with pytest.raises(OperationRefused):
                await engine.release()
            await engine.resume()
            with pytest.raises(OperationRefused, match="request id is empty"):
                await engine.abort("")
            assert engine.running

    run(scenario)


def test_without_a_memory_saver_nothing_is_released(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path, memory_saver=False)) as engine:
            await quiet(engine)
            with pytest.raises(OperationRefused, match="memory saver"):
                await engine.release()

    run(scenario)


def test_a_release_without_an_answer_leaves_doubt(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path, sim={"faults": ["hang_release"]})) as engine:
            await quiet(engine)
            with pytest.raises(RecoveryRequired, match="no clear outcome"):
                await engine.release(timeout_seconds=0.3)
            assert set(engine.tags.values()) == {TagState.UNKNOWN}
            for act in (engine.release, engine.resume):
                with pytest.raises(RecoveryRequired, match="in doubt"):
                    await act()

    run(scenario)


def test_static_engines_take_no_other_weights(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path)) as engine:
            with pytest.raises(OperationRefused, match="STATIC"):
                await engine.update_weights_from_disk("sim/other")
            await engine.reload_weights()
            assert engine.served_model_name == engine.worker.model_path

    run(scenario)


def test_actor_weights_change_and_bad_paths_do_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path, weight_source=WeightSource.ACTOR)) as engine:
            with pytest.raises(EngineFailed, match="/no/such"):
                await engine.update_weights_from_disk("/no/such")
            assert engine.served_model_name == "policy"
            await engine.pause(PauseMode.ABORT)
            await engine.update_weights_from_disk("sim/step-1", "1")
            await engine.continue_()
            assert engine.served_model_name == engine.model_path == "sim/step-1"
            assert await engine.weight_version() == "1"
            await quiet(engine)
            await engine.release([Tag.WEIGHTS])
            with pytest.raises(OperationRefused, match="not resident"):
                await engine.update_weights_from_disk("sim/step-2")
            await engine.resume([Tag.WEIGHTS])
            assert not engine.weights_valid, "no backup: the weights are noise until they are sent"

    run(scenario)


def test_two_engines_on_one_card_are_one_too_many(tmp_path: Path) -> None:
    """A lease bug shows: the second engine runs out of memory, the first one does not notice."""

    async def scenario() -> None:
        judge: dict[str, Any] = {
            "worker_id": "judge/replica-0#0",
            "role": Role.GENRM,
            "log_path": str(tmp_path / "judge.log"),
        }
        async with engine_for(worker(tmp_path)) as policy, engine_for(worker(tmp_path, **judge), ready=False) as second:
            with pytest.raises(StartupFailed) as caught:
                await second.wait_ready(time.monotonic() + 20)
            assert "out of memory" in caught.value.message
            assert "policy/replica-0#0 holds" in caught.value.message
            assert await policy.health()

    run(scenario)


def test_overlap_after_a_sleep_kills_the_one_that_wakes(tmp_path: Path) -> None:
    async def scenario() -> None:
        judge: dict[str, Any] = {
            "worker_id": "judge/replica-0#0",
            "role": Role.GENRM,
            "log_path": str(tmp_path / "judge.log"),
        }
        async with engine_for(worker(tmp_path)) as policy:
            await quiet(policy)
            await policy.release()
            async with engine_for(worker(tmp_path, **judge)) as second:
                with pytest.raises(RecoveryRequired):
                    await policy.resume()
                assert (await asyncio.wait_for(policy.exited, 10)).code == 12
                assert "CUDA out of memory" in "\n".join(tail(tmp_path / "engine.log"))
                assert await second.health()

    run(scenario)


def test_two_nodes_live_and_die_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        rendezvous = free_port()
        specs = [
            worker(
                tmp_path,
                worker_id=f"policy/replica-0#{rank}",
                nnodes=2,
                node_rank=rank,
                ports=EnginePorts(free_port(), free_port(), rendezvous, free_port()),
                log_path=str(tmp_path / f"{rank}.log"),
                sim={"node": f"node{rank}"},
            )
            for rank in (0, 1)
        ]
        async with engine_for(specs[0], ready=False) as head:
            with pytest.raises(StartupFailed):
                await head.wait_ready(time.monotonic() + 0.6)
            async with engine_for(specs[1]) as follower:
                await head.wait_ready(time.monotonic() + 20)
                with pytest.raises(EngineFailed, match="404"):
                    await follower.info()
                for node in ("node0", "node1"):
                    assert NodeLedger(tmp_path / "ledger", node).used(0) > 0
                assert follower.pid is not None
                os.kill(follower.pid, signal.SIGKILL)
                assert (await asyncio.wait_for(head.exited, 10)).code == 1
                assert "worker of rank 1 is gone" in "\n".join(tail(tmp_path / "0.log"))

    run(scenario)


def test_a_dead_engine_is_an_upstream_failure(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with engine_for(worker(tmp_path)) as engine:
            await engine.stop(0, 5)
            with pytest.raises(UpstreamFailed):
                await engine.info()

    run(scenario)
