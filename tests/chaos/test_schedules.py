"""No schedule breaks a promise, and a broken one can be read and seen again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.chaos import planted
from tests.chaos.run import Outcome, machines, report, schedule, several, simulated

WHOLE = [range(first, first + 120) for first in range(0, 1_200, 120)]
"""Coordinator, daemons, clients and batches as they are: some thirty milliseconds each."""
MACHINES = [range(first, first + 1_000) for first in range(0, 20_000, 1_000)]
"""The pure machines: three milliseconds each."""

Record = Callable[[str, object], None]


def _promises_hold(one: Callable[[int], Outcome], seeds: range, record: Record) -> None:
    broken, counts = several(one, seeds)
    for name, count in counts.items():
        record(name, count)
    if broken:
        pytest.fail("\n".join(report(outcome) for outcome in broken), pytrace=False)
    # A storm in which nothing is ever committed, or nothing ever fails, would prove little.
    assert counts["committed"] > len(seeds) / 5
    assert counts["failed"] > len(seeds) / 10
    assert counts["recovered"] > 0
    assert counts["blocked"] > 0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", WHOLE, ids=lambda seeds: f"from_{seeds.start}")
def test_the_whole_keeps_its_promises(seeds: range, record_property: Record) -> None:
    _promises_hold(schedule, seeds, record_property)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seeds", MACHINES, ids=lambda seeds: f"from_{seeds.start}")
def test_the_machines_keep_their_promises(seeds: range, record_property: Record) -> None:
    _promises_hold(machines, seeds, record_property)


@pytest.mark.parametrize("layer", [[], ["--machines"]], ids=["whole", "machines"])
def test_a_seed_is_one_schedule_in_every_process(layer: list[str]) -> None:
    told = set()
    for hashes in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-m", "tests.chaos.run", "--seed", "7", "--story", *layer],
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        )
        told.add(found.stdout)
    assert len(told) == 1


@pytest.mark.parametrize("one", [schedule, machines])
def test_a_broken_promise_is_told_in_numbered_steps_with_the_command_to_see_it_again(
    one: Callable[[int], Outcome],
) -> None:
    with simulated(), planted.PLANTED["a retry starts a second operation"]():
        outcome = next(found for found in map(one, range(400)) if found.broken)
    *story, last, again = report(outcome).splitlines()
    assert [int(line.split()[0]) for line in story] == list(range(1, len(story) + 1))
    assert "BROKEN" in story[-1]
    assert "began a second time" in story[-1]
    assert last == f"seed {outcome.seed} broke a promise: {outcome.broken}"
    assert again.startswith(f"see it again: python -m tests.chaos.run --seed {outcome.seed}")
