"""What is done about an onload that went wrong."""

from __future__ import annotations

from relax_slurm.core.onload import REMEDIES, Remedy, Woken, woken
from relax_slurm.core.plan import WeightSource
from relax_slurm.core.replica import EventKind, Evidence, Replica
from relax_slurm.core.replica_events import Event


def test_every_weight_source_has_a_remedy() -> None:
    assert set(REMEDIES) == set(WeightSource)
    assert [source for source, remedy in REMEDIES.items() if remedy is Remedy.REBUILD] == [WeightSource.STATIC]


def test_how_far_a_replica_has_come() -> None:
    replica = Replica("m/replica-0", 1)
    seen = [woken(replica)]

    def go(kind: EventKind, worker: int | None = None, *, valid: bool = True, evidence: Evidence | None = None) -> None:
        replica.apply(Event(kind, worker, base_url="http://n:1", weights_valid=valid, evidence=evidence), 0.0)
        seen.append(woken(replica))

    go(EventKind.BEGIN)
    go(EventKind.WORKER_READY, 0)
    go(EventKind.ADMISSION_OPENED)
    go(EventKind.OFFLOAD)
    go(EventKind.ADMISSION_CLOSED)
    go(EventKind.RELEASED, 0)
    go(EventKind.ONLOAD)
    go(EventKind.RESUMED, 0, valid=False)
    go(EventKind.FAIL)
    assert seen == [Woken.UNDER_WAY] * 3 + [Woken.READY] + [Woken.UNDER_WAY] * 4 + [Woken.PENDING, Woken.LOST]
