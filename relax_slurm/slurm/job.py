"""What is known about a job: values that every backend returns (the local one too)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """State of a whole job, folded over its components."""

    PENDING = "PENDING"
    """Waiting for resources (or for its next attempt); not every component runs yet."""
    RUNNING = "RUNNING"
    """Every component runs, or is being cleaned up after."""
    DEGRADED = "DEGRADED"
    """At least one component has ended while another one has not."""
    ENDED = "ENDED"
    """Every component has ended."""
    UNKNOWN = "UNKNOWN"
    """The backend could not be asked; `JobView.last` holds what was known before. Never a reason to act."""
    GONE = "GONE"
    """The backend has no record of the job (any more); only the run directory can tell how it ended."""


@dataclass(frozen=True, slots=True)
class JobRef:
    """Names a job for its backend. `cluster` is set when sbatch chose one of several clusters."""

    job_id: str
    cluster: str | None = None

    def __str__(self) -> str:
        return self.job_id if self.cluster is None else f"{self.job_id};{self.cluster}"


@dataclass(frozen=True, slots=True)
class ComponentView:
    """One component. `state` is the backend's own word, `nodes` its node list as printed (may be empty)."""

    index: int
    state: str
    nodes: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobView:
    """What one look at a job saw."""

    state: JobState
    components: tuple[ComponentView, ...] = ()
    reason: str = ""
    """Why it is in this state: Slurm's reason, or the complaint of a command that failed."""
    last: JobState | None = None
    """For UNKNOWN: the state that was known last, if any."""

    @property
    def over(self) -> bool:
        """True when the job will never run again as far as the backend can tell."""
        return self.state in {JobState.ENDED, JobState.GONE}
