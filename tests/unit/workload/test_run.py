"""Whole batches over simulated engines, a gateway and real sockets; and what consumers see of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.config.load import from_mapping
from relax_slurm.config.models import RunConfig
from relax_slurm.core.discovery import ReplicaState
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.core.plan import InferencePlacementPlan, Role
from relax_slurm.errors import RelaxError
from relax_slurm.workload.consumer import Consumer
from relax_slurm.workload.failures import BatchNotMade, BatchRefused, IncompleteGroup, NotConsumed, PartitionMissing
from relax_slurm.workload.publishers.reader import partitions, read_partition
from relax_slurm.workload.run import Event, next_batch, run_batches
from relax_slurm.workload.source import PromptSource, prompt_of
from tests.unit.workload.engines import Engines, engines
from tests.unit.workload.stage import Failed, FakeLifecycle
from tests.unit.workload.test_preflight import run as run_file

BATCH: dict[str, Any] = {
    "batch_size": 3,
    "n_samples_per_prompt": 2,
    "seed": 1,
    "sampling": {"max_new_tokens": 16},
    "reward": {"adapter": "genrm", "bare_answers": True},
    "teacher": {"selection": "union", "top_k": 2},
    "student_scoring": True,
}


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 90))


def made(placement: str = "defer", **batch: Any) -> tuple[RunConfig, InferencePlacementPlan]:
    config = from_mapping(run_file(placement, **{**BATCH, **batch}))
    return config, make_plan(config, ephemeral=None)


def prompts(count: int = 4) -> PromptSource:
    return PromptSource([prompt_of({"prompt": f"What is {n} + 25?", "label": n + 25}) for n in range(count)])


class Turns(FakeLifecycle):
    """Publishes what the lifecycle does, a little later than it says it is done: as a real registry does."""

    def __init__(self, stage: Engines) -> None:
        super().__init__()
        self.stage = stage
        for role in Role:
            stage.show(role, ReplicaState.SLEEPING)

    def _later(self, role: Role, state: ReplicaState) -> None:
        asyncio.get_running_loop().call_later(0.05, self.stage.show, role, state)

    async def begin_batch(self, batch: int) -> None:
        await super().begin_batch(batch)
        self._later(Role.ROLLOUT, ReplicaState.READY)

    async def onload_rollout(self, batch: int) -> None:
        await super().onload_rollout(batch)
        self._later(Role.ROLLOUT, ReplicaState.READY)

    async def offload_rollout(self, batch: int) -> None:
        self.stage.show(Role.ROLLOUT, ReplicaState.SLEEPING)
        await super().offload_rollout(batch)

    async def activate(self, role: Role, batch: int) -> None:
        await super().activate(role, batch)
        self._later(role, ReplicaState.READY)

    async def deactivate(self, role: Role, batch: int) -> None:
        self.stage.show(role, ReplicaState.SLEEPING)
        await super().deactivate(role, batch)


def test_batches_with_every_stage(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines(error_rate=0.3) as stage:
            lifecycle, events = Turns(stage), list[Event]()
            config, plan = made()
            summary = await run_batches(
                lifecycle, config, plan, prompts(), stage.access, tmp_path, batches=2, progress=events.append
            )
            assert lifecycle.state == {0: "COMMITTED", 1: "COMMITTED"}
            assert partitions(tmp_path) == ["train_0", "train_1"] == summary["partitions"]
            assert {key: summary[key] for key in ("batches", "first_batch", "groups", "samples", "removed")} == {
                "batches": 2,
                "first_batch": 0,
                "groups": 6,
                "samples": 12,
                "removed": 0,
            }
            assert 0 < summary["reward_mean"] <= 1
            assert summary["teacher_coverage"] == 1.0
            assert summary["handovers"]["count"] == 16
            assert summary["handovers"]["seconds"] > 0
            assert set(summary["seconds"]) >= {"begin", "generate", "genrm", "teacher", "student", "publish", "commit"}
            batch = read_partition(tmp_path, "train_1")
            assert batch.facts == {"weight_versions": ["7"], "run": "run"}
            assert batch.columns["group_index"] == [3, 3, 4, 4, 5, 5]
            assert batch.columns["sample_index"] == [*range(6, 12)]
            for row in batch:
                length = row["response_length"]
                right = row["response"] == row["label"]
                assert row["reward"] == float(right)
                assert row["reward_detail"]["pred"] == row["response"]
                for name in ("teacher_log_probs", "rollout_log_probs", "loss_mask", "teacher_topk_token_ids"):
                    assert len(row[name]) == length
                assert [len(each) for each in row["student_at_teacher_topk_log_probs"]] == [2] * length
            assert [event.phase for event in events if event.batch == 0][-1] == "committed"
            assert max(event.samples for event in events) == 6

    run(body())


@pytest.mark.parametrize("placement", ["split", "decoupled"])
def test_the_same_code_where_nothing_is_shared(tmp_path: Path, placement: str) -> None:
    class Alone(FakeLifecycle):
        """Roles that stand on GPUs of their own: turns are no-ops."""

        async def activate(self, role: Role, batch: int) -> None:
            await self._call("activate")

        async def deactivate(self, role: Role, batch: int) -> None:
            await self._call("deactivate")

    async def body() -> None:
        async with engines() as stage:
            data = run_file(placement, **BATCH | {"student_scoring": False, "publisher": {"format": "safetensors"}})
            if placement == "decoupled":
                del data["training"]
                pools = {name: {"nodes": 1, "gpus_per_node": 4} for name in ("rollout", "genrm", "teacher")}
                data["pools"] = pools
                for name in pools:
                    data["roles"][name]["pool"] = name
                    data["roles"][name]["models"] = {"m": {"model_path": "sim/x", "gpus": 4}}
            config = from_mapping(data)
            summary = await run_batches(
                Alone(), config, make_plan(config, ephemeral=None), prompts(), stage.access, tmp_path
            )
            assert summary["samples"] == 6
            assert read_partition(tmp_path, "train_0").rows == 6

    run(body())


def test_a_failed_batch_ends_the_run(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines() as stage:
            lifecycle = Turns(stage)
            config, plan = made()

            async def gone() -> None:
                await stage.sims[Role.TEACHER].server.stop(0)

            lifecycle.before = lambda call: gone() if call == "activate teacher" else None
            with pytest.raises(BatchNotMade, match="batch 0 failed at teacher: "):
                await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path, batches=3)
            assert lifecycle.calls[-2:] == ["deactivate teacher", "fail"]
            assert not lifecycle.awake
            assert partitions(tmp_path) == []
            with pytest.raises(RelaxError, match="begin 1"):
                await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path)

    run(body())


def test_generation_that_fails_or_takes_too_long_releases_rollout(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines(tokens_per_second=20) as stage:
            lifecycle = Turns(stage)
            config, plan = made(generate_seconds=0.5, sampling={"max_new_tokens": 2000, "ignore_eos": True})
            with pytest.raises(BatchNotMade, match=r"generation took longer than 0.5 s .*; 0 of 6 samples"):
                await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path)
            assert lifecycle.calls == ["begin", "offload", "acknowledge", "fail"]
            second = Turns(stage)
            await stage.sims[Role.ROLLOUT].server.stop(0)
            config, plan = made()
            with pytest.raises(IncompleteGroup, match="batch 0 failed at generate: group"):
                await run_batches(second, config, plan, prompts(), stage.access, tmp_path)
            assert second.calls == ["begin", "offload", "acknowledge", "fail"]

    run(body())


def test_an_interrupted_run_releases_rollout(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines(tokens_per_second=20) as stage:
            lifecycle = Turns(stage)
            config, plan = made(sampling={"max_new_tokens": 2000, "ignore_eos": True})
            work = asyncio.ensure_future(run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path))
            async with asyncio.timeout(30):
                while not stage.sims[Role.ROLLOUT].bodies:
                    await asyncio.sleep(0.01)
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert lifecycle.calls == ["begin", "offload", "acknowledge", "fail"]
            assert "cancelled" in lifecycle.errors[0]

    run(body())


def test_what_is_refused_begins_nothing(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines() as stage:
            lifecycle = FakeLifecycle()
            config, plan = made(job={"partial_rollout": True})
            with pytest.raises(BatchRefused):
                await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path)
            assert lifecycle.calls == []

    run(body())


def test_numbers_go_on() -> None:
    assert next_batch({}) == 0
    assert next_batch({"batch": {"id": None, "state": None}}) == 0
    assert next_batch({"batch": {"id": 0, "state": "COMMITTED"}}) == 1


def test_consumers_read_what_is_committed_and_nothing_else(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines() as stage:
            lifecycle = Turns(stage)
            config, plan = made(student_scoring=False)
            consumers = [Consumer(lifecycle, tmp_path, timeout_seconds=60) for _ in range(4)]

            async def consume(consumer: Consumer) -> list[int]:
                return [batch.rows async for batch in consumer.batches(count=2)]

            waiting = [asyncio.ensure_future(consume(each)) for each in consumers]
            await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path, batches=2)
            assert await asyncio.gather(*waiting) == [[6, 6]] * 4
            await consumers[0].clear(0)
            with pytest.raises(PartitionMissing):
                await consumers[1].read(0)
            lifecycle.state[2] = "FAILED"
            lifecycle.errors[2] = "batch 2 failed at teacher"
            with pytest.raises(Failed, match="at teacher"):
                await consumers[0].read(2)

    run(body())


def test_the_next_batch_waits_for_its_consumers(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines() as stage:
            lifecycle = Turns(stage)
            config, plan = made(student_scoring=False, consumers=["actor", "critic"], consume_seconds=60.0)
            order: list[str] = []

            async def consume(name: str) -> None:
                consumer = Consumer(lifecycle, tmp_path, name, timeout_seconds=60)
                async for batch in consumer.batches(count=2):
                    assert lifecycle.state == dict.fromkeys(range(batch.number + 1), "COMMITTED")
                    order.append(f"{name} {batch.number}")
                    await consumer.done(batch.number)

            consuming = [asyncio.ensure_future(consume(name)) for name in ("actor", "critic")]
            summary = await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path, batches=2)
            await asyncio.gather(*consuming)
            assert sorted(order) == ["actor 0", "actor 1", "critic 0", "critic 1"]
            assert summary["seconds"]["consume"] > 0
            assert partitions(tmp_path) == ["train_0", "train_1"]

    run(body())


def test_consumers_that_are_gone(tmp_path: Path) -> None:
    async def body() -> None:
        async with engines() as stage:
            lifecycle = Turns(stage)
            config, plan = made(student_scoring=False, consumers=["actor"], consume_seconds=0.3)
            with pytest.raises(NotConsumed, match=r"batch 0 was not consumed by actor within 0\.3 s"):
                await run_batches(lifecycle, config, plan, prompts(), stage.access, tmp_path, batches=2)
            assert lifecycle.state == {0: "COMMITTED"}

    run(body())
