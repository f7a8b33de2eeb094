"""The state machine of a run: one literal table, one mutator.

FAILED is the end of the road and not a claim about GPUs: clean-up happens inside it, and what could not be
confirmed stays fenced. A coordinator that restarts begins again at BOOTING with a new epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from relax_slurm.errors import RelaxError

MAX_HISTORY = 256


class RunState(StrEnum):
    """Where a run is."""

    BOOTING = "BOOTING"
    """Node steps are being started; sidecars report in."""
    BINDING = "BINDING"
    """Every planned node has reported; the reports are compared with the plan."""
    STARTING = "STARTING"
    """Bound; engines come up."""
    READY = "READY"
    """Everything the plan wants is there."""
    DEGRADED = "DEGRADED"
    """It serves, but something the plan wants is missing."""
    DRAINING = "DRAINING"
    """No new work; what is in flight may finish."""
    STOPPING = "STOPPING"
    """Engines and steps are being ended."""
    STOPPED = "STOPPED"
    """Ended as wanted; everything is confirmed gone."""
    FAILED = "FAILED"
    """Ended because of an error, or with something unconfirmed."""


class RunEvent(StrEnum):
    """What can happen to a run."""

    ALL_REPORTED = "all_reported"
    """The last planned node said hello."""
    BOUND = "bound"
    """`bind` returned a plan."""
    ALL_READY = "all_ready"
    """Every replica is where the plan wants it (READY, or SLEEPING when deferred)."""
    PART_LOST = "part_lost"
    """A replica or a node went away while the run was up."""
    DRAIN = "drain"
    """Time limit, preemption, a signal, or a user asks for an orderly end. May come several times."""
    DRAINED = "drained"
    """Nothing is in flight any more, or the drain deadline passed."""
    STOP = "stop"
    """A user asks for the end now. May come several times."""
    ENDED = "ended"
    """Every step and process is confirmed gone."""
    FAIL = "fail"
    """Something that the run cannot go on without went wrong."""


_S, _E = RunState, RunEvent

TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (_S.BOOTING, _E.ALL_REPORTED): _S.BINDING,
    (_S.BOOTING, _E.DRAIN): _S.STOPPING,  # nothing serves yet, so nothing has to drain
    (_S.BOOTING, _E.STOP): _S.STOPPING,
    (_S.BOOTING, _E.FAIL): _S.FAILED,
    (_S.BINDING, _E.BOUND): _S.STARTING,
    (_S.BINDING, _E.DRAIN): _S.STOPPING,
    (_S.BINDING, _E.STOP): _S.STOPPING,
    (_S.BINDING, _E.FAIL): _S.FAILED,
    (_S.STARTING, _E.ALL_READY): _S.READY,
    (_S.STARTING, _E.DRAIN): _S.DRAINING,  # replicas that are up already serve
    (_S.STARTING, _E.STOP): _S.STOPPING,
    (_S.STARTING, _E.FAIL): _S.FAILED,
    (_S.READY, _E.PART_LOST): _S.DEGRADED,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.STOP): _S.STOPPING,
    (_S.READY, _E.FAIL): _S.FAILED,
    (_S.DEGRADED, _E.PART_LOST): _S.DEGRADED,
    (_S.DEGRADED, _E.ALL_READY): _S.READY,
    (_S.DEGRADED, _E.DRAIN): _S.DRAINING,
    (_S.DEGRADED, _E.STOP): _S.STOPPING,
    (_S.DEGRADED, _E.FAIL): _S.FAILED,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.PART_LOST): _S.DRAINING,
    (_S.DRAINING, _E.DRAINED): _S.STOPPING,
    (_S.DRAINING, _E.STOP): _S.STOPPING,
    (_S.DRAINING, _E.FAIL): _S.FAILED,
    (_S.STOPPING, _E.DRAIN): _S.STOPPING,
    (_S.STOPPING, _E.DRAINED): _S.STOPPING,
    (_S.STOPPING, _E.STOP): _S.STOPPING,
    (_S.STOPPING, _E.PART_LOST): _S.STOPPING,
    (_S.STOPPING, _E.ENDED): _S.STOPPED,
    (_S.STOPPING, _E.FAIL): _S.FAILED,
    (_S.STOPPED, _E.STOP): _S.STOPPED,
    (_S.STOPPED, _E.DRAIN): _S.STOPPED,
    (_S.FAILED, _E.FAIL): _S.FAILED,  # the first reason stays
    (_S.FAILED, _E.STOP): _S.FAILED,
    (_S.FAILED, _E.DRAIN): _S.FAILED,
    (_S.FAILED, _E.DRAINED): _S.FAILED,
    (_S.FAILED, _E.PART_LOST): _S.FAILED,
    (_S.FAILED, _E.ENDED): _S.FAILED,
}
"""Everything that may happen. What is not here raises `IllegalRunEvent`."""

SERVING = frozenset({RunState.STARTING, RunState.READY, RunState.DEGRADED})
"""States in which new work may be routed to replicas that are READY."""
TERMINAL = frozenset({RunState.STOPPED, RunState.FAILED})
"""States that no event leaves."""


class IllegalRunEvent(RelaxError):
    """An event that the table does not know in this state; nothing was changed."""

    code = "illegal_run_event"


@dataclass(frozen=True, slots=True)
class RunChange:
    """One change of state, for the event log."""

    event: RunEvent
    before: RunState
    after: RunState
    reason: str


@dataclass(slots=True)
class Run:
    """The run's state. Only `apply` changes it."""

    state: RunState = RunState.BOOTING
    reason: str = ""
    """Why it is in this state; in FAILED the reason of the first failure."""
    history: list[RunChange] = field(default_factory=list)
    """The last `MAX_HISTORY` changes, oldest first."""

    def can(self, event: RunEvent) -> bool:
        """Whether `apply` would accept the event."""
        return (self.state, event) in TRANSITIONS

    def apply(self, event: RunEvent, reason: str = "") -> RunState:
        """The one mutator. Raises `IllegalRunEvent` and changes nothing when the table has no such row."""
        after = TRANSITIONS.get((self.state, event))
        if after is None:
            possible = ", ".join(known.value for known in RunEvent if self.can(known))
            raise IllegalRunEvent(f"run: {event.value} cannot happen in {self.state.value}, possible are {possible}")
        if after is not self.state:
            self.history.append(RunChange(event, self.state, after, reason))
            del self.history[:-MAX_HISTORY]
            self.reason = reason
        self.state = after
        return after


def mermaid() -> str:
    """The table as a Mermaid state diagram, for docs/state-machines.md."""
    lines = ["stateDiagram-v2", f"    [*] --> {RunState.BOOTING.value}"]
    lines += [
        f"    {before.value} --> {after.value}: {event.value}"
        for (before, event), after in TRANSITIONS.items()
        if before is not after
    ]
    lines += [f"    {state.value} --> [*]" for state in RunState if state in TERMINAL]
    return "\n".join(lines) + "\n"
