"""One logical replica: a literal transition table and one mutator. Events in, commands out.

The table knows nothing of sockets, clocks or Slurm. An event that it does not list for the current state
raises `IllegalEvent` and changes nothing. FAILED and STOPPING say nothing about a GPU: whether it is free is
another question, `release_proven`, and only evidence answers it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from relax_slurm.core.replica_events import (
    ALL_TAGS,
    Command,
    CommandKind,
    Event,
    EventKind,
    Evidence,
    IllegalEvent,
    State,
    Worker,
)
from relax_slurm.core.snapshot import EngineEntry, ReplicaState

__all__ = [
    "ALL_TAGS",
    "FACTS_ONLY",
    "TABLE",
    "Command",
    "CommandKind",
    "Event",
    "EventKind",
    "Evidence",
    "IllegalEvent",
    "Replica",
    "Row",
    "State",
    "Worker",
    "mermaid",
]


@dataclass(slots=True)
class Replica:
    """One replica's facts. Change it through `apply` only."""

    engine_id: str
    size: int
    """Number of workers."""
    generation: int = 1
    state: State = State.STARTING
    since: float = 0.0
    """When the state was entered, on the caller's clock."""
    reason: str = ""
    """Why it failed or stops."""
    base_url: str | None = None
    weights_valid: bool = False
    weights_pending: bool = False
    """Woken with memory and without weights: whoever has them must send them. Neither failed nor routable."""
    weights_awaited: bool = False
    """Closed for new weights, until they are there."""
    admission_open: bool = False
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.workers:
            self.workers = [Worker() for _ in range(self.size)]

    @property
    def resident(self) -> bool:
        """Whether every worker is up with all tags."""
        return all(worker.ready and worker.tags == ALL_TAGS for worker in self.workers)

    @property
    def release_proven(self) -> bool:
        """Whether each worker is proven to hold no GPU memory (or was never started)."""
        return all(not worker.started or worker.evidence for worker in self.workers)

    @property
    def ended(self) -> bool:
        """Whether each started worker is proven to have ended."""
        return all(not worker.started or worker.exit_proof for worker in self.workers)

    @property
    def fenced(self) -> bool:
        """READY by the book, but not known to serve right now."""
        doubtful = any(worker.silent or worker.suspect for worker in self.workers)
        return doubtful or not self.admission_open or not self.weights_valid or not self.resident

    @property
    def why(self) -> str:
        """Why it failed or stops, or what is in doubt about it now; empty when nothing is to be said."""
        return self.reason or next((w.doubt for w in self.workers if w.silent or w.suspect), "")

    def unproven(self) -> list[int]:
        """Workers whose GPU may still be in use."""
        return [rank for rank, worker in enumerate(self.workers) if worker.started and not worker.evidence]

    def published(self) -> EngineEntry:
        """As discovery shows it: READY only while it serves, UNKNOWN if fenced, DEAD at the end.

        ONLOADING is the one state of the contract that says "resident soon": also while weights are replaced.
        """
        if self.state is State.GONE:
            shown = ReplicaState.DEAD
        elif self.state is State.READY and self.weights_awaited:
            shown = ReplicaState.ONLOADING
        elif self.state is State.READY and self.fenced:
            shown = ReplicaState.UNKNOWN
        else:
            shown = ReplicaState(self.state.value)
        serves = shown is ReplicaState.READY and self.base_url is not None
        return EngineEntry(self.engine_id, self.base_url, shown, serves, self.generation)

    def apply(self, event: Event, now: float) -> list[Command]:
        """Take one event; returns what to do, in order. `IllegalEvent` changes nothing."""
        rows = _BY_PAIR.get((self.state, event.kind))
        if rows is None:
            raise IllegalEvent(
                f"replica {self.engine_id}: event {event.kind} in state {self.state} is not possible;"
                f" possible are {_possible(self.state)}"
            )
        needs_worker = event.kind in _PER_WORKER
        if needs_worker != (event.worker is not None) or not 0 <= (event.worker or 0) < self.size:
            raise IllegalEvent(
                f"replica {self.engine_id}: event {event.kind} names worker {event.worker!r};"
                f" wanted {f'a rank below {self.size}' if needs_worker else 'none'}"
            )
        before = self.published()
        self._absorb(event)
        commands: list[Command] = []
        for row in rows:
            if row.when(self):
                self._enter(row.target, now)
                commands += row.act(self)
                break
        if self.state is State.STOPPING and self.ended:
            # Not an event from outside: the last proof of an end is the end.
            commands = self.apply(Event(EventKind.SETTLED), now)
        publish = Command(CommandKind.PUBLISH)
        if publish not in commands and self.published() != before:
            commands.insert(0, publish)
        return commands

    def shutdown(self, now: float, reason: str = "shutdown") -> list[Command]:
        """STOP from any state; an operation under way is failed first, as only FAILED leads on from there."""
        commands: list[Command] = []
        if self.state in (State.STARTING, State.DRAINING, State.ONLOADING):
            commands = self.apply(Event(EventKind.FAIL, reason=reason), now)
        commands += self.apply(Event(EventKind.STOP, reason=reason), now)
        return list(dict.fromkeys(commands))

    def successor(self, now: float) -> Replica:
        """A fresh replica for the same slot, one generation on. Only after every end is proven."""
        if self.state is not State.GONE:
            raise IllegalEvent(
                f"replica {self.engine_id}: rebuild in state {self.state} with workers {self.unproven()} not"
                " proven released; stop it and wait for proof"
            )
        return Replica(self.engine_id, self.size, self.generation + 1, since=now)

    def _enter(self, target: State, now: float) -> None:
        if target is not self.state:
            self.state = target
            self.since = now

    def _absorb(self, event: Event) -> None:
        """Facts first: what an event says is kept whatever state it meets."""
        worker = self.workers[event.worker or 0]
        head = event.worker == 0
        kind = event.kind
        if kind in (EventKind.WORKER_SILENT, EventKind.WORKER_SUSPECT):
            worker.doubt = event.reason  # passes when it is over, unlike the reason of an end
        elif event.reason and (not self.reason or kind is EventKind.FAIL):
            self.reason = event.reason
        if kind is EventKind.BEGIN:
            for each in self.workers:
                each.started = True
        elif kind in (EventKind.WORKER_READY, EventKind.RESUMED):
            if worker.exit_proof is not None:
                return
            worker.started = worker.ready = True
            worker.silent = worker.suspect = worker.released = False
            worker.tags = event.tags if kind is EventKind.WORKER_READY else worker.tags | event.tags
            if head:
                self.weights_pending = kind is EventKind.RESUMED and not event.weights_valid
                # A resume brings back what was there; when that is not what is awaited, it is still awaited.
                stale = self.weights_awaited and self.state is not State.STARTING
                self.weights_valid = event.weights_valid and not stale
                self.weights_awaited = not self.weights_valid
            if head and event.base_url is not None and event.base_url != self.base_url:
                self.generation += self.base_url is not None
                self.base_url = event.base_url
        elif kind is EventKind.RELEASED:
            worker.tags -= event.tags
            worker.released = not worker.tags
            self.weights_valid = self.weights_valid and "weights" not in event.tags
            self.weights_pending = self.weights_pending and "weights" not in event.tags
        elif kind is EventKind.WORKER_EXITED:
            worker.ready = False
            worker.tags = frozenset()
            # Memory evidence speaks of a living process; it is no proof that the process ended.
            if event.evidence in (Evidence.CONFIRMED_EXIT, Evidence.STEP_ENDED_WITH_CGROUP):
                worker.exit_proof = event.evidence
            self.admission_open = False
        elif kind is EventKind.WORKER_UNHEALTHY:
            worker.ready = False
        elif kind is EventKind.WORKER_SILENT:
            worker.silent = True
            # A guard that hears nothing closes by its own deadline, so "open" is no longer known.
            self.admission_open = self.admission_open and not head
        elif kind is EventKind.WORKER_HEARD:
            worker.silent = False
        elif kind in (EventKind.WORKER_SUSPECT, EventKind.WORKER_WELL):
            worker.suspect = kind is EventKind.WORKER_SUSPECT
        elif kind in (EventKind.WEIGHTS_VALID, EventKind.WEIGHTS_INVALID, EventKind.UPDATE):
            self._absorb_weights(event)
        elif kind in (EventKind.ADMISSION_OPENED, EventKind.ADMISSION_CLOSED):
            # A sign from before the drain may arrive late; it must not undo what was asked since.
            opens = self.state in (State.STARTING, State.READY, State.ONLOADING) and not self.weights_awaited
            self.admission_open = kind is EventKind.ADMISSION_OPENED and opens
        elif kind is EventKind.ONLOAD and self.state is State.SLEEPING:
            # From the moment the command goes out the memory may be taken.
            for each in self.workers:
                each.released = False

    def _absorb_weights(self, event: Event) -> None:
        if event.kind is EventKind.WEIGHTS_VALID:
            # An engine that was woken without weights is still paused: it has to say itself that it is ready.
            self.weights_valid = not self.weights_pending
            if self.weights_awaited:
                self.weights_awaited, self.reason = False, ""
        elif event.kind is EventKind.WEIGHTS_INVALID:
            self.weights_valid = False
        else:
            self.weights_awaited, self.reason = True, event.reason
            self.weights_valid = self.admission_open = False


