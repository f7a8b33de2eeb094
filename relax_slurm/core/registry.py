"""The coordinator's registry: one snapshot per role, a revision per real change, an update for the wire.

The other half of the story is handed out here too: `core.update` (diff and apply) and `core.subscription`
(the subscriber that ends up equal).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from relax_slurm.core.plan import Role, RouteMode
from relax_slurm.core.snapshot import (
    DiscoveryInvalid,
    EngineEntry,
    ModelEntry,
    ReplicaState,
    RoleSnapshot,
    RoutingSpec,
    check_model_head,
    check_snapshot,
    model_state,
)
from relax_slurm.core.subscription import Action, Counters, SubscriberState
from relax_slurm.core.update import Update, apply, diff, place_of, update_from_json, with_engines

__all__ = [
    "Action",
    "Counters",
    "Registry",
    "SubscriberState",
    "Update",
    "apply",
    "diff",
    "update_from_json",
]


class Registry:
    """The coordinator's snapshots, one per role. `epoch` is new with every coordinator start."""

    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self._snapshots: dict[Role, RoleSnapshot] = {}

    def snapshot(self, role: Role) -> RoleSnapshot | None:
        """The current snapshot, None before the role's first publication."""
        return self._snapshots.get(role)

    def revisions(self) -> dict[str, int]:
        """The `revisions` of a heartbeat."""
        return {role.value: snapshot.revision for role, snapshot in self._snapshots.items()}

    def publish(self, role: Role, routing: RoutingSpec, models: Iterable[ModelEntry]) -> Update | None:
        """Replace the role's picture. Returns the update for the wire, None when nothing changed.

        Engines may come in any order. What a reader would refuse raises DiscoveryInvalid and changes nothing.
        """
        old = self._snapshots.get(role)
        table = {model.name: _sorted(model) for model in models}
        if old is not None:
            table = {name: _keep(old.models.get(name), model) for name, model in table.items()}
            if old.routing == routing and old.models == table:
                return None
        new = RoleSnapshot(role, self.epoch, 1 if old is None else old.revision + 1, routing, table)
        check_snapshot(new)
        self._snapshots[role] = new
        return diff(old, new)

    def publish_engine(
        self, role: Role, model: str, engine: EngineEntry, state: ReplicaState | None = None
    ) -> Update | None:
        """Change or add one replica: the cheap way at a thousand.

        `state` overrides the rule for the model's state. KeyError when role or model have not been published.
        """
        old = self._snapshots[role]
        before = old.models[model]
        place = place_of(before.engines, engine.engine_id)
        known = place < len(before.engines) and before.engines[place] == engine
        for name, other in old.models.items():
            if name != model and any(held.engine_id == engine.engine_id for held in other.engines[_at(other, engine)]):
                raise DiscoveryInvalid(f"{role}: engine id {engine.engine_id!r} belongs to {name!r}, not to {model!r}")
        after = before if known else with_engines(before, (engine,), ())
        if state is None:
            state = _state_after(after, engine)
        if known and state is before.state:
            return None
        after = replace(after, state=state)
        new = replace(old, revision=old.revision + 1, models={**old.models, model: after})
        self._snapshots[role] = new
        head = {} if before.state is state else {model: replace(after, engines=())}
        moved = {} if known else {model: (engine,)}
        return Update(role, self.epoch, old.revision, new.revision, None, head, moved)

    def publish_head(self, role: Role, model: str, *, router_url: str | None, state: ReplicaState) -> Update | None:
        """Change what a routed model says of itself; its engines stay. KeyError before the first publication.

        What a reader would refuse raises DiscoveryInvalid and changes nothing.
        """
        old = self._snapshots[role]
        before = old.models[model]
        if (before.router_url, before.state) == (router_url, state):
            return None
        after = replace(before, router_url=router_url, state=state)
        check_model_head(role, after)
        new = replace(old, revision=old.revision + 1, models={**old.models, model: after})
        self._snapshots[role] = new
        return Update(role, self.epoch, old.revision, new.revision, None, {model: replace(after, engines=())}, {})


def _at(model: ModelEntry, engine: EngineEntry) -> slice:
    """Where the engine is among the model's, if it is there: at most one place."""
    place = place_of(model.engines, engine.engine_id)
    return slice(place, place + 1)


def _state_after(model: ModelEntry, engine: EngineEntry) -> ReplicaState:
    """The model's state once `engine` has changed."""
    if model.route_mode is RouteMode.SGLANG_ROUTER:
        # Behind a router the replicas need not be listed, so their states do not tell the model's.
        return model.state
    if engine.state is ReplicaState.READY:
        return ReplicaState.READY
    return model_state(entry.state for entry in model.engines)


def _sorted(model: ModelEntry) -> ModelEntry:
    ordered = tuple(sorted(model.engines, key=lambda engine: engine.engine_id))
    return model if ordered == model.engines else replace(model, engines=ordered)


def _keep(old: ModelEntry | None, new: ModelEntry) -> ModelEntry:
    """The old object when it is equal, so that later comparisons stop at `is`."""
    return old if old is not None and old == new else new
