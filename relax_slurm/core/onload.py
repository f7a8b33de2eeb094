"""What is done about an onload that went wrong, decided by where weights come from. Pure.

Several replicas are woken at once, and a lease is given for all of them or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from relax_slurm.core.plan import WeightSource
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import State


class Remedy(StrEnum):
    """What happens to the others when one replica did not wake up."""

    OFFLOAD = "offload"
    """Those that woke up go back to sleep, so that the lease can be given up: weights are with the trainer anyway."""
    REBUILD = "rebuild"
    """The one is ended and built again from disk once its end is proven; the others stay."""


REMEDIES: Mapping[WeightSource, Remedy] = MappingProxyType(
    {
        WeightSource.STATIC: Remedy.REBUILD,
        WeightSource.ACTOR: Remedy.OFFLOAD,
        WeightSource.DCS: Remedy.OFFLOAD,
    }
)


class Woken(StrEnum):
    """Where one replica is on its way out of sleep."""

    READY = "ready"
    """It serves."""
    PENDING = "pending"
    """It has its memory and waits for weights: neither failed nor routable."""
    UNDER_WAY = "under_way"
    """Not decided."""
    LOST = "lost"
    """It failed, or ended."""


def woken(replica: Replica) -> Woken:
    """How far a replica has come."""
    match replica.state:
        case State.READY:
            return Woken.READY
        case State.ONLOADING if replica.resident and replica.weights_pending:
            return Woken.PENDING
        case State.FAILED | State.STOPPING | State.GONE:
            return Woken.LOST
        case _:
            return Woken.UNDER_WAY