def _possible(state: State) -> list[str]:
    return sorted(kind.value for source, kind in _BY_PAIR if source is state)


# --- when ---------------------------------------------------------------------------------------------------


def _always(_: Replica) -> bool:
    return True


def _openable(replica: Replica) -> bool:
    return replica.resident and replica.weights_valid and not replica.admission_open


def _complete(replica: Replica) -> bool:
    return not replica.fenced and replica.base_url is not None


def _all_released(replica: Replica) -> bool:
    return replica.release_proven and not replica.admission_open


def _unwoken(replica: Replica) -> bool:
    return replica.resident and replica.weights_pending


# --- act ----------------------------------------------------------------------------------------------------


def _nothing(_: Replica) -> list[Command]:
    return []


def _start(replica: Replica) -> list[Command]:
    return [Command(CommandKind.START_WORKER, rank) for rank in range(replica.size)]


def _open(_: Replica) -> list[Command]:
    return [Command(CommandKind.OPEN_ADMISSION, 0)]


def _close(replica: Replica) -> list[Command]:
    gone = replica.workers[0].exit_proof is not None or not replica.workers[0].started
    close = [] if gone else [Command(CommandKind.CLOSE_ADMISSION, 0)]
    return [Command(CommandKind.PUBLISH), *close]


def _offload(replica: Replica) -> list[Command]:
    return [Command(CommandKind.OFFLOAD, rank, ALL_TAGS) for rank in replica.unproven()]


