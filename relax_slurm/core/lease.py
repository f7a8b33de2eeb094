"""The right to use a set of GPUs: a literal table, and who shares GPUs with whom.

A *holder* is an inference role or training: a GPU cannot tell them apart, so all of them take leases. Silence never
gives a lease back. BLOCKED is left by evidence only (`LeaseEvent.RECOVER`), never by an answer that came late.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.core.plan import InferencePlacementPlan, RolePlan
from relax_slurm.errors import RelaxError

TRAINING = "training"
"""The holder that is not an inference role."""


class LeaseState(StrEnum):
    """What a holder may do with its GPUs."""

    SLEEPING = "SLEEPING"
    """It holds nothing: proven, not assumed."""
    ONLOADING = "ONLOADING"
    """Its engines are coming back; the memory may be taken at any moment."""
    ACTIVE = "ACTIVE"
    """It uses its GPUs."""
    DRAINING = "DRAINING"
    """Its engines are leaving; the memory may still be taken."""
    BLOCKED = "BLOCKED"
    """What its GPUs hold is in doubt. Nobody else gets them until there is evidence of release."""


class LeaseEvent(StrEnum):
    """What can happen to a lease."""

    GRANT = "grant"
    """It gets its GPUs and moves in by itself: rollout at the start of a batch, training."""
    ACTIVATE = "activate"
    """It gets its GPUs and the coordinator brings its engines back."""
    ONLOADED = "onloaded"
    """Every engine is back."""
    DEACTIVATE = "deactivate"
    """The coordinator takes its engines off the GPUs."""
    OFFLOADED = "offloaded"
    """Every engine has confirmed its release."""
    RELEASE = "release"
    """It has left by itself, and that is confirmed."""
    DOUBT = "doubt"
    """An onload or offload failed or did not answer in time."""
    RECOVER = "recover"
    """There is evidence that its GPUs are free."""


_S, _E = LeaseState, LeaseEvent

TABLE: Mapping[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (_S.SLEEPING, _E.GRANT): _S.ACTIVE,
    (_S.SLEEPING, _E.ACTIVATE): _S.ONLOADING,
    (_S.ONLOADING, _E.ONLOADED): _S.ACTIVE,
    (_S.ONLOADING, _E.DOUBT): _S.BLOCKED,
    (_S.ACTIVE, _E.DEACTIVATE): _S.DRAINING,
    (_S.ACTIVE, _E.RELEASE): _S.SLEEPING,
    (_S.ACTIVE, _E.RECOVER): _S.SLEEPING,  # a holder that vanished while it had the lease
    (_S.DRAINING, _E.OFFLOADED): _S.SLEEPING,
    (_S.DRAINING, _E.DOUBT): _S.BLOCKED,
    (_S.BLOCKED, _E.RECOVER): _S.SLEEPING,
}
"""Everything that may happen. What is not here raises `IllegalLeaseEvent` and changes nothing."""


class IllegalLeaseEvent(RelaxError):
    """An event that the table does not know in this state; nothing was changed."""

    code = "illegal_lease_event"


@dataclass(slots=True)
class Lease:
    """One holder's lease. Change it through `apply` only."""

    holder: str
    state: LeaseState = LeaseState.SLEEPING
    reason: str = ""
    """Why it is BLOCKED."""

    def apply(self, event: LeaseEvent, reason: str = "") -> LeaseState:
        """Take one event; answers the state before it."""
        before = self.state
        after = TABLE.get((before, event))
        if after is None:
            possible = sorted(known.value for state, known in TABLE if state is before)
            raise IllegalLeaseEvent(
                f"lease of {self.holder}: event {event} in state {before} is not possible; possible are {possible}"
            )
        self.state = after
        self.reason = reason if event is LeaseEvent.DOUBT else ""
        return before


@dataclass(frozen=True, slots=True)
class Holder:
    """Who may hold a lease, and on which GPUs."""

    name: str
    bundles: frozenset[tuple[str, int]]
    """(pool, bundle index) of every GPU it may use."""
    deferred: bool = False
    """Whether it shares GPUs with another inference role, so that it sleeps unless it is its turn."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """All holders of a run and who stands in whose way."""

    holders: tuple[Holder, ...]

    def __post_init__(self) -> None:
        names = [holder.name for holder in self.holders]
        if len(set(names)) != len(names):
            raise ValueError(f"holders are named twice: {sorted(names)}")

    def rivals(self, name: str) -> tuple[str, ...]:
        """Holders that share a GPU with this one. KeyError when there is no such holder."""
        own = self[name]
        return tuple(other.name for other in self.holders if other is not own and other.bundles & own.bundles)

    def __getitem__(self, name: str) -> Holder:
        for holder in self.holders:
            if holder.name == name:
                return holder
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return any(holder.name == name for holder in self.holders)


def sharing(plan: InferencePlacementPlan) -> Sharing:
    """Holders of a plan: its roles, and training when it uses GPUs of ours."""
    used = {str(role.role): _bundles(role) for role in plan.roles if role.pool}  # others have no GPUs of ours
    found = [
        Holder(name, own, deferred=any(own & other for rival, other in used.items() if rival != name))
        for name, own in used.items()
    ]
    training = plan.training
    if training is not None:
        found.append(Holder(TRAINING, _range(training.pool, 0, training.gpus)))
    return Sharing(tuple(found))


def _bundles(role: RolePlan) -> frozenset[tuple[str, int]]:
    return _range(role.pool, role.offset, role.gpus)


def _range(pool: str, first: int, count: int) -> frozenset[tuple[str, int]]:
    return frozenset((pool, bundle) for bundle in range(first, first + count))


def mermaid() -> str:
    """The table as a mermaid state diagram."""
    edges = [f"    {source} --> {target}: {event}" for (source, event), target in TABLE.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {LeaseState.SLEEPING}", *edges])
