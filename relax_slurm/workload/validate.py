"""Whether the scores on staged copies are complete, and their way back to the originals. Pure.

`write_back` checks everything first and changes originals only when nothing is wrong, in one go without an await.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_slurm.workload.failures import ScoreInvalid
from relax_slurm.workload.samples import GENERATED, WRITE_BACK, Sample

PER_TOKEN = (
    "teacher_log_probs",
    "teacher_topk_token_ids",
    "teacher_topk_log_probs",
    "teacher_at_student_topk_log_probs",
    "student_at_teacher_topk_log_probs",
)
"""Scores with an entry per response token, or none at all for a sample that is empty or removed."""
_IDS = frozenset({"teacher_topk_token_ids", "student_topk_token_ids"})
_WIDE = frozenset(name for name in PER_TOKEN if name != "teacher_log_probs")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the stages of a batch owe."""

    reward: bool = True
    fields: frozenset[str] = frozenset()
    """Of `PER_TOKEN`: what must be there. Others must not."""
    top_k: int = 0
    """K of the fields that have one."""


def check_generated(samples: Sequence[Sample]) -> None:
    """Whether the rollout told what every later stage counts on. ScoreInvalid names the first sample that is not so."""
    for sample in samples:
        length = sample.response_length
        if length < 0 or len(sample.tokens) < length or (length and len(sample.tokens) == length):
            raise _wrong(sample, "tokens", f"has {len(sample.tokens)} ids", f"a prompt and {length} response tokens")
        _ids(sample, "tokens", sample.tokens)
        if sample.loss_mask is not None:
            _length(sample, "loss_mask", sample.loss_mask, length)
            if any(type(value) is not int or value not in (0, 1) for value in sample.loss_mask):
                raise _wrong(sample, "loss_mask", "has another value", "0 or 1")
        if sample.rollout_log_probs is not None and not sample.remove_sample:
            _numbers(sample, "rollout_log_probs", sample.rollout_log_probs, length)


def check_scored(sample: Sample, expected: Expected) -> None:
    """Whether one copy's scores are complete: lengths, finite values, shapes, ids from 0 on. ScoreInvalid."""
    if expected.reward and not sample.remove_sample:
        if not _is_number(sample.reward):
            raise _wrong(sample, "reward", f"is {sample.reward!r:.40}", "a finite number")
    elif sample.reward is not None and not _is_number(sample.reward):
        raise _wrong(sample, "reward", f"is {sample.reward!r:.40}", "a finite number or none")
    length = sample.response_length if sample.scored else 0
    for name in PER_TOKEN:
        value = getattr(sample, name)
        if name not in expected.fields:
            if value is not None:
                raise _wrong(sample, name, "is there", "nothing: no stage of this batch makes it")
            continue
        if value is None:
            raise _wrong(sample, name, "is missing", f"{length} entries")
        if name in _WIDE:
            _wide(sample, name, value, length, expected.top_k)
        else:
            _numbers(sample, name, value, length)


def write_back(originals: Sequence[Sample], copies: Sequence[Sample], expected: Expected) -> None:
    """Checks all copies, then puts their scores on the originals. ScoreInvalid leaves every original as it was."""
    if len(originals) != len(copies):
        raise ScoreInvalid(f"batch: {len(copies)} samples were scored, wanted {len(originals)}")
    for original, copy in zip(originals, copies, strict=True):
        for name in GENERATED:
            if getattr(original, name) != getattr(copy, name):
                raise _wrong(copy, name, "was changed by a scoring stage", "what the rollout wrote")
        check_scored(copy, expected)
    for original, copy in zip(originals, copies, strict=True):
        for name in WRITE_BACK:
            setattr(original, name, getattr(copy, name))


def clear_per_token(sample: Sample, fields: frozenset[str]) -> None:
    """Zero-length scores, for a sample that is empty or removed."""
    for name in fields:
        setattr(sample, name, [])


def _wrong(sample: Sample, name: str, seen: str, wanted: str) -> ScoreInvalid:
    return ScoreInvalid(f"sample {sample.index} of group {sample.group_index}: {name} {seen}, wanted {wanted}")


def _length(sample: Sample, name: str, value: Any, length: int) -> None:
    if not isinstance(value, list):
        raise _wrong(sample, name, f"is {type(value).__name__}", f"a list of {length}")
    if len(value) != length:
        raise _wrong(sample, name, f"has {len(value)} entries", str(length))


def _numbers(sample: Sample, name: str, value: Any, length: int) -> None:
    _length(sample, name, value, length)
    for place, entry in enumerate(value):
        if not _is_number(entry):
            raise _wrong(sample, f"{name}[{place}]", f"is {entry!r:.40}", "a finite number")


def _ids(sample: Sample, name: str, value: Any) -> None:
    for place, entry in enumerate(value):
        if type(entry) is not int or entry < 0:
            raise _wrong(sample, f"{name}[{place}]", f"is {entry!r:.40}", "a token id from 0 on")


def _wide(sample: Sample, name: str, value: Any, length: int, width: int) -> None:
    _length(sample, name, value, length)
    for place, row in enumerate(value):
        _length(sample, f"{name}[{place}]", row, width)
        if name in _IDS:
            _ids(sample, f"{name}[{place}]", row)
        else:
            _numbers(sample, f"{name}[{place}]", row, width)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