def _onload(replica: Replica) -> list[Command]:
    missing = [ALL_TAGS - worker.tags for worker in replica.workers]
    return [Command(CommandKind.ONLOAD, rank, tags) for rank, tags in enumerate(missing)]


def _stop(replica: Replica) -> list[Command]:
    running = [rank for rank, w in enumerate(replica.workers) if w.started and w.exit_proof is None]
    return [*_close(replica), *(Command(CommandKind.STOP_WORKER, rank) for rank in running)]


# --- the table ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """In `source`, on `event`, if `when` holds once the event's facts are in: go to `target` and `act`."""

    source: State
    event: EventKind
    when: Callable[[Replica], bool]
    target: State
    act: Callable[[Replica], list[Command]]


S, E = State, EventKind

TABLE: tuple[Row, ...] = (
    Row(S.STARTING, E.BEGIN, _always, S.STARTING, _start),
    Row(S.STARTING, E.WORKER_READY, _openable, S.STARTING, _open),
    Row(S.STARTING, E.WEIGHTS_VALID, _openable, S.STARTING, _open),
    Row(S.STARTING, E.WORKER_HEARD, _openable, S.STARTING, _open),
    Row(S.STARTING, E.ADMISSION_OPENED, _complete, S.READY, _nothing),
    # Opened while a worker was silent or the weights in doubt: the last thing that was missing decides.
    Row(S.STARTING, E.WORKER_HEARD, _complete, S.READY, _nothing),
    Row(S.STARTING, E.WORKER_WELL, _complete, S.READY, _nothing),
    Row(S.STARTING, E.WEIGHTS_VALID, _complete, S.READY, _nothing),
    Row(S.STARTING, E.WORKER_UNHEALTHY, _always, S.FAILED, _close),
    Row(S.STARTING, E.WORKER_EXITED, _always, S.FAILED, _close),
    Row(S.STARTING, E.FAIL, _always, S.FAILED, _close),
    Row(S.READY, E.OFFLOAD, _always, S.DRAINING, _close),
    Row(S.READY, E.WORKER_HEARD, _openable, S.READY, _open),
    Row(S.READY, E.WEIGHTS_VALID, _openable, S.READY, _open),
    Row(S.READY, E.WORKER_UNHEALTHY, _always, S.STOPPING, _stop),
    Row(S.READY, E.WORKER_EXITED, _always, S.STOPPING, _stop),
    Row(S.READY, E.STOP, _always, S.STOPPING, _stop),
    Row(S.DRAINING, E.ADMISSION_CLOSED, _always, S.DRAINING, _offload),
    Row(S.DRAINING, E.RELEASED, _all_released, S.SLEEPING, _nothing),
    Row(S.DRAINING, E.WORKER_UNHEALTHY, _always, S.FAILED, _close),
    Row(S.DRAINING, E.WORKER_EXITED, _always, S.FAILED, _close),
    Row(S.DRAINING, E.FAIL, _always, S.FAILED, _close),
    Row(S.SLEEPING, E.ONLOAD, _always, S.ONLOADING, _onload),
    Row(S.SLEEPING, E.WORKER_UNHEALTHY, _always, S.STOPPING, _stop),
    Row(S.SLEEPING, E.WORKER_EXITED, _always, S.STOPPING, _stop),
    Row(S.SLEEPING, E.STOP, _always, S.STOPPING, _stop),
    Row(S.ONLOADING, E.RESUMED, _openable, S.ONLOADING, _open),
    # Woken without weights, which are there now: the rest of waking up is still to be done.
    Row(S.ONLOADING, E.WEIGHTS_VALID, _unwoken, S.ONLOADING, _onload),
    Row(S.ONLOADING, E.WEIGHTS_VALID, _openable, S.ONLOADING, _open),
    Row(S.ONLOADING, E.WORKER_HEARD, _openable, S.ONLOADING, _open),
    Row(S.ONLOADING, E.ADMISSION_OPENED, _complete, S.READY, _nothing),
    Row(S.ONLOADING, E.WORKER_HEARD, _complete, S.READY, _nothing),
    Row(S.ONLOADING, E.WORKER_WELL, _complete, S.READY, _nothing),
    Row(S.ONLOADING, E.WEIGHTS_VALID, _complete, S.READY, _nothing),
    Row(S.ONLOADING, E.WORKER_UNHEALTHY, _always, S.FAILED, _close),
    Row(S.ONLOADING, E.WORKER_EXITED, _always, S.FAILED, _close),
    Row(S.ONLOADING, E.FAIL, _always, S.FAILED, _close),
    Row(S.FAILED, E.STOP, _always, S.STOPPING, _stop),
    Row(S.STOPPING, E.STOP, _always, S.STOPPING, _stop),
    Row(S.STOPPING, E.SETTLED, _always, S.GONE, _nothing),
)

