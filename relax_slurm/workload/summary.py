"""What was made, in numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.workload.timing import HANDOVERS
from relax_slurm.workload.training_batch import TrainingBatch


def teacher_coverage(batch: TrainingBatch) -> tuple[int, int]:
    """Response tokens that have a teacher's log-prob, and all that could have one."""
    told = batch.columns.get("teacher_log_probs")
    lengths, removed = batch.columns["response_length"], batch.columns["removed"]
    due = sum(length for length, gone in zip(lengths, removed, strict=True) if not gone)
    return (0 if told is None else sum(map(len, told))), due


@dataclass(slots=True)
class Summary:
    """Adds up batches."""

    partitions_root: str | None = None
    batches: list[int] = field(default_factory=list)
    partitions: list[str] = field(default_factory=list)
    groups: int = 0
    samples: int = 0
    removed: int = 0
    truncated: int = 0
    tokens: int = 0
    covered: int = 0
    coverable: int = 0
    reward: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    handovers: int = 0

    def add(self, batch: TrainingBatch, partition: str, seconds: Mapping[str, float]) -> None:
        """One committed batch."""
        columns = batch.columns
        self.batches.append(batch.number)
        self.partitions.append(partition)
        self.groups += len(set(columns["group_index"]))
        self.samples += batch.rows
        self.removed += sum(columns["removed"])
        self.truncated += sum(columns["truncated"])
        self.tokens += sum(columns["response_length"])
        covered, coverable = teacher_coverage(batch)
        self.covered, self.coverable = self.covered + covered, self.coverable + coverable
        self.reward += sum(
            reward for reward, gone in zip(columns["reward"], columns["removed"], strict=True) if not gone
        )
        for phase, value in seconds.items():
            self.spent(phase, value)
        self.handovers += len(HANDOVERS & seconds.keys())

    def spent(self, phase: str, seconds: float) -> None:
        """Time of one phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds

    def document(self) -> dict[str, Any]:
        """The JSON document of `relax-slurm batch`. Means are null when there is nothing to take them of."""
        turns = {phase: round(value, 6) for phase, value in self.seconds.items() if phase in HANDOVERS}
        kept = self.samples - self.removed
        return {
            "batches": len(self.batches),
            "first_batch": min(self.batches, default=None),
            "groups": self.groups,
            "samples": self.samples,
            "removed": self.removed,
            "truncated": self.truncated,
            "response_tokens": self.tokens,
            "reward_mean": self.reward / kept if kept else None,
            "teacher_coverage": self.covered / self.coverable if self.coverable else None,
            "seconds": {phase: round(value, 6) for phase, value in self.seconds.items()},
            "handovers": {
                "count": self.handovers,
                "seconds": round(sum(turns.values()), 6),
                "mean_seconds": round(sum(turns.values()) / self.handovers, 6) if self.handovers else None,
                "by_phase": turns,
            },
            "partitions": self.partitions,
            "partitions_root": self.partitions_root,
        }
