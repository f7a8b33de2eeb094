"""Rollout, teacher and student scoring against SGLang itself: shapes, and the values of the same calls made by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.client.inference import InferenceClient
from relax_slurm.core.discovery import EngineEntry, ModelEntry, ReplicaState, RoleSnapshot, RoutingSpec
from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.workload import prefill
from relax_slurm.workload.collector import DeferredTransferCollector
from relax_slurm.workload.prefill import Selection
from relax_slurm.workload.rollout import RolloutSettings, RolloutWorkload
from relax_slurm.workload.samples import FINISHED, Prompt
from relax_slurm.workload.scoring import StudentScoring, TeacherScoring, TeacherSettings
from relax_slurm.workload.validate import Expected, check_generated, check_scored
from tests.contract.engine_program import launch, spec_of
from tests.unit.gateway.stage import Source

READY = ReplicaState.READY
PROMPTS = ["The capital of France is", "Two and two make"]


def view(role: Role, url: str) -> RoleSnapshot:
    """The one engine in every role."""
    weights = WeightSource.ACTOR if role is Role.ROLLOUT else WeightSource.STATIC
    version = "1" if role is Role.ROLLOUT else None
    engine = EngineEntry("m/replica-0", url, READY, True, 1)
    model = ModelEntry("m", READY, RouteMode.DIRECT, None, weights, version, "m", (engine,))
    return RoleSnapshot(role, "000001-abcdef", 1, RoutingSpec("m", {}, {}), {"m": model})


async def scored(url: str) -> None:
    """Two groups through all prefill stages."""
    source = Source({role: view(role, url) for role in Role})
    async with InferenceClient.subscribed(source, timeout_seconds=120) as client:
        collector = DeferredTransferCollector()
        settings = RolloutSettings(2, sampling={"max_new_tokens": 12, "temperature": 1.0}, top_k=3)
        prompts = [Prompt(text, None) for text in PROMPTS]
        assert await RolloutWorkload(client, settings).generate(prompts, collector) == 2
        samples = [sample for group in collector.seal() for sample in group]
        assert {sample.status for sample in samples} <= FINISHED
        check_generated(samples)
        await TeacherScoring(client, TeacherSettings(Selection.UNION, top_k=3)).score(samples)
        await StudentScoring(client).score(samples)
        expected = Expected(reward=False, fields=Selection.UNION.fields(student=True), top_k=3)
        for sample in samples:
            check_scored(sample, expected)
            assert len(sample.weight_versions) == 1
            # Teacher and student are one model here, so what one says of a token the other says too.
            assert sample.teacher_log_probs == pytest.approx(sample.rollout_log_probs, abs=0.05)
            for own, other in zip(
                sample.teacher_topk_log_probs or [], sample.student_at_teacher_topk_log_probs or [], strict=True
            ):
                assert own == pytest.approx(other, abs=0.05)
        one = samples[0]
        by_hand: Any = await client.generate(
            {
                "input_ids": one.tokens,
                "sampling_params": {"temperature": 0, "max_new_tokens": 0},
                "return_logprob": True,
                "logprob_start_len": one.prompt_length - 1,
            },
            Role.TEACHER,
        )
        rows = by_hand["meta_info"]["input_token_logprobs"]
        assert len(rows) == one.response_length + 1
        assert one.teacher_log_probs == pytest.approx([row[0] for row in rows[1:]], abs=0.05)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("window", [256, 5])
def test_every_stage_reads_what_sglang_says(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(prefill, "WINDOW", window)
    with launch(spec_of("sglang", tmp_path, model_path=str(chat_model))) as engine:
        asyncio.run(asyncio.wait_for(scored(engine.spec.base_url), 200))
