"""The replica machine: its table, its walk, and what must hold whatever happens."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from relax_slurm.core.discovery import ReplicaState
from relax_slurm.core.replica import (
    ALL_TAGS,
    FACTS_ONLY,
    TABLE,
    Command,
    CommandKind,
    Event,
    EventKind,
    Evidence,
    IllegalEvent,
    Replica,
    State,
    mermaid,
)

E, S = EventKind, State
CONTRACT = {
    (S.STARTING, S.READY),
    (S.STARTING, S.FAILED),
    (S.READY, S.DRAINING),
    (S.READY, S.STOPPING),
    (S.DRAINING, S.SLEEPING),
    (S.DRAINING, S.FAILED),
    (S.SLEEPING, S.ONLOADING),
    (S.SLEEPING, S.STOPPING),
    (S.ONLOADING, S.READY),
    (S.ONLOADING, S.FAILED),
    (S.FAILED, S.STOPPING),
}


def kinds(commands: list[Command]) -> list[tuple[str, int | None]]:
    return [(command.kind.value, command.worker) for command in commands]


def send(replica: Replica, kind: EventKind, worker: int | None = None, **more: object) -> list[Command]:
    return replica.apply(replace(Event(kind, worker), **more), 1.0)  # type: ignore[arg-type]


def ready(size: int = 1) -> Replica:
    replica = Replica("m/replica-0", size)
    send(replica, E.BEGIN)
    for rank in range(size):
        send(replica, E.WORKER_READY, rank, base_url="http://n0:1" if rank == 0 else None)
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.READY
    return replica


def sleeping(size: int = 1) -> Replica:
    replica = ready(size)
    send(replica, E.OFFLOAD)
    send(replica, E.ADMISSION_CLOSED)
    for rank in range(size):
        send(replica, E.RELEASED, rank)
    assert replica.state is S.SLEEPING
    return replica


def test_the_table_is_the_contract() -> None:
    edges = {(row.source, row.target) for row in TABLE if row.source is not row.target}
    assert edges == CONTRACT | {(S.STOPPING, S.GONE)}
    assert {state for state, _ in edges} | {S.GONE} == set(State) == set(FACTS_ONLY)
    assert {row.event for row in TABLE} | frozenset().union(*FACTS_ONLY.values()) == set(EventKind)


def test_start_to_ready_of_two_nodes() -> None:
    replica = Replica("m/replica-0", 2)
    assert kinds(send(replica, E.BEGIN)) == [("start_worker", 0), ("start_worker", 1)]
    assert kinds(send(replica, E.WORKER_READY, 0, base_url="http://n0:1")) == [("publish", None)]
    assert kinds(send(replica, E.WORKER_READY, 1)) == [("open_admission", 0)]
    assert replica.published().state is ReplicaState.STARTING
    assert kinds(send(replica, E.ADMISSION_OPENED)) == [("publish", None)]
    entry = replica.published()
    assert (entry.state, entry.base_url, entry.direct_eligible, entry.generation) == (
        ReplicaState.READY,
        "http://n0:1",
        True,
        1,
    )


def test_not_ready_while_weights_are_not_valid() -> None:
    replica = Replica("m/replica-0", 1)
    send(replica, E.BEGIN)
    assert kinds(send(replica, E.WORKER_READY, 0, base_url="http://n:1", weights_valid=False)) == [("publish", None)]
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.STARTING
    send(replica, E.ADMISSION_CLOSED)
    assert kinds(send(replica, E.WEIGHTS_VALID)) == [("open_admission", 0)]
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.READY


def test_a_suspect_worker_is_not_routed_to_and_is_never_called_free() -> None:
    replica = ready(2)
    assert kinds(send(replica, E.WORKER_SUSPECT, 1, reason="it did not answer")) == [("publish", None)]
    entry = replica.published()
    assert (entry.state, entry.direct_eligible, entry.generation) == (ReplicaState.UNKNOWN, False, 1)
    assert (replica.state, replica.why, replica.reason) == (S.READY, "it did not answer", "")
    assert not replica.release_proven
    assert kinds(send(replica, E.WORKER_WELL, 1)) == [("publish", None)]
    entry = replica.published()
    assert (entry.state, entry.direct_eligible, entry.generation) == (ReplicaState.READY, True, 1)
    assert replica.why == ""


def test_silence_passes_without_a_trace() -> None:
    replica = ready()
    send(replica, E.WORKER_SILENT, 0, reason="node n is silent")
    assert replica.why == "node n is silent"
    assert kinds(send(replica, E.WORKER_HEARD, 0)) == [("open_admission", 0)]
    send(replica, E.ADMISSION_OPENED)
    assert (replica.published().state, replica.why) == (ReplicaState.READY, "")


def test_a_worker_that_is_well_again_may_be_what_was_missing() -> None:
    replica = Replica("m/replica-0", 1)
    send(replica, E.BEGIN)
    send(replica, E.WORKER_READY, 0, base_url="http://n:1")
    send(replica, E.WORKER_SUSPECT, 0)
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.STARTING
    send(replica, E.WORKER_WELL, 0)
    assert replica.state is S.READY


def test_woken_without_weights_is_neither_failed_nor_routable_until_they_are_there() -> None:
    replica = sleeping(2)
    assert kinds(send(replica, E.ONLOAD)) == [("publish", None), ("onload", 0), ("onload", 1)]
    send(replica, E.RESUMED, 1)
    assert kinds(send(replica, E.RESUMED, 0, weights_valid=False)) == []
    assert (replica.state, replica.weights_pending) == (S.ONLOADING, True)
    assert not replica.published().direct_eligible
    # They were sent: the engine is still paused, and says itself when it is ready.
    commands = send(replica, E.WEIGHTS_VALID)
    assert [(c.kind.value, c.worker, c.tags) for c in commands] == [
        ("onload", 0, frozenset()),
        ("onload", 1, frozenset()),
    ]
    assert kinds(send(replica, E.RESUMED, 1)) == []
    assert kinds(send(replica, E.RESUMED, 0)) == [("open_admission", 0)]
    send(replica, E.ADMISSION_OPENED)
    assert (replica.state, replica.generation) == (S.READY, 1)


def test_not_ready_with_a_tag_missing() -> None:
    replica = Replica("m/replica-0", 1)
    send(replica, E.BEGIN)
    send(replica, E.WORKER_READY, 0, base_url="http://n:1", tags=frozenset({"weights"}))
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.STARTING


def test_offload_closes_admission_before_it_releases() -> None:
    replica = ready(2)
    assert kinds(send(replica, E.OFFLOAD)) == [("publish", None), ("close_admission", 0)]
    assert not replica.published().direct_eligible
    assert kinds(send(replica, E.ADMISSION_CLOSED)) == [("offload", 0), ("offload", 1)]
    send(replica, E.RELEASED, 0)
    assert replica.state is S.DRAINING
    assert not replica.release_proven
    send(replica, E.RELEASED, 1)
    assert replica.state is S.SLEEPING
    assert replica.release_proven
    assert {worker.evidence for worker in replica.workers} == {Evidence.RELEASED_MEMORY}


def test_a_late_open_does_not_hold_up_the_drain() -> None:
    replica = ready()
    send(replica, E.OFFLOAD)
    send(replica, E.ADMISSION_CLOSED)
    send(replica, E.ADMISSION_OPENED)
    send(replica, E.RELEASED, 0)
    assert replica.state is S.SLEEPING


def test_a_part_of_the_tags_is_not_a_release() -> None:
    replica = ready()
    send(replica, E.OFFLOAD)
    send(replica, E.ADMISSION_CLOSED)
    send(replica, E.RELEASED, 0, tags=frozenset({"kv_cache", "cuda_graph"}))
    assert replica.state is S.DRAINING
    send(replica, E.RELEASED, 0, tags=frozenset({"weights"}))
    assert replica.state is S.SLEEPING


def test_onload_asks_for_what_is_missing_and_takes_the_proof_back() -> None:
    replica = sleeping(2)
    commands = send(replica, E.ONLOAD)
    assert kinds(commands) == [("publish", None), ("onload", 0), ("onload", 1)]
    assert commands[1].tags == ALL_TAGS
    assert not replica.release_proven
    send(replica, E.RESUMED, 0)
    assert kinds(send(replica, E.RESUMED, 1)) == [("open_admission", 0)]
    send(replica, E.ADMISSION_OPENED)
    assert replica.published().direct_eligible


@pytest.mark.parametrize(
    ("make", "kind"), [(ready, E.ONLOAD), (sleeping, E.OFFLOAD)], ids=["onload ready", "offload sleeping"]
)
def test_duplicates_are_no_ops(make: object, kind: EventKind) -> None:
    replica = make()  # type: ignore[operator]
    before = copy.deepcopy(replica)
    assert send(replica, kind) == []
    assert replica == before


@pytest.mark.parametrize(
    ("kind", "worker"),
    [
        (E.ONLOAD, None),
        (E.BEGIN, None),
        (E.SETTLED, None),
        (E.WORKER_READY, 0),
        (E.RELEASED, None),
        (E.RELEASED, 2),
    ],
)
def test_an_illegal_event_changes_nothing(kind: EventKind, worker: int | None) -> None:
    replica = ready(2)
    send(replica, E.OFFLOAD)
    before = copy.deepcopy(replica)
    with pytest.raises(IllegalEvent, match="m/replica-0"):
        send(replica, kind, worker)
    assert replica == before


def test_failed_never_means_free() -> None:
    replica = ready()
    send(replica, E.OFFLOAD)
    commands = send(replica, E.FAIL, reason="offload timed out")
    assert kinds(commands) == [("publish", None), ("close_admission", 0)]
    assert (replica.state, replica.reason, replica.release_proven) == (S.FAILED, "offload timed out", False)
    assert replica.unproven() == [0]
    send(replica, E.RELEASED, 0)
    assert replica.state is S.FAILED
    assert replica.release_proven


def test_silence_fences_and_the_return_opens_again() -> None:
    replica = ready(2)
    assert kinds(send(replica, E.WORKER_SILENT, 1)) == [("publish", None)]
    entry = replica.published()
    assert (entry.state, entry.direct_eligible) == (ReplicaState.UNKNOWN, False)
    assert replica.state is S.READY
    assert not replica.release_proven
    assert kinds(send(replica, E.WORKER_HEARD, 1)) == [("publish", None)]
    assert replica.published().direct_eligible
    send(replica, E.WORKER_SILENT, 0)
    assert kinds(send(replica, E.WORKER_HEARD, 0)) == [("open_admission", 0)]
    assert not replica.published().direct_eligible
    send(replica, E.ADMISSION_OPENED)
    assert replica.published().direct_eligible


def test_a_follower_that_exits_takes_the_replica_down_until_every_end_is_proven() -> None:
    replica = ready(2)
    commands = send(replica, E.WORKER_EXITED, 1, evidence=Evidence.CONFIRMED_EXIT, reason="signal 9")
    assert kinds(commands) == [("publish", None), ("close_admission", 0), ("stop_worker", 0)]
    assert (replica.state, replica.reason) == (S.STOPPING, "signal 9")
    with pytest.raises(IllegalEvent, match="not proven"):
        replica.successor(2.0)
    assert kinds(send(replica, E.STOP)) == [("publish", None), ("close_admission", 0), ("stop_worker", 0)]
    send(replica, E.WORKER_EXITED, 0)
    assert replica.state is S.STOPPING
    send(replica, E.WORKER_EXITED, 0, evidence=Evidence.STEP_ENDED_WITH_CGROUP)
    assert replica.state is S.GONE
    assert replica.published().state is ReplicaState.DEAD
    fresh = replica.successor(2.0)
    assert (fresh.state, fresh.generation, fresh.engine_id) == (S.STARTING, 2, "m/replica-0")


def test_memory_evidence_is_no_proof_of_an_exit() -> None:
    replica = ready()
    send(replica, E.WORKER_EXITED, 0, evidence=Evidence.RELEASED_MEMORY)
    assert replica.state is S.STOPPING
    assert not replica.release_proven


def test_the_last_proof_while_ready_ends_it_at_once() -> None:
    replica = ready()
    commands = send(replica, E.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT)
    assert replica.state is S.GONE
    assert kinds(commands) == [("publish", None)]


@pytest.mark.parametrize("state", list(State))
def test_shutdown_from_everywhere(state: State) -> None:
    replica = {
        S.STARTING: lambda: Replica("m/replica-0", 1),
        S.READY: ready,
        S.SLEEPING: sleeping,
        S.GONE: ready,
        S.STOPPING: ready,
        S.FAILED: ready,
        S.DRAINING: ready,
        S.ONLOADING: sleeping,
    }[state]()
    if state is S.STARTING:
        send(replica, E.BEGIN)
    if state in (S.DRAINING, S.FAILED):
        send(replica, E.OFFLOAD)
    if state is S.FAILED:
        send(replica, E.FAIL)
    if state is S.ONLOADING:
        send(replica, E.ONLOAD)
    if state is S.STOPPING:
        send(replica, E.STOP)
    if state is S.GONE:
        send(replica, E.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT)
    assert replica.state is state
    commands = replica.shutdown(2.0)
    assert len(commands) == len(set(commands))
    if state is S.GONE:
        assert commands == []
        return
    assert replica.state is S.STOPPING
    assert ("stop_worker", 0) in kinds(commands)
    send(replica, E.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT)
    assert replica.state is S.GONE


def test_a_replica_that_never_began_just_ends() -> None:
    replica = Replica("m/replica-0", 2)
    assert replica.release_proven
    assert kinds(replica.shutdown(1.0)) == [("publish", None)]
    assert replica.state is S.GONE


def test_a_new_endpoint_is_a_new_generation() -> None:
    replica = ready()
    assert kinds(send(replica, E.WORKER_READY, 0, base_url="http://n0:2")) == [("publish", None)]
    assert replica.published().generation == 2
    assert send(replica, E.WORKER_READY, 0, base_url="http://n0:2") == []


def test_the_diagram_names_every_state() -> None:
    text = mermaid()
    assert text.startswith("stateDiagram-v2\n    [*] --> STARTING\n")
    assert all(state.value in text for state in State)
    assert "DRAINING --> SLEEPING: released" in text


class Life(RuleBasedStateMachine):
    """Any event at any time."""

    @initialize(size=st.integers(1, 3))
    def make(self, size: int) -> None:
        self.replica = Replica("m/replica-0", size)
        self.stopping = False

    @rule(
        kind=st.sampled_from(EventKind),
        worker=st.none() | st.integers(0, 3),
        tags=st.sampled_from([ALL_TAGS, ALL_TAGS, frozenset({"weights"})]),
        url=st.sampled_from(["http://n0:1", "http://n0:1", "http://n0:2", None]),
        evidence=st.none() | st.sampled_from(Evidence),
        valid=st.sampled_from([True, True, True, False]),
    )
    def any_event(
        self,
        kind: EventKind,
        worker: int | None,
        *,
        tags: frozenset[str],
        url: str | None,
        evidence: Evidence | None,
        valid: bool,
    ) -> None:
        self.step(Event(kind, worker, tags, url, evidence, valid))

    @rule()
    def go_on(self) -> None:
        """What a healthy fleet would do next, so that deep states are reached."""
        replica = self.replica
        wanted = {
            S.STARTING: [Event(E.BEGIN), *self.each(E.WORKER_READY), Event(E.ADMISSION_OPENED)],
            S.READY: [Event(E.OFFLOAD)],
            S.DRAINING: [Event(E.ADMISSION_CLOSED), *self.each(E.RELEASED)],
            S.SLEEPING: [Event(E.ONLOAD)],
            S.ONLOADING: [*self.each(E.RESUMED), Event(E.ADMISSION_OPENED)],
            S.FAILED: [Event(E.STOP)],
            S.STOPPING: [replace(event, evidence=Evidence.CONFIRMED_EXIT) for event in self.each(E.WORKER_EXITED)],
            S.GONE: [Event(E.STOP)],
        }[replica.state]
        state = replica.state
        for event in wanted:
            if replica.state is state:
                self.step(event)

    def each(self, kind: EventKind) -> list[Event]:
        return [Event(kind, rank, base_url="http://n0:1") for rank in range(self.replica.size)]

    def step(self, event: Event) -> None:
        replica = self.replica
        before = copy.deepcopy(replica)
        try:
            commands = replica.apply(event, 1.0)
        except IllegalEvent:
            assert replica == before
            return
        if before.state is not replica.state:
            passed = {(before.state, replica.state)}
            if replica.state is S.GONE and before.state is not S.STOPPING:
                passed = {(before.state, S.STOPPING)}
            assert passed <= CONTRACT | {(S.STOPPING, S.GONE)}
        assert (Command(CommandKind.PUBLISH) in commands) or replica.published() == before.published()
        assert replica.generation >= before.generation
        if replica.release_proven and not before.release_proven:
            assert event.kind in (E.RELEASED, E.WORKER_EXITED)
        if event.kind in (E.WORKER_SILENT, E.WORKER_SUSPECT, E.FAIL, E.WORKER_UNHEALTHY):
            assert replica.release_proven == before.release_proven

    @invariant()
    def what_is_published_serves(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        entry = replica.published()
        if entry.direct_eligible:
            assert replica.state is S.READY
            assert replica.resident
            assert replica.weights_valid
            assert replica.admission_open
            assert entry.base_url
        if replica.state is S.SLEEPING or replica.state is S.GONE:
            assert replica.release_proven
        if replica.state is S.GONE:
            assert replica.ended


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


# --- other weights -------------------------------------------------------------------------------------------------


def test_while_weights_are_replaced_it_is_ready_by_the_book_and_shown_as_onloading() -> None:
    replica = ready()
    assert kinds(send(replica, E.UPDATE, reason="weights '2' are being loaded")) == [("publish", None)]
    shown = replica.published()
    assert (replica.state, shown.state, shown.routable) == (S.READY, ReplicaState.ONLOADING, False)
    # Signs of before, and a node that comes back, do not open it.
    assert send(replica, E.ADMISSION_OPENED) == []
    assert send(replica, E.WORKER_HEARD, 0) == []
    assert not replica.admission_open
    assert replica.reason
    assert kinds(send(replica, E.WEIGHTS_VALID)) == [("publish", None), ("open_admission", 0)]
    assert replica.published().state is not ReplicaState.READY, "the guard is not open yet"
    send(replica, E.ADMISSION_OPENED)
    assert (replica.published().state, replica.reason) == (ReplicaState.READY, "")


@pytest.mark.parametrize("kind", [E.STOP, E.WORKER_UNHEALTHY, E.WORKER_EXITED])
def test_an_update_can_end_like_everything_else(kind: EventKind) -> None:
    replica = ready()
    send(replica, E.UPDATE)
    send(replica, kind, None if kind is E.STOP else 0)
    assert replica.state is S.STOPPING


def test_a_replica_without_the_models_weights_waits_for_them() -> None:
    replica = Replica("m/replica-0", 1)
    send(replica, E.BEGIN)
    assert send(replica, E.WORKER_READY, 0, base_url="http://n0:1", weights_valid=False, reason="on no disk") == [
        Command(CommandKind.PUBLISH)
    ]
    assert (replica.state, replica.weights_awaited, replica.reason) == (S.STARTING, True, "on no disk")
    send(replica, E.UPDATE)
    assert kinds(send(replica, E.WEIGHTS_VALID)) == [("open_admission", 0)]
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.READY


def test_a_resume_does_not_bring_back_what_is_awaited() -> None:
    replica = sleeping()
    send(replica, E.ONLOAD)
    assert send(replica, E.RESUMED, 0, weights_valid=False) == []
    assert replica.published().state is ReplicaState.ONLOADING
    assert kinds(send(replica, E.WEIGHTS_VALID)) == [("onload", 0)], "it is paused, and says itself when it is up"
    assert kinds(send(replica, E.RESUMED, 0)) == [("open_admission", 0)]
    send(replica, E.ADMISSION_OPENED)
    assert replica.state is S.READY
