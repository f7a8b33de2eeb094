"""Ids of operations: repeated, reused, forgotten."""

from __future__ import annotations

import pytest

from relax_slurm.core import operations
from relax_slurm.core.lifecycle_errors import OperationRetired, OperationReused
from relax_slurm.core.operations import Ask, Method, Operation, Operations, Progress

ACTIVATE = Ask("a1", Method.ACTIVATE, 3, "genrm")


def kept(*asks: Ask) -> Operations:
    found = Operations()
    for ask in asks:
        found.add(ask, Operation(ask))
    return found


def test_the_same_again_is_the_same_operation() -> None:
    found = kept(ACTIVATE)
    assert found.find(Ask("a1", Method.ACTIVATE, 3, "genrm", error="is no part of it")) is found.get("a1")
    assert found.find(Ask("a2", Method.ACTIVATE, 3, "genrm")) is None


@pytest.mark.parametrize(
    "other",
    [
        Ask("a1", Method.DEACTIVATE, 3, "genrm"),
        Ask("a1", Method.ACTIVATE, 4, "genrm"),
        Ask("a1", Method.ACTIVATE, 3, "teacher"),
    ],
)
def test_an_id_stands_for_one_thing(other: Ask) -> None:
    with pytest.raises(OperationReused, match="'a1' was activate genrm of batch 3, now it is"):
        kept(ACTIVATE).find(other)


def test_what_runs_is_not_forgotten() -> None:
    found = kept(ACTIVATE, Ask("d1", Method.DEACTIVATE, 3, "genrm"))
    running = found.get("a1")
    assert running is not None
    running.progress = Progress.RUNNING
    found.retire()
    assert found.running() == [running]
    with pytest.raises(OperationRetired, match="'d1'"):
        found.find(Ask("d1", Method.DEACTIVATE, 3, "genrm"))
    with pytest.raises(OperationRetired):
        found.find(Ask("d1", Method.ACTIVATE, 9, "teacher"))


def test_two_ids_of_one_operation_run_once() -> None:
    found = kept(ACTIVATE)
    running = found.get("a1")
    assert running is not None
    running.progress = Progress.RUNNING
    found.add(Ask("a2", Method.ACTIVATE, 3, "genrm"), running)
    assert found.running() == [running]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "MAX_OPERATIONS", 3)
    monkeypatch.setattr(operations, "MAX_RETIRED", 4)
    found = kept(*(Ask(f"a{n}", Method.ACTIVATE, 3, "genrm") for n in range(3)))
    more = Ask("one more", Method.ACTIVATE, 3, "genrm")
    assert found.find(more) is None
    found.add(more, Operation(more))
    assert len(found) == 3
    with pytest.raises(OperationRetired):
        found.find(Ask("a0", Method.ACTIVATE, 3, "genrm"))
    assert found.get("a1") is not None
    for generation in range(3):
        found.retire()
        assert len(found) == 0
        for n in range(3):
            ask = Ask(f"b{generation}{n}", Method.ACTIVATE, 3, "genrm")
            assert found.find(ask) is None
            found.add(ask, Operation(ask))
    found.retire()
    assert found.find(Ask("a0", Method.DEACTIVATE, 3, "genrm")) is None, "beyond the window an id is new again"
    with pytest.raises(OperationRetired):
        found.find(Ask("b22", Method.ACTIVATE, 3, "genrm"))
