"""The stages of one batch's data: a literal table. What the coordinator knows of a batch is coarser (core/batch.py)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from relax_slurm.workload.failures import IllegalStage


class Stage(StrEnum):
    """Where a batch's data is."""

    GENERATED = "GENERATED"
    """Its groups may be handed over."""
    SCORING = "SCORING"
    """Scores are written on copies."""
    COMPLETE = "COMPLETE"
    """Every score was valid and is on the original samples."""
    PUBLISHING = "PUBLISHING"
    """Its partition is being written; nobody may read it."""
    COMMITTED = "COMMITTED"
    """Training may have it."""
    FAILED = "FAILED"
    """It will never be complete."""


class Step(StrEnum):
    """What can be done with a batch."""

    SCORE = "score"
    WRITE_BACK = "write back"
    PUBLISH = "publish"
    COMMIT = "commit"
    FAIL = "fail"


TABLE: Mapping[tuple[Stage, Step], Stage] = {
    (Stage.GENERATED, Step.SCORE): Stage.SCORING,
    (Stage.SCORING, Step.WRITE_BACK): Stage.COMPLETE,
    (Stage.COMPLETE, Step.PUBLISH): Stage.PUBLISHING,
    (Stage.PUBLISHING, Step.COMMIT): Stage.COMMITTED,
    (Stage.GENERATED, Step.FAIL): Stage.FAILED,
    (Stage.SCORING, Step.FAIL): Stage.FAILED,
    (Stage.COMPLETE, Step.FAIL): Stage.FAILED,
    (Stage.PUBLISHING, Step.FAIL): Stage.FAILED,
}
"""Everything that may happen. What is not here raises `IllegalStage` and changes nothing."""


def after(stage: Stage, step: Step, batch: int) -> Stage:
    """The stage after a step; IllegalStage."""
    found = TABLE.get((stage, step))
    if found is None:
        possible = ", ".join(known.value for source, known in TABLE if source is stage) or "nothing"
        raise IllegalStage(
            f"batch {batch} is {stage} and cannot {step}; possible: {possible} (one object makes one batch, once)"
        )
    return found
