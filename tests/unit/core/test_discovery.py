"""Schema 2: what a reader takes, and everything that it must refuse."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.discovery import (
    DiscoveryInvalid,
    ReplicaState,
    from_json,
    model_state,
    to_json,
    to_schema1,
)
from relax_slurm.core.plan import Role, RouteMode

DOCUMENT: dict[str, Any] = {
    "schema_version": 2,
    "role": "teacher",
    "registry_epoch": "000001-abcdef",
    "topology_revision": 3,
    "routing": {
        "default_model": "math",
        "route_key_map": {"math-data": "math"},
        "aliases": {"teacher-checkpoint": "math"},
        "policy": "round_robin",
        "policy_revision": 0,
    },
    "models": {
        "math": {
            "state": "READY",
            "route_mode": "DIRECT",
            "router_url": None,
            "weight_source": "STATIC",
            "weight_version": None,
            "served_model_name": "Qwen/Qwen3-0.6B",
            "engines": [
                {
                    "engine_id": "math/replica-0",
                    "base_url": "http://node:30000",
                    "state": "READY",
                    "direct_eligible": True,
                    "generation": 1,
                },
                {
                    "engine_id": "math/replica-1",
                    "base_url": None,
                    "state": "STARTING",
                    "direct_eligible": False,
                    "generation": 1,
                },
            ],
        }
    },
}

GONE = object()


def changed(path: str, value: Any) -> dict[str, Any]:
    """The document with one place exchanged (or removed)."""
    document = copy.deepcopy(DOCUMENT)
    *steps, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    place: Any = document
    for step in steps:
        place = place[step]
    if value is GONE:
        del place[last]
    else:
        place[last] = value
    return document


ENGINE = "models.math.engines.0"


def test_contract_example_is_read_and_written_back() -> None:
    snapshot = from_json(DOCUMENT)
    assert snapshot.role is Role.TEACHER
    assert snapshot.models["math"].route_mode is RouteMode.DIRECT
    assert snapshot.models["math"].engines[0].routable
    assert not snapshot.models["math"].engines[1].routable
    assert snapshot.ready
    assert to_json(snapshot) == DOCUMENT
    assert from_json(json.dumps(DOCUMENT)) == snapshot


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("extra", 1),
        ("models.math.extra", {"a": 1}),
        (f"{ENGINE}.extra", None),
        ("routing.extra", []),
        (f"{ENGINE}.base_url", "https://[::1]:8443/base"),
        (f"{ENGINE}.base_url", "http://10.0.0.1"),
        (f"{ENGINE}.state", "UNKNOWN"),
        (f"{ENGINE}.state", "DEAD"),
        ("models.math.capabilities", ["generate"]),
        ("routing.aliases", {"math": "math"}),
        ("topology_revision", 0),
    ],
)
def test_tolerated(path: str, value: Any) -> None:
    document = changed(path, value)
    if path.endswith("engines.0.state"):
        document["models"]["math"]["engines"][0]["direct_eligible"] = False
    from_json(document)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *[(name, GONE) for name in DOCUMENT],
        *[(f"routing.{name}", GONE) for name in DOCUMENT["routing"]],
        *[(f"models.math.{name}", GONE) for name in DOCUMENT["models"]["math"]],
        *[(f"{ENGINE}.{name}", GONE) for name in DOCUMENT["models"]["math"]["engines"][0]],
        ("schema_version", 1),
        ("schema_version", "2"),
        ("role", "critic"),
        ("registry_epoch", ""),
        ("registry_epoch", 4),
        ("topology_revision", "3"),
        ("topology_revision", -1),
        ("topology_revision", True),
        ("routing.default_model", "physics"),
        ("routing.default_model", ""),
        ("routing.route_key_map", {"k": "physics"}),
        ("routing.aliases", {"a": "physics"}),
        ("routing.aliases", {"a": 1}),
        ("routing.policy", "random"),
        ("routing.policy_revision", None),
        ("models", []),
        ("models", {}),
        ("models.math.state", "RUNNING"),
        ("models.math.route_mode", "PROXY"),
        ("models.math.router_url", "http://u:p@host:1"),
        ("models.math.weight_source", "ACTOR"),
        ("models.math.weight_version", "7"),
        ("models.math.served_model_name", ""),
        ("models.math.capabilities", ["generate", "update_weights_from_disk"]),
        ("models.math.capabilities", "generate"),
        ("models.math.engines", {}),
        (f"{ENGINE}.engine_id", ""),
        (f"{ENGINE}.engine_id", 7),
        (f"{ENGINE}.engine_id", "math/replica-1"),
        (f"{ENGINE}.engine_id", "math/replica-2"),
        (f"{ENGINE}.base_url", None),
        (f"{ENGINE}.base_url", "node:30000"),
        (f"{ENGINE}.base_url", "ftp://node:30000"),
        (f"{ENGINE}.base_url", "http://"),
        (f"{ENGINE}.base_url", "http://:30000"),
        (f"{ENGINE}.base_url", "http://user@node:30000"),
        (f"{ENGINE}.base_url", "http://node:30000?x=1"),
        (f"{ENGINE}.base_url", "http://node:30000#top"),
        (f"{ENGINE}.base_url", "http://node:0"),
        (f"{ENGINE}.base_url", "http://node:70000"),
        (f"{ENGINE}.base_url", "http://no de:1"),
        (f"{ENGINE}.base_url", "http://node:1\n"),
        (f"{ENGINE}.state", "SLEEPING"),
        (f"{ENGINE}.direct_eligible", 1),
        (f"{ENGINE}.generation", "1"),
        (f"{ENGINE}.generation", 1.5),
    ],
)
def test_refused(path: str, value: Any) -> None:
    with pytest.raises(DiscoveryInvalid) as caught:
        from_json(changed(path, value))
    assert caught.value.http_status == 503
    assert caught.value.retry_after == 1
    assert "u:p" not in caught.value.message


def test_alias_may_not_hide_another_model() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["models"]["code"] = {**copy.deepcopy(DOCUMENT["models"]["math"]), "engines": []}
    from_json(document)
    document["routing"]["aliases"]["code"] = "math"
    with pytest.raises(DiscoveryInvalid, match="hides"):
        from_json(document)


def test_an_engine_serves_one_model() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["models"]["code"] = copy.deepcopy(DOCUMENT["models"]["math"])
    with pytest.raises(DiscoveryInvalid, match="one model"):
        from_json(document)


@pytest.mark.parametrize(("version", "fits"), [("0", True), (None, True), ("", False), (0, False)])
def test_weight_version_is_text(version: Any, fits: bool) -> None:
    document = copy.deepcopy(DOCUMENT)
    document["role"] = "rollout"
    document["models"]["math"].update(weight_source="ACTOR", weight_version=version)
    if fits:
        assert from_json(document).models["math"].weight_version == version
    else:
        with pytest.raises(DiscoveryInvalid):
            from_json(document)


@pytest.mark.parametrize("document", [None, [], 3, "", "{", b"\xff", {"schema_version": 2}])
def test_not_even_a_document(document: Any) -> None:
    with pytest.raises(DiscoveryInvalid):
        from_json(document)


def test_credentials_are_not_repeated() -> None:
    with pytest.raises(DiscoveryInvalid) as caught:
        from_json(changed(f"{ENGINE}.base_url", "http://user:secret@node:1"))
    assert "secret" not in caught.value.message


def test_schema1_lists_regular_heads() -> None:
    assert to_schema1(from_json(DOCUMENT)) == {
        "models": {
            "math": {
                "engine_groups": [
                    {
                        "engines": [
                            {"rank": 0, "status": "READY", "url": "http://node:30000"},
                            {"rank": 1, "status": "STARTING", "url": None},
                        ]
                    }
                ]
            }
        },
        "total_engines": 2,
    }


@given(st.lists(st.sampled_from(ReplicaState), max_size=6))
def test_model_state_rule(states: list[ReplicaState]) -> None:
    state = model_state(states)
    if ReplicaState.READY in states:
        assert state is ReplicaState.READY
    elif states and len(set(states)) == 1:
        assert state is states[0]
    else:
        assert state is ReplicaState.STARTING


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
paths = st.sampled_from(
    [
        *DOCUMENT,
        *(f"routing.{n}" for n in DOCUMENT["routing"]),
        *(f"models.math.{n}" for n in ("state", "engines")),
    ]
    + [f"{ENGINE}.{n}" for n in DOCUMENT["models"]["math"]["engines"][0]]
)


@given(paths, json_values)
def test_any_value_anywhere_is_read_or_refused(path: str, value: Any) -> None:
    try:
        snapshot = from_json(changed(path, value))
    except DiscoveryInvalid:
        return
    assert from_json(to_json(snapshot)) == snapshot
