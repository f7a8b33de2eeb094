"""Scores are complete or nothing reaches the originals."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.workload.failures import ScoreInvalid
from relax_slurm.workload.samples import WRITE_BACK, Sample, staged_copy
from relax_slurm.workload.validate import Expected, check_generated, clear_per_token, write_back
from tests.unit.workload.stage import sample

ALL = frozenset(
    {
        "teacher_log_probs",
        "teacher_topk_token_ids",
        "teacher_topk_log_probs",
        "teacher_at_student_topk_log_probs",
        "student_at_teacher_topk_log_probs",
    }
)
EXPECTED = Expected(fields=ALL, top_k=2)


def state(samples: list[Sample]) -> list[dict[str, Any]]:
    return [{each.name: staged_copy(one).__getattribute__(each.name) for each in fields(Sample)} for one in samples]


def scored(one: Sample) -> Sample:
    copy = staged_copy(one)
    copy.reward = 1.0
    length = copy.response_length
    if not copy.scored:
        clear_per_token(copy, ALL)
        return copy
    copy.teacher_log_probs = [-0.5] * length
    copy.teacher_topk_token_ids = [[1, 2] for _ in range(length)]
    copy.teacher_topk_log_probs = [[-0.1, -0.2] for _ in range(length)]
    copy.teacher_at_student_topk_log_probs = [[-0.3, -0.4] for _ in range(length)]
    copy.student_at_teacher_topk_log_probs = [[-0.5, -0.6] for _ in range(length)]
    return copy


def test_everything_valid_is_written_back() -> None:
    originals = [sample(length=2), sample(0, 1, length=0), sample(0, 2, length=2, remove_sample=True)]
    write_back(originals, [scored(one) for one in originals], EXPECTED)
    assert originals[0].teacher_topk_token_ids == [[1, 2], [1, 2]]
    assert originals[1].teacher_log_probs == []
    assert originals[2].student_at_teacher_topk_log_probs == []
    assert [one.reward for one in originals] == [1.0, 1.0, 1.0]


Damage = Any


def _set(name: str, value: Any) -> Damage:
    return lambda one: setattr(one, name, value)


def _put(name: str, value: Any) -> Damage:
    return lambda one: getattr(one, name).__setitem__(0, value)


def _inner(name: str, value: Any) -> Damage:
    return lambda one: getattr(one, name)[0].__setitem__(0, value)


DAMAGES: list[Damage] = [
    *(_set("reward", value) for value in (None, math.nan, math.inf, "1", True)),
    *(_set(name, None) for name in sorted(ALL)),
    *(_set(name, []) for name in sorted(ALL)),
    *(_set(name, (1.0,)) for name in sorted(ALL)),
    *(_put("teacher_log_probs", value) for value in (math.nan, -math.inf, None, "x", True)),
    *(_put("teacher_topk_token_ids", value) for value in ([1], [1, 2, 3], None, [1, "2"])),
    *(_inner("teacher_topk_token_ids", value) for value in (-1, 1.0, True, None)),
    *(_inner(name, math.nan) for name in sorted(ALL - {"teacher_log_probs", "teacher_topk_token_ids"})),
    *(_put(name, [-0.1]) for name in sorted(ALL - {"teacher_log_probs", "teacher_topk_token_ids"})),
    lambda one: one.tokens.append(5),
    _set("response", "another"),
    lambda one: one.metadata.update(x=1),
    _set("rollout_log_probs", None),
]


@given(
    lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    damage=st.sampled_from(DAMAGES),
    data=st.data(),
)
def test_any_failure_leaves_every_original_untouched(lengths: list[int], damage: Damage, data: Any) -> None:
    originals = [sample(0, index, length=length) for index, length in enumerate(lengths)]
    before = state(originals)
    copies = [scored(one) for one in originals]
    damage(copies[data.draw(st.integers(0, len(copies) - 1))])
    with pytest.raises(ScoreInvalid, match="sample "):
        write_back(originals, copies, EXPECTED)
    assert state(originals) == before


def test_what_no_stage_makes_may_not_be_there() -> None:
    one = sample()
    copy = scored(one)
    with pytest.raises(ScoreInvalid, match="no stage of this batch makes it"):
        write_back([one], [copy], Expected(fields=ALL - {"teacher_log_probs"}, top_k=2))
    with pytest.raises(ScoreInvalid, match="1 samples were scored, wanted 2"):
        write_back([one, sample(0, 1)], [copy], EXPECTED)


def test_a_copy_shares_nothing_with_its_original() -> None:
    one = sample(metadata={"a": [1, {"b": 2}]}, teacher_topk_token_ids=[[1]], multimodal_inputs={"image_data": ["x"]})
    copy = staged_copy(one)
    copy.tokens.append(1)
    copy.metadata["a"][1]["b"] = 3
    assert copy.teacher_topk_token_ids is not None
    copy.teacher_topk_token_ids[0].append(2)
    assert copy.multimodal_inputs is not None
    copy.multimodal_inputs["image_data"].append("y")
    assert one.tokens[-1] == 22
    assert one.metadata == {"a": [1, {"b": 2}]}
    assert one.teacher_topk_token_ids == [[1]]
    assert one.multimodal_inputs == {"image_data": ["x"]}
    assert set(WRITE_BACK) <= {each.name for each in fields(Sample)}


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": [20, 21, 22]},
        {"tokens": [1]},
        {"response_length": -1},
        {"tokens": [10, 11, -1, 13, 20, 21, 22]},
        {"loss_mask": [1, 1]},
        {"loss_mask": [1, 1, 2]},
        {"rollout_log_probs": [-0.1]},
        {"rollout_log_probs": [-0.1, math.nan, -0.1]},
    ],
)
def test_a_rollout_that_told_nonsense_is_seen_before_anything_is_scored(changes: dict[str, Any]) -> None:
    with pytest.raises(ScoreInvalid, match="sample 0 of group 0"):
        check_generated([sample(**changes)])


def test_a_usual_rollout_passes() -> None:
    check_generated([sample(), sample(length=0), sample(loss_mask=[1, 0, 1]), sample(rollout_log_probs=None)])
