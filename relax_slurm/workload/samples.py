"""Samples and groups: what a rollout makes and every later stage adds to. Plain lists, so that no array library is due.

Lengths: P prompt tokens, R response tokens, K candidates per position. `tokens` has P + R ids; everything that is told
per response token has R entries, and none at all for a sample that is empty or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from relax_slurm.workload.failures import IncompleteGroup


class SampleStatus(StrEnum):
    """How the generation of a sample ended."""

    PENDING = "pending"
    """It has not."""
    COMPLETED = "completed"
    """The engine stopped by itself."""
    TRUNCATED = "truncated"
    """The limit of new tokens ended it."""
    ABORTED = "aborted"
    """It was aborted; the response is what there was until then."""
    FAILED = "failed"
    """The request failed. It is not sent again: the engine may have run it."""


FINISHED = frozenset({SampleStatus.COMPLETED, SampleStatus.TRUNCATED})
"""Statuses of samples that training can use."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One line of a prompt file. Either `text` or `input_ids` is there."""

    text: str | None
    input_ids: tuple[int, ...] | None
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    multimodal: dict[str, Any] | None = None
    """Fields that go to the engine beside the prompt, such as `image_data`."""


@dataclass(slots=True, eq=False)
class Sample:
    """One response to one prompt. Compared by identity: a sample may be captured once."""

    group_index: int
    """The prompt it answers; grows over the whole run."""
    index: int
    """Its own number; grows over the whole run."""
    prompt: str | None = None
    """Prompt as text, if it was given as text."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response, P + R ids."""
    response: str = ""
    response_length: int = 0
    """R."""
    label: str | None = None
    """What the reward is measured against."""
    status: SampleStatus = SampleStatus.PENDING
    loss_mask: list[int] | None = None
    """R times 0 or 1; None means that every response token counts."""
    weight_versions: list[str] = field(default_factory=list)
    """Versions of the policy's weights that wrote the response, in order, without repetition."""
    rollout_log_probs: list[float] | None = None
    """[R] log-probs of the response as the policy reported them while it wrote."""
    student_topk_token_ids: list[list[int]] | None = None
    """[R, K] the policy's likeliest tokens while it wrote; only for the selections student_topk and union."""
    student_topk_log_probs: list[list[float]] | None = None
    """[R, K] their log-probs."""
    metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: dict[str, Any] | None = None
    error: str | None = None
    """Why the sample failed."""
    remove_sample: bool = False
    """Whether training must not learn from it."""
    reward: float | None = None
    reward_detail: dict[str, Any] | None = None
    """What the reward adapter tells beside the number."""
    teacher_log_probs: list[float] | None = None
    """[R] the teacher's log-probs of the response."""
    teacher_topk_token_ids: list[list[int]] | None = None
    """[R, K] the teacher's likeliest tokens."""
    teacher_topk_log_probs: list[list[float]] | None = None
    """[R, K] their log-probs."""
    teacher_at_student_topk_log_probs: list[list[float]] | None = None
    """[R, K] the teacher's log-probs of `student_topk_token_ids`."""
    student_at_teacher_topk_log_probs: list[list[float]] | None = None
    """[R, K] the student's log-probs of `teacher_topk_token_ids`."""
    teacher_tokens: list[int] | None = None
    """What the teacher read, when that is not `tokens`."""
    teacher_images: list[Any] | None = None
    """Images that the teacher saw."""

    @property
    def prompt_length(self) -> int:
        """P."""
        return len(self.tokens) - self.response_length

    @property
    def scored(self) -> bool:
        """Whether scores per response token are due."""
        return self.response_length > 0 and not self.remove_sample


Group = list[Sample]
"""All samples of one prompt."""

WRITE_BACK = (
    "reward",
    "reward_detail",
    "remove_sample",
    "teacher_log_probs",
    "teacher_topk_token_ids",
    "teacher_topk_log_probs",
    "teacher_at_student_topk_log_probs",
    "student_at_teacher_topk_log_probs",
    "teacher_tokens",
    "teacher_images",
)
"""Fields that scoring may change: they are written on copies and reach the originals when everything is valid."""
GENERATED = tuple(each.name for each in fields(Sample) if each.name not in WRITE_BACK)
"""Fields of the rollout. Nothing after it may change them."""


def staged_copy(sample: Sample) -> Sample:
    """A copy that scoring may write on. Lists and mappings are copied too, so that nothing reaches the original."""
    return replace(sample, **{each.name: _copied(getattr(sample, each.name)) for each in fields(Sample)})


def _copied(value: Any) -> Any:
    if isinstance(value, list) and value and isinstance(value[0], int | float):
        return list(value)  # the long ones: tokens and log-probs
    return deepcopy(value) if isinstance(value, list | dict) else value


def samples_of(groups: Iterable[Sequence[Sample]]) -> list[Sample]:
    """All samples, in order."""
    return [sample for group in groups for sample in group]


def check_group(group: Sequence[Sample], wanted: int) -> None:
    """Raise IncompleteGroup unless the group has `wanted` finished samples of one prompt.

    GRPO compares the samples of a group with each other, so that one that is missing would bias all others.
    """
    indexes = {sample.group_index for sample in group}
    finished = [sample for sample in group if sample.status in FINISHED]
    name = min(indexes, default=None)
    if len(indexes) > 1:
        raise IncompleteGroup(f"group {name}: holds samples of groups {sorted(indexes)}; one prompt makes one group")
    if len(group) == len(finished) == wanted:
        return
    rest = [f"sample {sample.index} {sample.status}{_because(sample)}" for sample in group if sample not in finished]
    raise IncompleteGroup(
        f"group {name}: {len(finished)} finished samples, wanted {wanted}"
        + (f" ({'; '.join(rest[:3])})" if rest else "")
        + "; look at the rollout engines, or set batch.incomplete_groups: remove"
    )


def _because(sample: Sample) -> str:
    return f": {sample.error}" if sample.error else ""
