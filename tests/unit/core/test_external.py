"""Looks at an engine that somebody else runs, and what discovery shows of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.discovery import from_json, to_json
from relax_slurm.core.external import FAILURE_BUDGET, Look, Sight, model_entry
from relax_slurm.core.plan import ExternalPlan, ModelPlan, Role, RouteMode, WeightSource
from relax_slurm.core.snapshot import ReplicaState, RoleSnapshot, RoutingSpec

GOOD, BAD = Look(True, "7"), Look(False, reason="no answer")
READY, FAILED, STARTING = ReplicaState.READY, ReplicaState.FAILED, ReplicaState.STARTING
ENGINES = (ExternalPlan("m/external-0", "http://a:1"), ExternalPlan("m/external-1", "http://b:1"))


def seen(*looks: Look) -> Sight:
    sight = Sight()
    for look in looks:
        sight = sight.after(look)
    return sight


def model(source: WeightSource = WeightSource.STATIC, role: Role = Role.TEACHER) -> ModelPlan:
    return ModelPlan(role, "m", "", "theirs", RouteMode.DIRECT, source, 0, {}, (), external=ENGINES)


def test_one_bad_look_is_forgiven_and_a_budget_of_them_is_not() -> None:
    assert seen().state is STARTING
    assert seen(BAD).state is FAILED, "nothing was ever good"
    assert seen(GOOD, *[BAD] * (FAILURE_BUDGET - 1)).state is READY
    lost = seen(GOOD, *[BAD] * FAILURE_BUDGET)
    assert (lost.state, lost.reason, lost.generation) == (FAILED, "no answer", 1)
    back = lost.after(GOOD)
    assert (back.state, back.reason, back.generation, back.failures) == (READY, "", 2, 0)


@given(st.lists(st.sampled_from([GOOD, BAD])))
def test_only_a_failure_and_a_return_make_a_new_generation(looks: list[Look]) -> None:
    sight = Sight()
    for look in looks:
        after = sight.after(look)
        assert after.generation - sight.generation == (sight.state is FAILED and after.state is READY)
        assert (after.state is READY) or not look.healthy
        sight = after


def test_the_model_is_ready_with_one_engine_and_says_whose_they_are() -> None:
    entry = model_entry(model(), {"m/external-0": seen(GOOD), "m/external-1": seen(BAD)})
    assert (entry.state, entry.weight_version, entry.served_model_name) == (READY, None, "theirs")
    assert [(engine.external, engine.routable) for engine in entry.engines] == [(True, True), (True, False)]
    snapshot = RoleSnapshot(Role.TEACHER, "000001-abcdef", 1, RoutingSpec("m"), {"m": entry})
    assert from_json(to_json(snapshot)) == snapshot


def test_a_rollout_model_has_the_version_that_its_engine_says() -> None:
    rollout = model(WeightSource.ACTOR, Role.ROLLOUT)
    told = model_entry(rollout, {"m/external-0": seen(GOOD), "m/external-1": seen(BAD)})
    assert told.weight_version == "7"
    assert model_entry(rollout, {engine.engine_id: Sight() for engine in ENGINES}).weight_version == "default"
