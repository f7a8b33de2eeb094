"""What training gets: one batch as columns, one row per sample. No array library is needed to make or to read it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from relax_slurm.workload.samples import Sample, samples_of


class Kind(StrEnum):
    """Shape and type of a column. N rows; lengths differ from row to row."""

    INT = "int"
    """[N] whole numbers of 64 bits."""
    FLOAT = "float"
    """[N] numbers of 64 bits."""
    INTS = "ints"
    """[N, length] whole numbers."""
    FLOATS = "floats"
    """[N, length] numbers."""
    INT_ROWS = "int_rows"
    """[N, length, K] whole numbers."""
    FLOAT_ROWS = "float_rows"
    """[N, length, K] numbers."""
    JSON = "json"
    """[N] anything that JSON can tell."""


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Columns of equal length."""

    number: int
    kinds: Mapping[str, Kind]
    columns: Mapping[str, Sequence[Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """About the whole batch: run, weight versions."""

    @property
    def rows(self) -> int:
        """N."""
        return len(next(iter(self.columns.values()), ()))

    def slice(self, start: int, end: int) -> TrainingBatch:
        """Rows `start` to `end` (exclusive)."""
        part = {name: values[start:end] for name, values in self.columns.items()}
        return TrainingBatch(self.number, self.kinds, part, self.facts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows as mappings."""
        names = list(self.columns)
        for row in zip(*self.columns.values(), strict=True):
            yield dict(zip(names, row, strict=True))


def joined(parts: Sequence[TrainingBatch]) -> TrainingBatch:
    """Consecutive slices as one batch."""
    first = parts[0]
    columns = {name: [value for part in parts for value in part.columns[name]] for name in first.columns}
    return TrainingBatch(first.number, first.kinds, columns, first.facts)


def _mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


ALWAYS: Mapping[str, tuple[Kind, Callable[[Sample], Any]]] = {
    "group_index": (Kind.INT, lambda sample: sample.group_index),
    "sample_index": (Kind.INT, lambda sample: sample.index),
    "tokens": (Kind.INTS, lambda sample: sample.tokens),
    "response_length": (Kind.INT, lambda sample: sample.response_length),
    "loss_mask": (Kind.INTS, _mask),
    "reward": (Kind.FLOAT, lambda sample: 0.0 if sample.reward is None else float(sample.reward)),
    "removed": (Kind.INT, lambda sample: int(sample.remove_sample)),
    "truncated": (Kind.INT, lambda sample: int(sample.status == "truncated")),
    "rollout_log_probs": (Kind.FLOATS, lambda sample: [] if sample.remove_sample else sample.rollout_log_probs or []),
    "weight_versions": (Kind.JSON, lambda sample: sample.weight_versions),
    "status": (Kind.JSON, lambda sample: str(sample.status)),
    "label": (Kind.JSON, lambda sample: sample.label),
    "response": (Kind.JSON, lambda sample: sample.response),
    "reward_detail": (Kind.JSON, lambda sample: sample.reward_detail),
    "metadata": (Kind.JSON, lambda sample: sample.metadata),
}
"""Columns of every batch. A removed sample stays, so that groups keep their size, with a mask of zeros."""
IF_SCORED: Mapping[str, Kind] = {
    "teacher_log_probs": Kind.FLOATS,
    "teacher_topk_token_ids": Kind.INT_ROWS,
    "teacher_topk_log_probs": Kind.FLOAT_ROWS,
    "teacher_at_student_topk_log_probs": Kind.FLOAT_ROWS,
    "student_topk_token_ids": Kind.INT_ROWS,
    "student_topk_log_probs": Kind.FLOAT_ROWS,
    "student_at_teacher_topk_log_probs": Kind.FLOAT_ROWS,
    "teacher_tokens": Kind.INTS,
    "teacher_images": Kind.JSON,
    "multimodal_inputs": Kind.JSON,
}
"""Columns that are there when at least one sample has them; the others get an empty entry."""


def convert(number: int, groups: Sequence[Sequence[Sample]], facts: Mapping[str, Any] | None = None) -> TrainingBatch:
    """The batch that training consumes, in the order of the groups."""
    samples = samples_of(groups)
    kinds = {name: kind for name, (kind, _) in ALWAYS.items()}
    columns: dict[str, list[Any]] = {name: [get(sample) for sample in samples] for name, (_, get) in ALWAYS.items()}
    for name, kind in IF_SCORED.items():
        values = [getattr(sample, name) for sample in samples]
        if any(value is not None for value in values):
            kinds[name] = kind
            columns[name] = values if kind is Kind.JSON else [value or [] for value in values]
    versions = sorted({version for sample in samples for version in sample.weight_versions})
    return TrainingBatch(number, kinds, columns, {"weight_versions": versions, **(facts or {})})
