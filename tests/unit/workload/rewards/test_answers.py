"""Answers are found where they are marked, and compared as what they mean."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.workload.rewards.answers import answer_of, boxed, equal, last_number, marked_answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{1} and then \boxed{2", "1"),
        (r"Answer: 7 \boxed{8}", "8"),
        ("Answer: 1\nANSWER : 42.\n", "42"),
        ("the answer: yes", "yes"),
        ("Answer:   ", None),
        ("42", None),
        (r"\boxed{}", None),
    ],
)
def test_marked(text: str, found: str | None) -> None:
    assert marked_answer(text) == found


def test_bare() -> None:
    assert answer_of(" 42\n", bare=True) == "42"
    assert answer_of(" 42\n", bare=False) is None
    assert answer_of(" \n", bare=True) is None
    assert answer_of("well\nAnswer: 3", bare=True) == "3"


@pytest.mark.parametrize(
    ("answer", "label", "same"),
    [
        ("42", "42.0", True),
        ("$42$", "42", True),
        ("1,234", "1234", True),
        (r"\frac{1}{2}", "0.5", True),
        ("2/4", "1/2", True),
        ("1/0", "1/0", True),
        ("1/0", "2", False),
        ("-3", "3", False),
        (r"\text{Yes}", "yes", True),
        ("a b", "ab", True),
        ("41", "42", False),
        ("9" * 600, "9", False),
    ],
)
def test_equal(answer: str, label: str, same: bool) -> None:
    assert equal(answer, label) is same
    assert equal(label, answer) is same


@given(st.text(max_size=300))
def test_no_text_breaks_it(text: str) -> None:
    assert boxed(text) is None or "\\boxed{" in text
    found = answer_of(text, bare=True)
    assert found is None or found
    assert equal(text, text)
    last_number(text)
