"""Groups out of engines: shapes, numbers, keys, aborts, and what becomes of a request that fails."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine
from typing import Any

import pytest

from relax_slurm.core.plan import Role
from relax_slurm.errors import UpstreamFailed
from relax_slurm.workload.collector import DeferredTransferCollector
from relax_slurm.workload.failures import IncompleteGroup
from relax_slurm.workload.rollout import RolloutSettings, RolloutWorkload, take
from relax_slurm.workload.samples import Prompt, Sample, SampleStatus
from relax_slurm.workload.validate import check_generated
from tests.unit.workload.engines import Engines, engines

SAMPLING = {"temperature": 1.0, "max_new_tokens": 32}
PROMPTS = [Prompt(f"What is {number} + 25?", None, str(number + 25), {"data_source": "sums"}) for number in range(5)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def test_groups_of_a_text_prompt() -> None:
    async def body() -> None:
        async with engines(error_rate=0.0) as stage:
            settings = RolloutSettings(3, sampling=SAMPLING, seed=5, top_k=2)
            collector = DeferredTransferCollector()
            assert await RolloutWorkload(stage.client, settings, first_group=7).generate(PROMPTS, collector) == 5
            groups = collector.seal()
            assert [group[0].group_index for group in groups] == sorted(group[0].group_index for group in groups)
            samples = [sample for group in groups for sample in group]
            assert sorted(sample.group_index for sample in samples) == sorted([*range(7, 12)] * 3)
            assert sorted(sample.index for sample in samples) == list(range(21, 36))
            check_generated(samples)
            for sample in samples:
                assert sample.status is SampleStatus.COMPLETED
                assert sample.response == sample.label
                assert sample.tokens[: sample.prompt_length] == list((sample.prompt or "").encode())
                assert sample.weight_versions == ["7"]
                assert len(sample.rollout_log_probs or []) == sample.response_length > 0
                assert [len(row) for row in sample.student_topk_token_ids or []] == [2] * sample.response_length
                assert sample.metadata == {"data_source": "sums"}
            sim = stage.sims[Role.ROLLOUT]
            assert set(sim.keys) == {f"group-{number}" for number in range(7, 12)}
            bodies = [json.loads(raw) for raw in sim.bodies]
            assert len(bodies) == 5 + 15
            assert len({len(one["rid"]) for one in bodies}) == 1
            assert len({one["rid"] for one in bodies}) == 20
            asked = [one for one in bodies if "input_ids" in one]
            assert len({one["sampling_params"]["sampling_seed"] for one in asked}) == 15
            assert asked[0]["sampling_params"]["no_stop_trim"] is True
            assert asked[0]["sampling_params"]["spaces_between_special_tokens"] is False

    run(body())


def test_token_prompts_need_no_reading_and_length_truncates() -> None:
    async def body() -> None:
        async with engines() as stage:
            collector = DeferredTransferCollector()
            settings = RolloutSettings(1, sampling={"max_new_tokens": 1})
            prompt = Prompt(None, tuple(b"What is 3 + 25?"))
            await RolloutWorkload(stage.client, settings).generate([prompt], collector)
            ((sample,),) = collector.seal()
            assert sample.status is SampleStatus.TRUNCATED
            assert sample.prompt_length == 15
            assert len(stage.sims[Role.ROLLOUT].bodies) == 1

    run(body())


def long_prompts(count: int) -> list[Prompt]:
    return [Prompt(f"tell me story {number}", None) for number in range(count)]


LONG = {"max_new_tokens": 20_000, "ignore_eos": True}


async def until_busy(stage: Engines, count: int) -> None:
    async with asyncio.timeout(30):
        while sum(b"input_ids" in raw for raw in stage.sims[Role.ROLLOUT].bodies) < count:
            await asyncio.sleep(0.01)


def test_an_abort_ends_what_runs_and_what_waits() -> None:
    async def body() -> None:
        async with engines(tokens_per_second=50) as stage:
            settings = RolloutSettings(2, concurrency=3, sampling=LONG, complete_groups=False)
            workload = RolloutWorkload(stage.client, settings)
            collector = DeferredTransferCollector()
            task = asyncio.ensure_future(workload.generate(long_prompts(3), collector))
            await until_busy(stage, 3)
            await workload.abort()
            assert await task == 3
            samples = [sample for group in collector.seal() for sample in group]
            assert {sample.status for sample in samples} == {SampleStatus.ABORTED}
            assert all(sample.remove_sample for sample in samples)
            check_generated(samples)

    run(body())


def test_an_aborted_group_is_incomplete() -> None:
    async def body() -> None:
        async with engines(tokens_per_second=50) as stage:
            workload = RolloutWorkload(stage.client, RolloutSettings(2, sampling=LONG))
            task = asyncio.ensure_future(workload.generate(long_prompts(2), DeferredTransferCollector()))
            await until_busy(stage, 4)
            await workload.abort()
            with pytest.raises(IncompleteGroup, match="0 finished samples, wanted 2"):
                await task

    run(body())


def test_a_cancelled_batch_frees_the_engine() -> None:
    async def body() -> None:
        async with engines(tokens_per_second=50) as stage:
            workload = RolloutWorkload(stage.client, RolloutSettings(2, sampling=LONG))
            task = asyncio.ensure_future(workload.generate(long_prompts(2), DeferredTransferCollector()))
            await until_busy(stage, 4)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(20):
                while stage.sims[Role.ROLLOUT].engine.scheduler.busy:
                    await asyncio.sleep(0.01)

    run(body())


class Scripted:
    """Engines that answer by a function of the body and the group."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.aborts: list[str] = []

    async def generate(self, payload: Any, role: Role, **options: Any) -> Any:
        found = self.answer(payload, options.get("affinity_key"))
        if isinstance(found, Exception):
            raise found
        if asyncio.iscoroutine(found):
            found = await found
        return found

    async def abort(self, rids: Any, role: Role) -> int:
        self.aborts += rids
        return len(rids)


