"""Teacher and student score staged copies by prefill, so many requests at a time, over the direct client.

The client is made once and kept: two batches need one discovery. Any failure fails the stage, and with it the batch.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.core.plan import Role
from relax_slurm.workload import engine_answer as answers
from relax_slurm.workload import prefill
from relax_slurm.workload.at_once import at_once
from relax_slurm.workload.failures import ScoreInvalid, VersionUnknown
from relax_slurm.workload.prefill import Scores, Selection
from relax_slurm.workload.rollout import Engines
from relax_slurm.workload.samples import Sample
from relax_slurm.workload.validate import clear_per_token

DATA_SOURCE = "data_source"
"""Key of a sample's metadata that says where its prompt comes from."""


@dataclass(frozen=True, slots=True)
class TeacherSettings:
    """How the teacher is asked."""

    selection: Selection = Selection.STUDENT_SAMPLED
    top_k: int = 8
    route_keys: Mapping[str, str] = field(default_factory=dict)
    """Data source to route key; a source that is not named is its own route key if `known_keys` has it."""
    known_keys: frozenset[str] = frozenset()
    """Route keys that the role knows. Anything else goes to its default model."""
    concurrency: int = 256
    timeout_seconds: float = 1800.0


def route_key_of(sample: Sample, settings: TeacherSettings) -> str | None:
    """Route key of a sample; None means the role's default model."""
    source = sample.metadata.get(DATA_SOURCE)
    if not isinstance(source, str):
        return None
    if source in settings.route_keys:
        return settings.route_keys[source]
    return source if source in settings.known_keys else None


class TeacherScoring:
    """Writes the teacher's log-probs on copies."""

    def __init__(self, engines: Engines, settings: TeacherSettings) -> None:
        self._engines, self._settings = engines, settings

    async def score(self, samples: Sequence[Sample]) -> None:
        """Score all. ScoreInvalid, or what the engines answered; then nothing more is sent."""
        fields = self._settings.selection.fields(student=False)
        for sample in samples:
            if not sample.scored:
                clear_per_token(sample, fields)
        wanted = [sample for sample in samples if sample.scored]
        await _all(wanted, self._one, self._settings.concurrency, "teacher")

    async def _one(self, sample: Sample) -> None:
        settings, selection = self._settings, self._settings.selection
        tokens, prompt_length = prefill.read_by_teacher(sample)
        key = route_key_of(sample, settings)
        top_k = settings.top_k if selection.teacher_candidates else 0
        chosen = sample.student_topk_token_ids if selection.student_candidates else None
        if selection.student_candidates and chosen is None:
            raise ValueError("student_topk_token_ids is missing; the rollout did not keep its candidates")
        extra = {} if sample.teacher_images is None else {"image_data": sample.teacher_images}

        async def ask(body: dict[str, Any]) -> Any:
            return await self._engines.generate(
                body | extra,
                Role.TEACHER,
                route_key=key,
                affinity_key=f"{key or ''}/{sample.group_index}",
                timeout_seconds=settings.timeout_seconds,
            )

        scores = await _scores(ask, tokens, prompt_length, sample.response_length, top_k, chosen)
        sample.teacher_log_probs = scores.log_probs
        if selection.teacher_candidates:
            sample.teacher_topk_token_ids, sample.teacher_topk_log_probs = scores.top_ids, scores.top_log_probs
        if selection.student_candidates:
            sample.teacher_at_student_topk_log_probs = scores.chosen


class StudentScoring:
    """Writes the student's log-probs of the teacher's candidates on copies."""

    def __init__(
        self, engines: Engines, *, model: str | None = None, concurrency: int = 256, timeout_seconds: float = 1800.0
    ) -> None:
        self._engines = engines
        self._model = model
        self._concurrency = concurrency
        self._timeout_seconds = timeout_seconds

    async def score(self, samples: Sequence[Sample]) -> None:
        """Score all with the weights that wrote them. VersionUnknown when those are not one known version."""
        wanted = [sample for sample in samples if sample.scored]
        version = one_version(wanted)

        async def one(sample: Sample) -> None:
            await self._one(sample, version)

        for sample in samples:
            if not sample.scored:
                sample.student_at_teacher_topk_log_probs = []
        await _all(wanted, one, self._concurrency, "student")

    async def _one(self, sample: Sample, version: str) -> None:
        chosen = sample.teacher_topk_token_ids
        if chosen is None:
            raise ValueError("teacher_topk_token_ids is missing; the teacher has to score first")

        async def ask(body: dict[str, Any]) -> Any:
            answer = await self._engines.generate(
                body,
                Role.ROLLOUT,
                model=self._model,
                affinity_key=f"group-{sample.group_index}",
                timeout_seconds=self._timeout_seconds,
            )
            seen = answers.versions_of(answers.meta_of(answer))
            if seen != [version]:
                raise VersionUnknown(
                    f"sample {sample.index}: the student that scores it has weight version {seen or 'unknown'}, "
                    f"wanted {version!r}, which wrote it; restore the policy's weights before scoring"
                )
            return answer

        scores = await _scores(ask, sample.tokens, sample.prompt_length, sample.response_length, 0, chosen)
        sample.student_at_teacher_topk_log_probs = scores.chosen


def one_version(samples: Sequence[Sample]) -> str:
    """The one weight version that wrote all samples; VersionUnknown when there is none or more than one."""
    seen: set[str] = set()
    for sample in samples:
        if not sample.weight_versions:
            raise VersionUnknown(
                f"sample {sample.index} was written by weights of an unknown version, wanted one known version; "
                "give the policy's weights a version"
            )
        seen.update(sample.weight_versions)
    if len(seen) > 1:
        raise VersionUnknown(
            f"the samples of the batch were written by the weight versions {sorted(seen)}, wanted one; "
            "update weights between batches only"
        )
    return seen.pop() if seen else ""


async def _scores(
    ask: Callable[[dict[str, Any]], Awaitable[Any]],
    tokens: Sequence[int],
    prompt_length: int,
    length: int,
    top_k: int,
    chosen: Sequence[Sequence[int]] | None,
) -> Scores:
    parts = []
    for window in prefill.windows(length, narrow=chosen is not None):
        body = prefill.request(tokens, prompt_length, window, top_k, chosen)
        parts.append(prefill.read(await ask(body), tokens, prompt_length, window, top_k, chosen))
    return prefill.joined(parts)


async def _all(samples: Sequence[Sample], one: Callable[[Sample], Awaitable[None]], concurrency: int, who: str) -> None:
    """Run `one` on every sample; what is wrong with an answer is told as ScoreInvalid."""

    async def checked(sample: Sample) -> None:
        try:
            await one(sample)
        except ValueError as error:
            raise ScoreInvalid(
                f"{who}: sample {sample.index} of group {sample.group_index}: {error}; see the {who}'s engine log"
            ) from error

    await at_once(samples, checked, concurrency)
