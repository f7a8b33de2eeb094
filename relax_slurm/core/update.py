"""How a change travels: `diff` makes an update of two snapshots, `apply` puts it on the older one.

`apply(old, diff(old, new)) == new`. Unchanged parts are shared, and only what an update touches is checked
again, so the cost of a change does not grow with the number of rules and hardly with the number of engines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Annotated, Any

from pydantic import Field, ValidationError

from relax_slurm.core.discovery import (
    Count,
    Doc,
    EngineDoc,
    ModelHeadDoc,
    Name,
    RoutingDoc,
    engine_json,
    model_head_json,
    refuse,
    routing_json,
)
from relax_slurm.core.plan import Role
from relax_slurm.core.snapshot import (
    DiscoveryInvalid,
    EngineEntry,
    ModelEntry,
    RoleSnapshot,
    RoutingSpec,
    check_engine,
    check_model_head,
    check_routing,
)

_BY_ID = attrgetter("engine_id")
_EMPTY: Mapping[str, ModelEntry] = {}


@dataclass(frozen=True, slots=True)
class Update:
    """What changed between two revisions of one role."""

    role: Role
    epoch: str
    base_revision: int
    revision: int
    routing: RoutingSpec | None = None
    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    """Models whose own fields changed, without engines; new models too."""
    engines: Mapping[str, tuple[EngineEntry, ...]] = field(default_factory=dict)
    """Engines that changed or are new, by model."""
    removed_models: tuple[str, ...] = ()
    removed_engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether it changes nothing but the revision."""
        return (
            self.routing is None
            and not self.models
            and not self.engines
            and not self.removed_models
            and not self.removed_engines
        )

    def to_json(self) -> dict[str, Any]:
        """The body of a `snap.ROLE` message, without `kind`."""
        body: dict[str, Any] = {}
        if self.routing is not None:
            body["routing"] = routing_json(self.routing)
        if self.models:
            body["models"] = {name: model_head_json(model) for name, model in self.models.items()}
        if self.engines:
            body["engines"] = {
                name: [engine_json(engine) for engine in engines] for name, engines in self.engines.items()
            }
        if self.removed_models:
            body["removed_models"] = list(self.removed_models)
        if self.removed_engines:
            body["removed_engines"] = {name: list(ids) for name, ids in self.removed_engines.items()}
        return {
            "role": self.role.value,
            "epoch": self.epoch,
            "base_revision": self.base_revision,
            "revision": self.revision,
            "update": body,
        }


class _BodyDoc(Doc):
    routing: RoutingDoc | None = None
    models: dict[Name, ModelHeadDoc] = Field(default_factory=dict)
    engines: dict[Name, list[EngineDoc]] = Field(default_factory=dict)
    removed_models: list[str] = Field(default_factory=list)
    removed_engines: dict[Name, list[str]] = Field(default_factory=dict)


class _UpdateDoc(Doc):
    role: Annotated[Role, Field(strict=False)]
    epoch: Name
    base_revision: Count
    revision: Count
    update: _BodyDoc


def update_from_json(document: object) -> Update:
    """Read the body of a `snap.ROLE` message; raises `DiscoveryInvalid`."""
    try:
        doc = _UpdateDoc.model_validate(document)
    except ValidationError as error:
        raise refuse("update", error) from None
    body = doc.update
    return Update(
        role=doc.role,
        epoch=doc.epoch,
        base_revision=doc.base_revision,
        revision=doc.revision,
        routing=None if body.routing is None else body.routing.value(),
        models={name: model.value(name, ()) for name, model in body.models.items()},
        engines={name: tuple([engine.value() for engine in docs]) for name, docs in body.engines.items()},
        removed_models=tuple(body.removed_models),
        removed_engines={name: tuple(ids) for name, ids in body.removed_engines.items()},
    )


