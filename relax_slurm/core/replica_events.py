"""The vocabulary of a replica's life: states, events, commands, evidence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.errors import RelaxError

ALL_TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})
"""What an engine holds on a GPU, by SGLang's names."""


class IllegalEvent(RelaxError):
    """The event cannot happen in this state; nothing was changed."""

    code = "illegal_event"


class State(StrEnum):
    """Where a replica is in its life."""

    STARTING = "STARTING"
    """Processes are coming up."""
    READY = "READY"
    """All workers up, all tags resident, weights valid, admission open."""
    DRAINING = "DRAINING"
    """Admission is being closed, memory released."""
    SLEEPING = "SLEEPING"
    """Release confirmed by every worker."""
    ONLOADING = "ONLOADING"
    """A lease was granted, memory is taken back."""
    FAILED = "FAILED"
    """Not routable; the GPU may or may not be free."""
    STOPPING = "STOPPING"
    """Every worker is told to end until its end is proven."""
    GONE = "GONE"
    """Every worker's end is proven. Internal: never published as a routable state."""


class EventKind(StrEnum):
    """What can happen to a replica."""

    BEGIN = "begin"
    """The plan is bound: start the workers."""
    WORKER_READY = "worker_ready"
    """A worker is healthy; carries resident tags and, from the head, the guard's URL."""
    WORKER_UNHEALTHY = "worker_unhealthy"
    """A worker used up its failure budget."""
    WORKER_EXITED = "worker_exited"
    """A worker is gone; with evidence when the end is proven, without when it is only missing."""
    WORKER_SILENT = "worker_silent"
    """The worker's sidecar has not been heard; never a release."""
    WORKER_HEARD = "worker_heard"
    """The worker's sidecar is back."""
    WORKER_SUSPECT = "worker_suspect"
    """The worker's engine has stopped moving; never a release."""
    WORKER_WELL = "worker_well"
    """It moves again."""
    WEIGHTS_VALID = "weights_valid"
    """The resident weights are the wanted ones."""
    WEIGHTS_INVALID = "weights_invalid"
    """An update has begun or gone wrong."""
    UPDATE = "update"
    """Other weights are on their way: its admission is being closed for them."""
    ADMISSION_OPENED = "admission_opened"
    """The head's guard lets requests in."""
    ADMISSION_CLOSED = "admission_closed"
    """The head's guard is closed and drained."""
    OFFLOAD = "offload"
    """Asked to release the GPU."""
    RELEASED = "released"
    """A worker released tags and its memory was measured."""
    ONLOAD = "onload"
    """A lease was granted: take the GPU back."""
    RESUMED = "resumed"
    """A worker's tags are resident again."""
    FAIL = "fail"
    """An operation did not succeed in time, or was refused."""
    STOP = "stop"
    """Asked to shut down; again = retry what is not confirmed."""
    SETTLED = "settled"
    """Raised by the mutator itself once every end is proven."""


class Evidence(StrEnum):
    """What proves that a worker holds no GPU memory."""

    CONFIRMED_EXIT = "confirmed_exit"
    """The sidecar saw the process and all its descendants end."""
    STEP_ENDED_WITH_CGROUP = "step_ended_with_cgroup"
    """Slurm's record that the step ended, where cgroups make that proof."""
    RELEASED_MEMORY = "released_memory"
    """Released and measured; the process lives on."""


class CommandKind(StrEnum):
    """What the manager has to do; the first six are methods of the control protocol."""

    START_WORKER = "start_worker"
    """Start a worker's engine."""
    STOP_WORKER = "stop_worker"
    """End it and confirm."""
    OPEN_ADMISSION = "open_admission"
    """Open the head's guard."""
    CLOSE_ADMISSION = "close_admission"
    """Close the head's guard and drain."""
    OFFLOAD = "offload"
    """Release `tags`."""
    ONLOAD = "onload"
    """Resume `tags`."""
    PUBLISH = "publish"
    """What `published()` says may have changed."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `worker` is the rank inside the replica, 0 = head."""

    kind: EventKind
    worker: int | None = None
    tags: frozenset[str] = ALL_TAGS
    base_url: str | None = None
    evidence: Evidence | None = None
    weights_valid: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """One thing to do. Ids are given by whoever sends it."""

    kind: CommandKind
    worker: int | None = None
    tags: frozenset[str] = frozenset()


@dataclass(slots=True)
class Worker:
    """What is known about one worker."""

    started: bool = False
    """A start was commanded, so it may hold a GPU."""
    ready: bool = False
    silent: bool = False
    suspect: bool = False
    doubt: str = ""
    """Why it is silent or suspect."""
    tags: frozenset[str] = frozenset()
    released: bool = False
    exit_proof: Evidence | None = None

    @property
    def evidence(self) -> Evidence | None:
        """Why this worker holds no GPU memory; None while that is not proven."""
        return self.exit_proof or (Evidence.RELEASED_MEMORY if self.released else None)
