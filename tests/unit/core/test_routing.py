"""One routing rule: names, states, turns and the affinity hash."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.discovery import (
    EngineEntry,
    ModelEntry,
    Policy,
    ReplicaState,
    RoleSnapshot,
    RoutingSpec,
)
from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.core.routing import Rendezvous, RouteResolver, resolve_model
from relax_slurm.errors import BadRequest, Unavailable

READY = ReplicaState.READY


def engines(model: str, indexes: Any) -> tuple[EngineEntry, ...]:
    made = [EngineEntry(f"{model}/replica-{i}", f"http://{model}-{i}:1", READY, True, i) for i in indexes]
    return tuple(sorted(made, key=lambda entry: entry.engine_id))


def snapshot(count: int = 3, *, epoch: str = "e1", revision: int = 1, **routing: Any) -> RoleSnapshot:
    models = {
        name: ModelEntry(
            name,
            READY,
            RouteMode.DIRECT,
            None,
            WeightSource.STATIC,
            None,
            f"served-{name}",
            engines(name, range(count)),
        )
        for name in ("math", "code")
    }
    spec = RoutingSpec("math", {"code-data": "code"}, {"coder": "code"}, **routing)
    return RoleSnapshot(Role.TEACHER, epoch, revision, spec, models)


def with_model(held: RoleSnapshot, name: str = "math", **changes: Any) -> RoleSnapshot:
    models = {**held.models, name: replace(held.models[name], **changes)}
    return replace(held, revision=held.revision + 1, models=models)


@pytest.mark.parametrize(
    ("model", "route_key", "wanted"),
    [
        (None, None, "math"),
        ("code", None, "code"),
        ("coder", None, "code"),
        (None, "code-data", "code"),
        ("math", "code-data", "math"),
        ("coder", "nonsense", "code"),
    ],
)
def test_explicit_model_then_route_key_then_default(model: str, route_key: str, wanted: str) -> None:
    assert resolve_model(snapshot(), model, route_key) == wanted
    target = RouteResolver().resolve(snapshot(), model, route_key)
    assert (target.model, target.served_model_name) == (wanted, f"served-{wanted}")


@pytest.mark.parametrize(
    "request_parts",
    [
        {"model": "physics"},
        {"model": "code-data"},
        {"route_key": "physics"},
        {"route_key": "math"},
        {"model": ""},
        {"model": 7},
        {"model": ["math"]},
        {"model": "math", "route_key": ""},
        {"route_key": False},
        {"affinity_key": ""},
        {"affinity_key": 3},
    ],
)
def test_bad_requests(request_parts: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        RouteResolver().resolve(snapshot(), **request_parts)


def test_target_carries_everything() -> None:
    target = RouteResolver().resolve(snapshot(1, epoch="e9", revision=4), "coder")
    assert target.role is Role.TEACHER
    assert target.url == "http://code-0:1"
    assert (target.engine_id, target.generation) == ("code/replica-0", 0)
    assert (target.epoch, target.revision) == ("e9", 4)


@pytest.mark.parametrize("state", [state for state in ReplicaState if state is not READY])
def test_a_model_that_is_not_ready_is_503(state: ReplicaState) -> None:
    with pytest.raises(Unavailable) as caught:
        RouteResolver().resolve(with_model(snapshot(), state=state))
    assert caught.value.retry_after == 1


def test_only_ready_and_eligible_replicas_take_requests() -> None:
    held = snapshot(3)
    first, second, third = held.models["math"].engines
    mixed = (
        replace(first, state=ReplicaState.DRAINING, direct_eligible=False),
        replace(second, direct_eligible=False),
        third,
    )
    held = with_model(held, engines=mixed)
    resolver = RouteResolver()
    assert {resolver.resolve(held).engine_id for _ in range(5)} == {third.engine_id}
    assert {resolver.resolve(held, affinity_key=str(i)).engine_id for i in range(20)} == {third.engine_id}
    with pytest.raises(Unavailable):
        resolver.resolve(with_model(held, engines=mixed[:2]))


def test_router_mode() -> None:
    routed = with_model(snapshot(0), route_mode=RouteMode.SGLANG_ROUTER, router_url="http://router:1", engines=())
    target = RouteResolver().resolve(routed, affinity_key="k")
    assert (target.url, target.engine_id, target.generation) == ("http://router:1", None, None)
    with pytest.raises(Unavailable):
        RouteResolver().resolve(with_model(routed, router_url=None))


def test_affinity_policy_needs_a_key_even_before_readiness_matters() -> None:
    held = with_model(snapshot(policy=Policy.AFFINITY), state=ReplicaState.SLEEPING)
    with pytest.raises(BadRequest):
        RouteResolver().resolve(held)
    with pytest.raises(Unavailable):
        RouteResolver().resolve(held, affinity_key="k")


def test_turns_are_per_model_and_start_again_with_an_epoch() -> None:
    resolver, held = RouteResolver(), snapshot(3)
    order = [resolver.resolve(held).engine_id for _ in range(4)]
    assert order == ["math/replica-0", "math/replica-1", "math/replica-2", "math/replica-0"]
    assert resolver.resolve(held, "code").engine_id == "code/replica-0"
    later = replace(held, revision=2)
    assert resolver.resolve(later).engine_id == "math/replica-1"
    assert resolver.resolve(later).revision == 2
    assert resolver.resolve(replace(held, epoch="e2")).engine_id == "math/replica-0"


def test_turns_of_roles_do_not_mix() -> None:
    resolver = RouteResolver()
    teacher, judge = snapshot(3), replace(snapshot(3), role=Role.GENRM)
    assert resolver.resolve(teacher).engine_id == "math/replica-0"
    assert resolver.resolve(judge).engine_id == "math/replica-0"
    assert resolver.resolve(teacher).engine_id == "math/replica-1"


def test_affinity_does_not_move_the_turn() -> None:
    resolver, held = RouteResolver(), snapshot(3)
    resolver.resolve(held)
    resolver.resolve(held, affinity_key="k")
    assert resolver.resolve(held).engine_id == "math/replica-1"


ids = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=130, unique=True)


@given(ids, st.lists(st.text(min_size=1), min_size=1, max_size=20), st.data())
def test_a_lost_replica_moves_only_its_own_keys(names: list[str], keys: list[str], data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(names))
    left = [name for name in names if name != lost]
    before, after = Rendezvous("scope", names), Rendezvous("scope", left)
    for key in keys:
        owner = names[before.choose(key)]
        if owner != lost:
            assert left[after.choose(key)] == owner


@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=40, unique=True), st.text(min_size=1))
def test_the_order_of_replicas_does_not_matter(names: list[str], key: str) -> None:
    turned = list(reversed(names))
    assert names[Rendezvous("s", names).choose(key)] == turned[Rendezvous("s", turned).choose(key)]


def test_both_searches_choose_alike_across_the_threshold() -> None:
    """Growing from 90 to 110 replicas one by one moves keys only to the newcomer."""
    names = [f"m/replica-{i}" for i in range(90)]
    keys = [f"k{i}" for i in range(300)]
    owners = {key: names[Rendezvous("s", names).choose(key)] for key in keys}
    for index in range(90, 110):
        names.append(f"m/replica-{index}")
        chooser = Rendezvous("s", names)
        for key in keys:
            owner = names[chooser.choose(key)]
            assert owner in (owners[key], names[-1])
            owners[key] = owner


@pytest.mark.parametrize("count", [2, 7, 64, 200])
def test_load_is_even(count: int) -> None:
    chooser = Rendezvous("s", [f"m/replica-{i}" for i in range(count)])
    loads = Counter(chooser.choose(f"session-{i}") for i in range(200 * count))
    assert min(loads[i] for i in range(count)) > 100
    assert max(loads.values()) < 320


def test_the_hash_is_pinned() -> None:
    """Gateway and direct clients of different versions must agree: a change here moves every key."""
    chooser = Rendezvous("teacher\0math", [f"math/replica-{i}" for i in range(8)])
    assert [chooser.choose(f"session-{i}") for i in range(12)] == PINNED


PINNED = [1, 1, 7, 2, 0, 4, 1, 2, 1, 6, 4, 0]


def test_scopes_spread_independently() -> None:
    names = [f"m/replica-{i}" for i in range(50)]
    one, two = Rendezvous("teacher\0a", names), Rendezvous("teacher\0b", names)
    same = sum(one.choose(str(i)) == two.choose(str(i)) for i in range(1000))
    assert same < 80


def test_odd_text_is_a_key_like_any_other() -> None:
    resolver, held = RouteResolver(), snapshot(5)
    for key in ("\ud800", "\0", "ключ", "x" * 100_000):
        assert resolver.resolve(held, affinity_key=key) == resolver.resolve(held, affinity_key=key)
