"""What a role looks like from outside, as immutable values with the rules that they keep.

Whoever changes something makes a new value and keeps the untouched parts, so that `is` is a cheap test for
"did not change". `check_*` say what a value may mean; the reader of a document and the
registry that publishes one use the same checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Protocol

from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.errors import Unavailable

MAX_ENGINES = 65_536
"""A document with more engines than this is refused: nothing here grows without a bound."""


class DiscoveryInvalid(Unavailable):
    """A snapshot or an update breaks the discovery contract; nobody may route by it."""

    code = "discovery_invalid"


class ReplicaState(StrEnum):
    """State of a replica or a model as published."""

    STARTING = "STARTING"
    """Processes are coming up; nothing may be sent."""
    READY = "READY"
    """Weights, KV cache and CUDA graph resident, weights valid, admission open."""
    DRAINING = "DRAINING"
    """Admission closed, memory is being released."""
    SLEEPING = "SLEEPING"
    """Release confirmed; the process lives, the GPU is free."""
    ONLOADING = "ONLOADING"
    """A lease was given, memory is being taken back."""
    FAILED = "FAILED"
    """Not routable. Says nothing about the GPU."""
    STOPPING = "STOPPING"
    """Shutdown has begun."""
    UNKNOWN = "UNKNOWN"
    """Nothing has been heard for too long; fenced."""
    DEAD = "DEAD"
    """The process is gone."""


class Policy(StrEnum):
    """How a role chooses among the replicas of a DIRECT model."""

    ROUND_ROBIN = "round_robin"
    """By turn, unless the request brings an affinity key."""
    AFFINITY = "affinity"
    """Every request must bring an affinity key."""


WEIGHT_UPDATE_CAPABILITIES = frozenset(
    {
        "weight_update",
        "update_weights",
        "update_weights_from_disk",
        "update_weights_from_tensor",
        "update_weights_from_distributed",
        "init_weights_update_group",
        "update_weight_version",
        "dcs",
        "lora",
        "dynamic_lora",
        "seed_sync",
    }
)
"""Capabilities that a STATIC model must not have."""


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One logical replica: its head. Followers and prefill/decode workers are never published."""

    engine_id: str
    base_url: str | None
    state: ReplicaState
    direct_eligible: bool
    generation: int
    """Grows when the worker or its endpoint is replaced."""
    external: bool = False
    """Somebody else's engine: no guard of ours stands in front, and no key of ours belongs there."""

    @property
    def routable(self) -> bool:
        """Whether a request may go straight to this replica."""
        return self.direct_eligible and self.state is ReplicaState.READY


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of a role; `engines` is sorted by engine id (as strings)."""

    name: str
    state: ReplicaState
    route_mode: RouteMode
    router_url: str | None
    weight_source: WeightSource
    weight_version: str | None
    served_model_name: str
    engines: tuple[EngineEntry, ...] = ()
    capabilities: tuple[str, ...] | None = None
    """None when the publisher does not name any."""


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a request names its model."""

    default_model: str
    route_key_map: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    policy: Policy = Policy.ROUND_ROBIN
    policy_revision: int = 0


@dataclass(frozen=True, slots=True)
class RoleSnapshot:
    """Everything a reader needs to route requests of one role."""

    role: Role
    epoch: str
    revision: int
    routing: RoutingSpec
    models: Mapping[str, ModelEntry]

    @property
    def ready(self) -> bool:
        """Whether every model can be resolved to a target right now."""
        return all(model_resolvable(model) for model in self.models.values())


class SnapshotSource(Protocol):
    """Where a gateway or a direct client gets its view from; asking costs nothing per request."""

    def current(self, role: Role) -> RoleSnapshot | None:
        """The role's view; None while there is none within the staleness bound."""
        ...

    def invalidate(self, role: Role) -> None:
        """A request timed out or was given up: have the view confirmed soon."""
        ...


def model_state(states: Iterable[ReplicaState]) -> ReplicaState:
    """A model's state from its replicas': READY if any is, the common one if all agree, else STARTING."""
    seen = set(states)
    if ReplicaState.READY in seen:
        return ReplicaState.READY
    return seen.pop() if len(seen) == 1 else ReplicaState.STARTING