_LATE = frozenset({E.WORKER_READY, E.WORKER_UNHEALTHY, E.WORKER_EXITED, E.RELEASED, E.RESUMED, E.FAIL})
_SIGNS = frozenset(
    {
        E.WORKER_SILENT,
        E.WORKER_HEARD,
        E.WORKER_SUSPECT,
        E.WORKER_WELL,
        E.ADMISSION_OPENED,
        E.ADMISSION_CLOSED,
    }
)
_WEIGHTS = frozenset({E.WEIGHTS_VALID, E.WEIGHTS_INVALID})
_CHANGES = _WEIGHTS | {E.UPDATE}

FACTS_ONLY: dict[State, frozenset[EventKind]] = {
    S.STARTING: _SIGNS | _CHANGES | {E.WORKER_READY},
    S.READY: _SIGNS | _CHANGES | {E.WORKER_READY, E.ONLOAD},
    S.DRAINING: _SIGNS | {E.RELEASED, E.OFFLOAD},
    S.SLEEPING: _SIGNS | {E.RELEASED, E.OFFLOAD},
    S.ONLOADING: _SIGNS | _CHANGES | {E.RESUMED, E.ONLOAD},
    S.FAILED: _SIGNS | _WEIGHTS | _LATE,
    S.STOPPING: _SIGNS | _WEIGHTS | _LATE,
    S.GONE: _SIGNS | {E.WORKER_EXITED, E.STOP},
}
"""Events that leave the state alone: repeated requests, signs of life, answers that come too late."""

_PER_WORKER = frozenset(
    {
        E.WORKER_READY,
        E.WORKER_UNHEALTHY,
        E.WORKER_EXITED,
        E.WORKER_SILENT,
        E.WORKER_HEARD,
        E.WORKER_SUSPECT,
        E.WORKER_WELL,
        E.RELEASED,
        E.RESUMED,
    }
)

_BY_PAIR: dict[tuple[State, EventKind], tuple[Row, ...]] = {
    (state, kind): () for state, kinds in FACTS_ONLY.items() for kind in kinds
}
for _row in TABLE:
    _BY_PAIR[_row.source, _row.event] = (*_BY_PAIR.get((_row.source, _row.event), ()), _row)


def mermaid() -> str:
    """The table as a mermaid state diagram."""
    edges: dict[tuple[State, State], list[str]] = {}
    for row in TABLE:
        if row.source is not row.target:
            edges.setdefault((row.source, row.target), []).append(row.event.value)
    lines = ["stateDiagram-v2", "    [*] --> STARTING"]
    lines += [f"    {source} --> {target}: {' | '.join(why)}" for (source, target), why in edges.items()]
    return "\n".join([*lines, "    GONE --> [*]", ""])
