"""How bad a schedule is: drawn from its seed, so that calm and stormy ones both come up."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Weather:
    """Chances per message or per deed, and times in seconds."""

    drop: float
    double: float
    far: float
    """Chance of a delay of up to `far_seconds`, which is also what puts messages out of order."""
    far_seconds: float
    crashes: int
    """How often a sidecar is killed."""
    exits: int
    """How often an engine ends by itself."""
    doubts: int
    """How often an engine is suspect for a while."""
    cuts: int
    """How often a node is cut off for a while."""
    fails: float
    """Chance that an offload or onload fails in the engine."""
    slow: float
    """Chance that it takes longer than anyone waits."""
    sticks: float
    """Chance that the end of an engine cannot be confirmed at first."""
    scoring: float
    """Chance that a stage of the workload fails."""
    meddling: int
    """Requests of a client that knows no order."""
    impatient: float
    """Chance that the workload's client gives up waiting early."""
    batches: int


CALM = Weather(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2)


def drawn(rng: random.Random) -> Weather:
    """The weather of one schedule."""

    def sometimes(chance: float, most: float) -> float:
        return rng.uniform(0, most) if rng.random() < chance else 0.0

    return Weather(
        drop=sometimes(0.4, 0.2),
        double=sometimes(0.5, 0.3),
        far=sometimes(0.4, 0.25),
        far_seconds=rng.choice((0.5, 3.0, 15.0)),
        crashes=rng.choice((0, 0, 0, 1, 2)),
        exits=rng.choice((0, 0, 0, 0, 1, 2)),
        doubts=rng.choice((0, 0, 0, 1)),
        cuts=rng.choice((0, 0, 0, 0, 1, 2)),
        fails=sometimes(0.25, 0.15),
        slow=sometimes(0.25, 0.15),
        sticks=sometimes(0.3, 0.5),
        scoring=sometimes(0.2, 0.2),
        meddling=rng.choice((0, 0, 0, 6, 15)),
        impatient=sometimes(0.25, 0.5),
        batches=rng.choice((1, 1, 2)),
    )
