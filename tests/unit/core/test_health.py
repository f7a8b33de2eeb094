"""Signs in a row become a verdict: the table, the budgets, and what must hold for every sequence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.health import HealthBudget, Load, Look, Pulse, Sign, Verdict, works
from relax_slurm.errors import ProtocolError

BUDGET = HealthBudget(mute_suspect=2, mute_failed=4, stalled_suspect=3, stalled_failed=6)
W, M, T, H = Sign.WELL, Sign.MUTE, Sign.STALLED, Sign.HELD


@pytest.mark.parametrize(
    ("look", "sign"),
    [
        (Look(), W),
        (Look(held=True, answers=False), H),
        (Look(moved=True, answers=False), W),
        (Look(answers=False), M),
        (Look(answers=False, works=False), M),
        (Look(answers=True, works=False), T),
        (Look(answers=True, works=True), W),
        (Look(answers=True), W),
    ],
)
def test_what_the_facts_of_a_look_mean(look: Look, sign: Sign) -> None:
    assert look.sign is sign


def verdicts(*signs: Sign) -> list[Verdict]:
    pulse, found = Pulse(), []
    for sign in signs:
        pulse = pulse.after(sign)
        found.append(pulse.verdict(BUDGET))
    return found


@pytest.mark.parametrize(
    ("signs", "wanted"),
    [
        ((M, M, M, M), "well suspect suspect failed"),
        ((T, T, T, T, T, T), "well well suspect suspect suspect failed"),
        ((M, M, W, M), "well suspect well well"),
        ((M, M, H, M), "well suspect well well"),
        # Answering again is a start, and no work for so long stays in doubt.
        ((M, M, M, T, W), "well suspect suspect suspect well"),
        ((M, T, M, T, M, T), "well well suspect suspect suspect failed"),
    ],
)
def test_signs_in_a_row(signs: tuple[Sign, ...], wanted: str) -> None:
    assert [str(verdict) for verdict in verdicts(*signs)] == wanted.split()


@given(st.lists(st.sampled_from(Sign), max_size=30))
def test_nothing_fails_that_was_not_suspect_and_a_good_sign_clears_all(signs: list[Sign]) -> None:
    found = verdicts(*signs)
    for index, verdict in enumerate(found):
        if verdict is Verdict.FAILED:
            assert found[index - 1] is not Verdict.WELL
        if signs[index] in (W, H):
            assert verdict is Verdict.WELL


def test_pauses_are_long_only_while_nothing_is_to_do_and_nothing_in_doubt() -> None:
    assert Pulse().pause(BUDGET, busy=False) == BUDGET.idle_seconds
    assert Pulse().pause(BUDGET, busy=True) == BUDGET.every_seconds
    assert Pulse().after(M).pause(BUDGET, busy=False) == BUDGET.every_seconds


def load(*ranks: dict[str, Any]) -> dict[str, Any]:
    return {"loads": list(ranks)}


@pytest.mark.parametrize(
    ("document", "wanted"),
    [
        (load({"num_running_reqs": 2, "num_used_tokens": 30, "timestamp": 1.5}), Load(2, (2, 0, 30, 1.5))),
        (
            load({"num_running_reqs": 2, "num_used_tokens": 30}, {"num_running_reqs": 1, "num_waiting_reqs": 5}),
            Load(3, (2, 0, 30, 0, 1, 5, 0, 0)),
        ),
        (load({}), Load(0, (0, 0, 0, 0))),
        (load({"num_running_reqs": "2"}), None),
        ({"loads": "none"}, None),
        ({"loads": [1]}, None),
        (None, None),
    ],
)
def test_reading_loads(document: Any, wanted: Load | None) -> None:
    assert Load.read(document) == wanted


@pytest.mark.parametrize(
    ("before", "now", "busy", "wanted"),
    [
        (None, None, False, False),
        (Load(0), None, False, False),
        (None, Load(3, (10,)), True, True),
        (Load(0, (0,)), Load(0, (0,)), False, True),
        (Load(0, (0,)), Load(0, (0,)), True, False),
        (Load(1, (10,)), Load(1, (11,)), True, True),
        (Load(1, (10,)), Load(1, (10,)), False, False),
        (Load(1, (10,)), Load(0, (10,)), False, True),
    ],
)
def test_whether_work_moves(before: Load | None, now: Load | None, busy: bool, wanted: bool) -> None:
    assert works(before, now, busy=busy) is wanted


def test_the_budget_of_a_command() -> None:
    assert HealthBudget.from_wire(None) == HealthBudget()
    assert HealthBudget.from_wire({"mute_failed": 9, "of a newer version": 1}) == HealthBudget(mute_failed=9)


@pytest.mark.parametrize("value", ["9", True, -1, None])
def test_a_budget_that_makes_no_sense(value: Any) -> None:
    with pytest.raises(ProtocolError, match="health is not usable"):
        HealthBudget.from_wire({"mute_failed": value})
