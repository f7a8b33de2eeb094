"""The simulation can fail: every safeguard that is taken away is missed by some seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.planted import IN_THE_MACHINES, PLANTED
from tests.chaos.run import Outcome, machines, schedule, simulated

FIRST = {
    "a commit without a look at who sleeps": 105,
    "silence is release": 90,
    "weights that are missing count as valid": 285,
}
"""Seeds to begin with where the fault is rare, so that the test is short; any would do with more patience."""
ENOUGH = 1_200


def _found(name: str, one: Callable[[int], Outcome], first: int, enough: int) -> Outcome | None:
    with simulated(), PLANTED[name]():
        return next((found for found in map(one, range(first, first + enough)) if found.broken), None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PLANTED)
def test_the_simulation_finds_planted_faults(name: str) -> None:
    assert _found(name, schedule, FIRST.get(name, 0), ENOUGH) is not None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", IN_THE_MACHINES)
def test_the_machines_alone_find_faults_of_the_machines(name: str) -> None:
    assert _found(name, machines, 0, 5_000) is not None