def diff(old: RoleSnapshot | None, new: RoleSnapshot) -> Update:
    """What turns `old` into `new`. None as `old` means that the role had not been published (revision 0)."""
    known = _EMPTY if old is None else old.models
    models: dict[str, ModelEntry] = {}
    engines: dict[str, tuple[EngineEntry, ...]] = {}
    removed: dict[str, tuple[str, ...]] = {}
    for name, model in new.models.items():
        before = known.get(name)
        if before is model:
            continue
        head = replace(model, engines=())
        if before is None or replace(before, engines=()) != head:
            models[name] = head
        was = {} if before is None else {engine.engine_id: engine for engine in before.engines}
        changed = tuple([engine for engine in model.engines if was.pop(engine.engine_id, None) != engine])
        if changed:
            engines[name] = changed
        if was:
            removed[name] = tuple(was)
    return Update(
        role=new.role,
        epoch=new.epoch,
        base_revision=0 if old is None else old.revision,
        revision=new.revision,
        routing=new.routing if old is None or old.routing != new.routing else None,
        models=models,
        engines=engines,
        removed_models=tuple([name for name in known if name not in new.models]),
        removed_engines=removed,
    )


def joined(first: Update, second: Update) -> Update | None:
    """Both as one, where `second` follows `first` and neither changes more than engines and what models say of
    themselves; None otherwise. What many replicas do at once then travels as one message."""
    if (second.role, second.epoch, second.base_revision) != (first.role, first.epoch, first.revision):
        return None
    if any(update.routing or update.removed_models or update.removed_engines for update in (first, second)):
        return None
    engines = dict(first.engines)
    for name, changed in second.engines.items():
        engines[name] = tuple({engine.engine_id: engine for engine in (*engines.get(name, ()), *changed)}.values())
    return replace(first, revision=second.revision, models={**first.models, **second.models}, engines=engines)


def apply(snapshot: RoleSnapshot | None, update: Update) -> RoleSnapshot:
    """The snapshot after `update`; unchanged parts are shared. Raises `DiscoveryInvalid` and changes nothing.

    Only what the update touches is checked again: the rest was checked when it came in.
    """
    base = 0 if snapshot is None else snapshot.revision
    if update.base_revision != base or (
        snapshot is not None and (update.epoch != snapshot.epoch or update.role is not snapshot.role)
    ):
        raise DiscoveryInvalid(
            f"update {update.role} {update.epoch}:{update.base_revision}->{update.revision} does not follow"
            f" revision {base}; ask for a snapshot"
        )
    models = dict(_EMPTY if snapshot is None else snapshot.models)
    for name in update.removed_models:
        models.pop(name, None)
    for name, head in update.models.items():
        check_model_head(update.role, head)
        held = models.get(name)
        models[name] = head if held is None else replace(head, engines=held.engines)
    for name in {**update.engines, **update.removed_engines}:
        if name not in models:
            raise DiscoveryInvalid(f"update {update.role}: engines of the unknown model {name!r}")
        models[name] = with_engines(models[name], update.engines.get(name, ()), update.removed_engines.get(name, ()))
    routing = update.routing or (None if snapshot is None else snapshot.routing)
    if routing is None:
        raise DiscoveryInvalid(f"update {update.role}: the first update carries no routing")
    if update.routing is not None or update.models or update.removed_models:
        check_routing(update.role, routing, models)
    return RoleSnapshot(update.role, update.epoch, update.revision, routing, models)


def with_engines(model: ModelEntry, changed: Iterable[EngineEntry], removed: Iterable[str]) -> ModelEntry:
    """The model with some engines exchanged; keeps the order by id."""
    engines = list(model.engines)
    for engine_id in removed:
        place = place_of(engines, engine_id)
        if place < len(engines) and engines[place].engine_id == engine_id:
            del engines[place]
    for engine in changed:
        check_engine(engine, engine.engine_id)
        place = place_of(engines, engine.engine_id)
        if place < len(engines) and engines[place].engine_id == engine.engine_id:
            engines[place] = engine
        else:
            engines.insert(place, engine)
    return replace(model, engines=tuple(engines))


def place_of(engines: Sequence[EngineEntry], engine_id: str) -> int:
    """Where the engine is, or belongs."""
    return bisect_left(engines, engine_id, key=_BY_ID)