def told(ids: list[int] = [1, 2], finish: str = "stop", **meta: Any) -> dict[str, Any]:  # noqa: B006 - never changed
    rows = [[-0.5, token, None] for token in ids]
    fields = {"finish_reason": {"type": finish}, "output_token_logprobs": rows, "weight_version": "0", **meta}
    return {"text": "x", "output_ids": ids, "meta_info": fields}


IDS = [Prompt(None, (5, 6)) for _ in range(3)]


def test_a_failed_request_is_not_sent_again_and_spoils_its_group() -> None:
    asked: list[Any] = []

    def answer(payload: Any, key: str) -> Any:
        asked.append(key)
        return UpstreamFailed("connection reset") if key == "group-1" else told()

    collector = DeferredTransferCollector()
    workload = RolloutWorkload(Scripted(answer), RolloutSettings(2))
    with pytest.raises(
        IncompleteGroup, match=r"group 1: 0 finished samples, wanted 2 .sample 2 failed: connection reset"
    ):
        run(workload.generate(IDS, collector))
    assert asked.count("group-1") == 2
    collector = DeferredTransferCollector()
    run(RolloutWorkload(Scripted(answer), RolloutSettings(2, complete_groups=False)).generate(IDS, collector))
    samples = [sample for group in collector.seal() for sample in group]
    assert [sample.remove_sample for sample in samples] == [False, False, True, True, False, False]
    assert samples[2].error == "connection reset"


def test_oversampling_takes_the_first_whole_groups() -> None:
    async def slow() -> Any:
        await asyncio.Event().wait()

    def answer(payload: Any, key: str) -> Any:
        return {"group-0": slow, "group-1": lambda: UpstreamFailed("gone")}.get(key, told)()

    scripted = Scripted(answer)
    collector = DeferredTransferCollector()
    workload = RolloutWorkload(scripted, RolloutSettings(1), new_tag=lambda: "t" * 16)
    assert run(workload.generate([Prompt(None, (1,)) for _ in range(5)], collector, wanted=3)) == 3
    assert [group[0].group_index for group in collector.seal()] == [2, 3, 4]
    assert scripted.aborts == ["t" * 16 + "0" * 16]


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        ({}, "meta_info"),
        (told(finish="confused"), "finish_reason is 'confused'"),
        (told() | {"text": None}, "text is None"),
        (told() | {"output_ids": [1]}, "output_token_logprobs has 2 values, wanted 1"),
        (told() | {"output_ids": [1, 3]}, "about token 2, wanted 3"),
        (told(output_token_logprobs=[[math.nan, 1], [0, 2]]), "finite"),
        (told(output_token_logprobs=[[-1.0, -1], [0, 2]]), "whole number from 0 on"),
        (told(output_token_logprobs=None), "was return_logprob sent"),
        (told(finish_reason=None), "finish_reason is None"),
    ],
)
def test_an_answer_that_does_not_fit_changes_nothing(answer: Any, match: str) -> None:
    sample = Sample(0, 0, tokens=[5])
    with pytest.raises(ValueError, match=match):
        take(sample, [5], answer)
    assert (sample.tokens, sample.status, sample.rollout_log_probs) == ([5], SampleStatus.PENDING, None)


def test_ids_and_versions_of_an_answer() -> None:
    sample = Sample(0, 0)
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    answer = told(weight_versions=spans)
    del answer["output_ids"]
    take(sample, [9], answer)
    assert sample.tokens == [9, 1, 2]
    assert sample.weight_versions == ["3", "4"]
    take(sample, [9], told(weight_version=None))
    assert sample.weight_versions == []
    take(sample, [9], told(weight_version=0))
    assert sample.weight_versions == ["0"]
