"""The table of leases and who stands in whose way."""

from __future__ import annotations

import itertools

import pytest

from relax_slurm.config.load import load
from relax_slurm.core import placement
from relax_slurm.core.lease import TABLE, IllegalLeaseEvent, Lease, LeaseEvent, LeaseState, Sharing, mermaid, sharing

S, E = LeaseState, LeaseEvent


def shared(config: str) -> Sharing:
    return sharing(placement.plan(load(f"configs/{config}.yaml")))


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LeaseState, LeaseEvent)))
def test_the_table_is_all_there_is(state: LeaseState, event: LeaseEvent) -> None:
    lease = Lease("genrm", state)
    after = TABLE.get((state, event))
    if after is None:
        with pytest.raises(IllegalLeaseEvent, match=f"event {event} in state {state}"):
            lease.apply(event)
        assert lease.state is state
    else:
        assert lease.apply(event) is state
        assert lease.state is after


def test_doubt_is_left_by_evidence_only() -> None:
    assert {event for state, event in TABLE if state is S.BLOCKED} == {E.RECOVER}
    lease = Lease("teacher", S.DRAINING)
    lease.apply(E.DOUBT, "no answer")
    assert lease.reason == "no answer"
    lease.apply(E.RECOVER)
    assert (lease.state, lease.reason) == (S.SLEEPING, "")


def test_every_state_can_come_back_to_sleep() -> None:
    reached = {S.SLEEPING}
    while more := {state for (state, _), after in TABLE.items() if after in reached} - reached:
        reached |= more
    assert reached == set(LeaseState)


def test_deferred_roles_and_training_stand_in_each_others_way() -> None:
    found = shared("defer")
    names = {"rollout", "genrm", "teacher", "training"}
    assert {holder.name for holder in found.holders} == names
    for name in names:
        assert set(found.rivals(name)) == names - {name}
        assert found[name].deferred == (name != "training")


def test_slices_meet_training_only() -> None:
    found = shared("split")
    assert found.rivals("genrm") == ("training",)
    assert set(found.rivals("training")) == {"rollout", "genrm", "teacher"}
    assert not any(holder.deferred for holder in found.holders)


def test_pools_of_their_own_meet_nobody() -> None:
    found = shared("decoupled")
    assert all(found.rivals(holder.name) == () for holder in found.holders)


def test_names_are_unique_and_known() -> None:
    found = shared("defer")
    assert "genrm" in found
    assert "critic" not in found
    with pytest.raises(KeyError, match="critic"):
        found["critic"]
    with pytest.raises(ValueError, match="twice"):
        Sharing((*found.holders, found["genrm"]))


def test_the_picture_names_every_edge() -> None:
    assert len(mermaid().splitlines()) == len(TABLE) + 2