def model_resolvable(model: ModelEntry) -> bool:
    """Whether a request for this model would find a target."""
    if model.state is not ReplicaState.READY:
        return False
    if model.route_mode is RouteMode.SGLANG_ROUTER:
        return model.router_url is not None
    return any(engine.routable for engine in model.engines)


# --- meaning ------------------------------------------------------------------------------------------------

_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?(?:/[^\s?#]*)?", re.IGNORECASE)


def check_url(url: str, where: str) -> None:
    """Refuse anything but http(s)://host[:port][/path]."""
    match = _URL.fullmatch(url)
    if match is None or (match[1] is not None and not 0 < int(match[1]) < 65_536):
        raise DiscoveryInvalid(
            f"{where}: URL {_hide(url)!r} must be http(s) with a host and a valid port and without"
            " credentials, query or fragment; publish a plain base URL"
        )


def _hide(url: str) -> str:
    """The URL without what may be a password in front of `@`."""
    return re.sub(r"//[^/@]*@", "//***@", url)[:200]


def check_engine(engine: EngineEntry, where: str) -> None:
    """Rules of one replica."""
    if engine.base_url is not None:
        check_url(engine.base_url, where)
    if engine.direct_eligible and (engine.state is not ReplicaState.READY or engine.base_url is None):
        raise DiscoveryInvalid(
            f"{where}: direct_eligible is true while state is {engine.state} and base_url is"
            f" {engine.base_url!r}; only a READY replica with a URL may take requests"
        )


def check_model_head(role: Role, model: ModelEntry) -> None:
    """Rules of a model without its engines."""
    where = f"{role}/{model.name}"
    if model.router_url is not None:
        check_url(model.router_url, where)
    if role is not Role.ROLLOUT and model.weight_source is not WeightSource.STATIC:
        raise DiscoveryInvalid(f"{where}: weight_source {model.weight_source} on a {role} model, must be STATIC")
    if model.weight_source is WeightSource.STATIC:
        if model.weight_version is not None:
            raise DiscoveryInvalid(f"{where}: weight_version {model.weight_version!r} on a STATIC model, must be null")
        updates = WEIGHT_UPDATE_CAPABILITIES.intersection(model.capabilities or ())
        if updates:
            raise DiscoveryInvalid(f"{where}: a STATIC model offers {sorted(updates)}; its weights never change")


def check_order(model: ModelEntry, where: str) -> None:
    """Engine ids must be unique and sorted."""
    ids = [engine.engine_id for engine in model.engines]
    for earlier, later in pairwise(ids):
        if earlier >= later:
            raise DiscoveryInvalid(
                f"{where}: engine id {later!r} follows {earlier!r}; ids must be unique and sorted as strings"
            )


def check_routing(role: Role, routing: RoutingSpec, models: Mapping[str, ModelEntry]) -> None:
    """Every target must exist; an alias may not hide another model."""
    named = [("default_model", "", routing.default_model)]
    named += [("alias", name, target) for name, target in routing.aliases.items()]
    named += [("route key", name, target) for name, target in routing.route_key_map.items()]
    for kind, name, target in named:
        if target not in models:
            raise DiscoveryInvalid(
                f"{role} routing: {kind} {name!r} points at {target!r}, none of {sorted(models)[:20]}"
            )
    for alias, target in routing.aliases.items():
        if alias in models and alias != target:
            raise DiscoveryInvalid(f"{role} routing: alias {alias!r} for {target!r} hides the model {alias!r}")


def check_snapshot(snapshot: RoleSnapshot) -> None:
    """All rules of a snapshot; raises `DiscoveryInvalid` at the first that is broken."""
    check_routing(snapshot.role, snapshot.routing, snapshot.models)
    owner: dict[str, str] = {}
    for name, model in snapshot.models.items():
        check_model_head(snapshot.role, model)
        check_order(model, f"{snapshot.role}/{name}")
        for engine in model.engines:
            check_engine(engine, engine.engine_id)
            if owner.setdefault(engine.engine_id, name) != name:
                raise DiscoveryInvalid(
                    f"{snapshot.role}: engine id {engine.engine_id!r} belongs to"
                    f" {owner[engine.engine_id]!r} and {name!r}; an engine serves one model"
                )
    if len(owner) > MAX_ENGINES:
        raise DiscoveryInvalid(f"{snapshot.role}: {len(owner)} engines, at most {MAX_ENGINES} are read")
