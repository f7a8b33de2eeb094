"""Publishing, updates and the Clone pattern."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.discovery import (
    DiscoveryInvalid,
    EngineEntry,
    ModelEntry,
    Policy,
    ReplicaState,
    RoleSnapshot,
    RoutingSpec,
)
from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.core.registry import Action, Registry, SubscriberState, Update, apply, diff, update_from_json
from relax_slurm.core.update import joined

READY, SLEEPING, STARTING = ReplicaState.READY, ReplicaState.SLEEPING, ReplicaState.STARTING
NAMES = ("m0", "m1", "m2")


def engine(model: str, index: int, state: ReplicaState = READY, generation: int = 1) -> EngineEntry:
    return EngineEntry(f"{model}/replica-{index}", f"http://n{index}:1", state, state is READY, generation)


def model(name: str, *engines: EngineEntry, state: ReplicaState = READY, version: str = "0") -> ModelEntry:
    ordered = tuple(sorted(engines, key=lambda entry: entry.engine_id))
    return ModelEntry(name, state, RouteMode.DIRECT, None, WeightSource.ACTOR, version, name, ordered)


@st.composite
def pictures(draw: st.DrawFn) -> tuple[RoutingSpec, list[ModelEntry]]:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    models = []
    for name in names:
        indexes = draw(st.lists(st.integers(0, 12), max_size=4, unique=True))
        engines = [engine(name, i, draw(st.sampled_from([READY, SLEEPING])), draw(st.integers(1, 2))) for i in indexes]
        models.append(model(name, *engines, version=draw(st.sampled_from(["0", "1"]))))
    routing = RoutingSpec(
        draw(st.sampled_from(names)),
        aliases={"alias": draw(st.sampled_from(names))} if draw(st.booleans()) else {},
        policy=draw(st.sampled_from(Policy)),
    )
    return routing, models


def history(steps: list[tuple[RoutingSpec, list[ModelEntry]]]) -> tuple[list[RoleSnapshot], list[Update]]:
    registry = Registry("000001-aaaaaa")
    snapshots, updates = [], []
    for routing, models in steps:
        update = registry.publish(Role.ROLLOUT, routing, models)
        if update is not None:
            current = registry.snapshot(Role.ROLLOUT)
            assert current is not None
            snapshots.append(current)
            updates.append(over_the_wire(update))
    return snapshots, updates


def over_the_wire(update: Update) -> Update:
    return update_from_json({"kind": "update", **json.loads(json.dumps(update.to_json()))})


@given(st.lists(pictures(), min_size=1, max_size=6))
def test_apply_is_the_inverse_of_diff(steps: list[tuple[RoutingSpec, list[ModelEntry]]]) -> None:
    snapshots, updates = history(steps)
    held = None
    for revision, (snapshot, update) in enumerate(zip(snapshots, updates, strict=True), start=1):
        assert (update.base_revision, update.revision) == (revision - 1, revision)
        assert not update.empty
        held = apply(held, update)
        assert held == snapshot
        assert apply(snapshots[0], replace(diff(snapshots[0], snapshot), base_revision=1)) == snapshot


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([READY, SLEEPING, STARTING])), max_size=12))
def test_joined_updates_say_the_same(steps: list[tuple[int, ReplicaState]]) -> None:
    registry = Registry("000001-aaaaaa")
    first = registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", *(engine("m0", i) for i in range(4)))])
    held = apply(None, first) if first is not None else None
    updates = [registry.publish_engine(Role.ROLLOUT, "m0", engine("m0", index, state)) for index, state in steps]
    told = [update for update in updates if update is not None]
    one = told[0] if told else None
    for update in told[1:]:
        assert one is not None
        one = joined(one, update)
    if one is not None:
        held = apply(held, over_the_wire(one))
    assert held == registry.snapshot(Role.ROLLOUT)


def test_updates_that_cannot_be_joined() -> None:
    registry = Registry("e")
    first = registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", engine("m0", 0), engine("m0", 1))])
    second, third = (registry.publish_engine(Role.ROLLOUT, "m0", engine("m0", i, SLEEPING)) for i in (0, 1))
    fourth = registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", engine("m0", 0))])
    assert first is not None
    assert second is not None
    assert third is not None
    assert fourth is not None
    assert joined(first, second) is None, "the first publication carries the routing"
    assert joined(third, second) is None, "in the wrong order"
    assert joined(third, fourth) is None, "an engine is removed"
    assert joined(second, replace(third, epoch="f")) is None


def test_publishing_the_same_changes_nothing() -> None:
    registry = Registry("e")
    picture = RoutingSpec("m0"), [model("m0", engine("m0", 1), engine("m0", 0))]
    first = registry.publish(Role.ROLLOUT, *picture)
    assert first is not None
    assert first.revision == 1
    before = registry.snapshot(Role.ROLLOUT)
    assert registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", engine("m0", 0), engine("m0", 1))]) is None
    assert registry.snapshot(Role.ROLLOUT) is before
    assert registry.revisions() == {"rollout": 1}
    assert registry.publish_engine(Role.ROLLOUT, "m0", engine("m0", 1)) is None


def test_an_update_carries_only_what_changed() -> None:
    registry = Registry("e")
    models = [model("m0", *(engine("m0", i) for i in range(3))), model("m1", engine("m1", 0))]
    registry.publish(Role.ROLLOUT, RoutingSpec("m0"), models)
    old = registry.snapshot(Role.ROLLOUT)
    update = registry.publish_engine(Role.ROLLOUT, "m0", engine("m0", 1, SLEEPING))
    assert update is not None
    body = update.to_json()["update"]
    assert list(body) == ["engines"]
    assert [entry["engine_id"] for entry in body["engines"]["m0"]] == ["m0/replica-1"]
    new = registry.snapshot(Role.ROLLOUT)
    assert new is not None
    assert apply(old, over_the_wire(update)) == new
    assert old is not None
    assert new.models["m1"] is old.models["m1"]
    assert update == diff(old, new)


def test_model_state_follows_its_replicas() -> None:
    registry = Registry("e")
    registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", engine("m0", 0), engine("m0", 1))])
    states = []
    for index, state in [(0, SLEEPING), (1, STARTING), (1, SLEEPING), (0, READY)]:
        registry.publish_engine(Role.ROLLOUT, "m0", engine("m0", index, state))
        snapshot = registry.snapshot(Role.ROLLOUT)
        assert snapshot is not None
        states.append(snapshot.models["m0"].state)
    assert states == [READY, STARTING, SLEEPING, READY]


def test_what_a_reader_would_refuse_is_not_published() -> None:
    registry = Registry("e")
    registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", engine("m0", 0))])
    before = registry.snapshot(Role.ROLLOUT)
    with pytest.raises(DiscoveryInvalid):
        registry.publish(Role.ROLLOUT, RoutingSpec("m1"), [model("m0")])
    with pytest.raises(DiscoveryInvalid):
        registry.publish_engine(Role.ROLLOUT, "m0", EngineEntry("m0/replica-0", None, SLEEPING, True, 1))
    both = [model("m0", engine("m0", 0)), model("m1", engine("m1", 0))]
    other = Registry("e")
    other.publish(Role.ROLLOUT, RoutingSpec("m0"), both)
    with pytest.raises(DiscoveryInvalid, match="belongs to"):
        other.publish_engine(Role.ROLLOUT, "m0", engine("m1", 0))
    with pytest.raises(DiscoveryInvalid):
        registry.publish(Role.TEACHER, RoutingSpec("m0"), [model("m0")])
    assert registry.snapshot(Role.ROLLOUT) is before
    assert registry.snapshot(Role.TEACHER) is None


@pytest.mark.parametrize(
    "body",
    [
        None,
        {},
        {"role": "rollout", "epoch": "e", "base_revision": 0, "revision": 1},
        {"role": "rollout", "epoch": "e", "base_revision": "0", "revision": 1, "update": {}},
        {
            "role": "rollout",
            "epoch": "e",
            "base_revision": 0,
            "revision": 1,
            "update": {"engines": {"m": [{}]}},
        },
        {"role": "rollout", "epoch": "e", "base_revision": 0, "revision": 1, "update": {"models": {"m": {}}}},
    ],
)
def test_ill_formed_updates_are_refused(body: object) -> None:
    with pytest.raises(DiscoveryInvalid):
        update_from_json(body)


def test_an_update_for_an_unknown_model_changes_nothing() -> None:
    snapshots, _ = history([(RoutingSpec("m0"), [model("m0")])])
    stray = Update(Role.ROLLOUT, snapshots[0].epoch, 1, 2, engines={"mX": (engine("mX", 0),)})
    with pytest.raises(DiscoveryInvalid):
        apply(snapshots[0], stray)


@given(st.lists(pictures(), min_size=1, max_size=8), st.randoms(use_true_random=False), st.integers(1, 6))
def test_lossy_reordered_duplicated_delivery_ends_equal(
    steps: list[tuple[RoutingSpec, list[ModelEntry]]], rng: random.Random, queue_limit: int
) -> None:
    """Whatever the network does to updates, snapshots asked for on demand make the view right again."""
    snapshots, updates = history(steps)
    mangled = [update for update in updates for _ in range(rng.choice([0, 1, 1, 2]))]
    for _ in range(rng.randrange(4)):
        if len(mangled) > 1:
            here = rng.randrange(len(mangled) - 1)
            mangled[here], mangled[here + 1] = mangled[here + 1], mangled[here]
    state = SubscriberState(Role.ROLLOUT, queue_limit=queue_limit)
    now = 0.0
    asked = state.on_time(now) is Action.RESYNC
    published = 0
    for update in mangled:
        now += 0.1
        published = max(published, update.revision)
        asked = state.on_update(update, now) is Action.RESYNC or asked
        if asked and rng.random() < 0.5:
            answer = snapshots[rng.randrange(max(0, published - 2), published)]
            asked = state.on_snapshot(answer, now) is Action.RESYNC
        if state.snapshot is not None:
            assert state.snapshot == snapshots[state.snapshot.revision - 1]
    last = snapshots[-1]
    for _ in range(3):
        now += 1.0
        state.on_heartbeat(last.epoch, {"rollout": last.revision}, now)
        if state.awaiting:
            state.on_snapshot(last, now)
    assert state.snapshot == last
    assert state.current(now) is state.snapshot
    assert not state.awaiting


def two_epochs() -> tuple[RoleSnapshot, RoleSnapshot]:
    snapshots = []
    for epoch in ("000001-ffffff", "000002-000000"):
        registry = Registry(epoch)
        registry.publish(Role.ROLLOUT, RoutingSpec("m0"), [model("m0", engine("m0", 0))])
        snapshot = registry.snapshot(Role.ROLLOUT)
        assert snapshot is not None
        snapshots.append(snapshot)
    return snapshots[0], snapshots[1]


def test_a_new_epoch_is_a_resync_and_an_old_one_is_ignored() -> None:
    old, new = two_epochs()
    state = SubscriberState(Role.ROLLOUT)
    assert state.on_snapshot(old, 0.0) is Action.APPLIED
    assert state.on_heartbeat(new.epoch, {"rollout": 1}, 1.0) is Action.RESYNC
    assert state.on_snapshot(new, 1.1) is Action.APPLIED
    assert state.on_snapshot(old, 1.2) is Action.DROPPED
    assert state.on_heartbeat(old.epoch, {"rollout": 9}, 1.3) is Action.DROPPED
    stale = Update(Role.ROLLOUT, old.epoch, 1, 2, routing=RoutingSpec("m0", policy_revision=1))
    assert state.on_update(stale, 1.4) is Action.DROPPED
    assert state.snapshot is new


def test_silence_makes_the_view_stale() -> None:
    _, snapshot = two_epochs()
    state = SubscriberState(Role.ROLLOUT, staleness_seconds=10.0)
    assert state.current(0.0) is None
    state.on_snapshot(snapshot, 0.0)
    state.on_heartbeat(snapshot.epoch, {"rollout": 1}, 5.0)
    assert state.current(15.0) is snapshot
    assert state.current(15.1) is None
    assert state.on_time(15.1) is Action.RESYNC


def test_heartbeats_do_not_freshen_a_view_that_awaits_a_snapshot() -> None:
    _, snapshot = two_epochs()
    state = SubscriberState(Role.ROLLOUT, staleness_seconds=10.0, retry_seconds=1.0)
    state.on_snapshot(snapshot, 0.0)
    assert state.on_heartbeat(snapshot.epoch, {"rollout": 2}, 1.0) is Action.RESYNC
    actions = [state.on_heartbeat(snapshot.epoch, {"rollout": 2}, float(second)) for second in range(2, 12)]
    assert set(actions) == {Action.CURRENT}
    assert state.current(9.0) is snapshot
    assert state.current(11.0) is None
    assert state.on_time(11.0) is Action.RESYNC


def test_invalidate_asks_once_and_keeps_serving_within_the_bound() -> None:
    _, snapshot = two_epochs()
    state = SubscriberState(Role.ROLLOUT)
    state.on_snapshot(snapshot, 0.0)
    assert state.invalidate(1.0) is Action.RESYNC
    assert state.invalidate(1.1) is Action.CURRENT
    assert state.current(1.2) is snapshot
    assert state.on_snapshot(snapshot, 1.3) is Action.APPLIED
    assert not state.awaiting


def test_the_first_publication_is_a_snapshot_in_itself() -> None:
    routing = RoutingSpec("m0")
    snapshots, (first, second) = history([(routing, [model("m0")]), (routing, [model("m0", engine("m0", 0))])])
    state = SubscriberState(Role.ROLLOUT)
    assert state.on_time(0.0) is Action.RESYNC
    assert state.on_update(second, 0.1) is Action.QUEUED
    assert state.on_update(first, 0.2) is Action.APPLIED
    assert state.snapshot == snapshots[-1]
    assert not state.awaiting


def test_the_queue_is_bounded() -> None:
    state = SubscriberState(Role.ROLLOUT, queue_limit=3)
    for revision in range(2, 11):
        state.on_update(Update(Role.ROLLOUT, "e", revision - 1, revision), 0.0)
    assert state.counters.overflowed == 6
    assert state.counters.resyncs == 1
    assert state.on_update(Update(Role.TEACHER, "e", 0, 1), 0.0) is Action.DROPPED


def test_a_routed_model_changes_by_its_head() -> None:
    registry = Registry("e1")
    routed = replace(
        model("m", engine("m", 0, ReplicaState.STARTING), state=ReplicaState.STARTING),
        route_mode=RouteMode.SGLANG_ROUTER,
    )
    registry.publish(Role.ROLLOUT, RoutingSpec("m"), [routed])
    before = registry.snapshot(Role.ROLLOUT)
    assert before is not None
    up = registry.publish_engine(Role.ROLLOUT, "m", engine("m", 0), ReplicaState.STARTING)
    url = registry.publish_head(Role.ROLLOUT, "m", router_url="http://head:1", state=READY)
    assert up is not None
    assert url is not None
    assert registry.publish_head(Role.ROLLOUT, "m", router_url="http://head:1", state=READY) is None
    with pytest.raises(DiscoveryInvalid):
        registry.publish_head(Role.ROLLOUT, "m", router_url="http://u:p@head:1", state=READY)
    after = registry.snapshot(Role.ROLLOUT)
    assert after is not None
    assert apply(apply(before, over_the_wire(up)), over_the_wire(url)) == after
    assert after.ready
    assert after.models["m"].engines == (engine("m", 0),)
