"""What the simulated engine says."""

from __future__ import annotations

from fractions import Fraction

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st

from sidecars.sim import answers


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("2+3=", "5"),
        ("What is 12 + 30?", "42"),
        ("State the final answer to the following arithmetic problem: 4 - 10 + 3 =", "-3"),
        ("Calculate (8 - 61) * -2.", "106"),
        ("Calculate -5 * -6.", "30"),
        ("What is 1/4 + 1/4?", "0.5"),
        ("1 / 3", "0.333333"),
        ("3 × 4 ÷ 2", "6"),
        ("user: In 2024 we had 3 cats.\n\nuser: 7*6\n\nassistant:", "42"),
        ("no numbers at all", None),
        ("only 17 here", None),
        ("1/0", None),
        ("", None),
    ],
)
def test_arithmetic(prompt: str, answer: str | None) -> None:
    assert answers.solve(prompt) == answer


def test_reasoning_gym_tasks_are_solved() -> None:
    for task in ("chain_sum", "basic_arithmetic"):
        rows = reasoning_gym.create_dataset(task, size=60, seed=11)
        solved = sum(answers.solve(row["question"]) == row["answer"] for row in rows)
        assert solved >= 55, task


@given(st.lists(st.integers(-999, 999), min_size=2, max_size=6), st.data())
def test_sums_are_right(numbers: list[int], data: st.DataObject) -> None:
    signs = [data.draw(st.sampled_from("+-*")) for _ in numbers[1:]]
    text = str(numbers[0]) + "".join(f" {sign} ({n})" for sign, n in zip(signs, numbers[1:], strict=True))
    assert answers.solve(f"What is {text}?") == str(eval(text))


@given(st.text(max_size=300))
def test_any_text_is_survived(text: str) -> None:
    answers.solve(text)
    assert answers.grade(text) in {"0", "1"}


@given(st.text("0123456789+-*/(). \n", max_size=600))
def test_arithmetic_looking_text_is_survived(text: str) -> None:
    answers.solve(text)


@given(st.fractions(max_denominator=50), st.floats(0, 1, exclude_max=True))
def test_wrong_answers_are_wrong(value: Fraction, draw: float) -> None:
    right = answers.number_text(value)
    assert answers.wrong(right, draw) != right


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Question: 2+3\nReference answer: 5\nStudent answer: 5", "1"),
        ("Question: 2+3\nReference answer: 5\nStudent answer: 6", "0"),
        ("Ground truth: 12\nResponse: so it is \\boxed{12}", "1"),
        ("Label: Paris\nAnswer: paris.", "1"),
        ("Label: Paris\nAnswer: London", "0"),
        ("Model answer: 0.50\nCorrect answer: 1/2", "1"),
        ("Is this right? 2+3=5", "1"),
        ("Is this right? 2+3=6", "0"),
        ("nothing to compare", "0"),
    ],
)
def test_grading(text: str, verdict: str) -> None:
    assert answers.grade(text) == verdict


def test_filler_repeats_for_a_seed_only() -> None:
    def first(seed: int) -> list[str]:
        return [word for word, _ in zip(answers.words(seed), range(20), strict=False)]

    assert first(1) == first(1)
    assert first(1) != first(2)
