"""Discovery schema 2 as JSON: the reader that lets nothing else in, and the writers of schema 2 and 1.

Shape is checked by pydantic: unknown fields are tolerated, missing and ill-typed ones refused. What a
document may mean is checked by `core.snapshot`, whose values this module hands out.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.core.snapshot import (
    DiscoveryInvalid,
    EngineEntry,
    ModelEntry,
    Policy,
    ReplicaState,
    RoleSnapshot,
    RoutingSpec,
    SnapshotSource,
    check_snapshot,
    model_resolvable,
    model_state,
)

__all__ = [
    "DiscoveryInvalid",
    "EngineEntry",
    "ModelEntry",
    "Policy",
    "ReplicaState",
    "RoleSnapshot",
    "RoutingSpec",
    "SnapshotSource",
    "from_json",
    "model_resolvable",
    "model_state",
    "to_json",
    "to_schema1",
]

SCHEMA_VERSION = 2

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]


class Doc(BaseModel):
    """Strict about types, tolerant of unknown fields."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class EngineDoc(Doc):
    """An engine as it arrives."""

    engine_id: Name
    base_url: str | None
    state: Annotated[ReplicaState, Field(strict=False)]
    direct_eligible: bool
    generation: Count
    external: bool = False

    def value(self) -> EngineEntry:
        """The checked shape as a value."""
        return EngineEntry(
            self.engine_id, self.base_url, self.state, self.direct_eligible, self.generation, self.external
        )


class ModelHeadDoc(Doc):
    """A model without its engines as it arrives in an update."""

    state: Annotated[ReplicaState, Field(strict=False)]
    route_mode: Annotated[RouteMode, Field(strict=False)]
    router_url: str | None
    weight_source: Annotated[WeightSource, Field(strict=False)]
    weight_version: Name | None
    served_model_name: Name
    capabilities: list[str] | None = None

    def value(self, name: str, engines: tuple[EngineEntry, ...]) -> ModelEntry:
        """The checked shape as a value."""
        return ModelEntry(
            name=name,
            state=self.state,
            route_mode=self.route_mode,
            router_url=self.router_url,
            weight_source=self.weight_source,
            weight_version=self.weight_version,
            served_model_name=self.served_model_name,
            engines=engines,
            capabilities=None if self.capabilities is None else tuple(self.capabilities),
        )


class ModelDoc(ModelHeadDoc):
    """A model as it arrives in a snapshot."""

    engines: list[EngineDoc]


class RoutingDoc(Doc):
    """The routing part as it arrives."""

    default_model: Name
    route_key_map: dict[Name, Name]
    aliases: dict[Name, Name]
    policy: Annotated[Policy, Field(strict=False)]
    policy_revision: Count

    def value(self) -> RoutingSpec:
        """The checked shape as a value."""
        return RoutingSpec(self.default_model, self.route_key_map, self.aliases, self.policy, self.policy_revision)


class SnapshotDoc(Doc):
    """A whole document as it arrives."""

    schema_version: Literal[2]
    role: Annotated[Role, Field(strict=False)]
    registry_epoch: Name
    topology_revision: Count
    routing: RoutingDoc
    models: dict[Name, ModelDoc]


def refuse(what: str, error: ValidationError) -> DiscoveryInvalid:
    """The first shape error as a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "document"
    seen = repr(first.get("input"))[:80]
    return DiscoveryInvalid(f"{what} {where}: {first['msg']}, seen {seen}; not a discovery schema 2 document")


def from_json(document: object) -> RoleSnapshot:
    """Read schema 2 from a decoded document, or from JSON text; raises `DiscoveryInvalid`."""
    try:
        if isinstance(document, (bytes, bytearray, str)):
            doc = SnapshotDoc.model_validate_json(document)
        else:
            doc = SnapshotDoc.model_validate(document)
    except ValidationError as error:
        raise refuse("snapshot", error) from None
    models = {
        name: model.value(name, tuple([engine.value() for engine in model.engines]))
        for name, model in doc.models.items()
    }
    snapshot = RoleSnapshot(doc.role, doc.registry_epoch, doc.topology_revision, doc.routing.value(), models)
    check_snapshot(snapshot)
    return snapshot


# --- writing ------------------------------------------------------------------------------------------------


def engine_json(engine: EngineEntry) -> dict[str, Any]:
    """An engine as schema 2 writes it."""
    body: dict[str, Any] = {
        "engine_id": engine.engine_id,
        "base_url": engine.base_url,
        "state": engine.state.value,
        "direct_eligible": engine.direct_eligible,
        "generation": engine.generation,
    }
    if engine.external:
        body["external"] = True
    return body


def model_head_json(model: ModelEntry) -> dict[str, Any]:
    """A model without its engines as schema 2 writes it."""
    head: dict[str, Any] = {
        "state": model.state.value,
        "route_mode": model.route_mode.value,
        "router_url": model.router_url,
        "weight_source": model.weight_source.value,
        "weight_version": model.weight_version,
        "served_model_name": model.served_model_name,
    }
    if model.capabilities is not None:
        head["capabilities"] = list(model.capabilities)
    return head


def routing_json(routing: RoutingSpec) -> dict[str, Any]:
    """The routing part as schema 2 writes it."""
    return {
        "default_model": routing.default_model,
        "route_key_map": dict(routing.route_key_map),
        "aliases": dict(routing.aliases),
        "policy": routing.policy.value,
        "policy_revision": routing.policy_revision,
    }


def to_json(snapshot: RoleSnapshot) -> dict[str, Any]:
    """The snapshot as a schema 2 document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "role": snapshot.role.value,
        "registry_epoch": snapshot.epoch,
        "topology_revision": snapshot.revision,
        "routing": routing_json(snapshot.routing),
        "models": {
            name: {**model_head_json(model), "engines": [engine_json(engine) for engine in model.engines]}
            for name, model in snapshot.models.items()
        },
    }


def to_schema1(snapshot: RoleSnapshot) -> dict[str, Any]:
    """The older diagnostic view that autoscalers read: regular heads only, one group per model."""
    models: dict[str, Any] = {}
    total = 0
    for name, model in snapshot.models.items():
        engines = [
            {"rank": rank, "status": engine.state.value, "url": engine.base_url}
            for rank, engine in enumerate(model.engines)
        ]
        total += len(engines)
        models[name] = {"engine_groups": [{"engines": engines}]}
    return {"models": models, "total_engines": total}
