"""Which engines have been in doubt for so long that requests at them are given up. Pure.

An engine that its sidecar has given up answers what runs there itself. This is for what cannot answer any more: a
sidecar that hangs, a node that is cut off. Such an engine is UNKNOWN in discovery, later DEAD or gone from it. In a
state in which it drains, starts or is being stopped by its sidecar nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from relax_slurm.core.snapshot import EngineEntry, ReplicaState

Placed = tuple[str, int]
"""Engine id and generation that a request was sent to."""
DOUBTFUL = frozenset({ReplicaState.UNKNOWN, ReplicaState.DEAD})
"""States that let the time run."""
UNDECIDED = frozenset({ReplicaState.FAILED, ReplicaState.STOPPING})
"""States that neither let it begin nor stop it."""


def doubts(
    placed: Iterable[Placed], engines: Mapping[str, EngineEntry], since: Mapping[Placed, float], now: float
) -> dict[Placed, float]:
    """Since when each engine that requests are at is in doubt; those that are not are left out.

    `engines` is what discovery shows, `since` the answer of the last look.
    """
    found: dict[Placed, float] = {}
    for key in placed:
        engine_id, generation = key
        entry = engines.get(engine_id)
        replaced = entry is None or entry.generation != generation
        if replaced or entry is None or entry.state in DOUBTFUL:
            found[key] = since.get(key, now)
        elif entry.state in UNDECIDED and key in since:
            found[key] = since[key]
    return found


def overdue(since: Mapping[Placed, float], now: float, seconds: float) -> frozenset[Placed]:
    """Those in doubt for `seconds` or longer."""
    return frozenset(key for key, began in since.items() if now - began >= seconds)
