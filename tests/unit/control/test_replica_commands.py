"""Commands as methods and results as events, for every kind there is."""

from __future__ import annotations

import pytest

from relax_slurm.control.links import CommandFailed
from relax_slurm.control.replica_commands import METHODS, arguments, failure, success, timeout_seconds
from relax_slurm.core.replica_events import ALL_TAGS, Command, CommandKind, Event, EventKind, Evidence
from relax_slurm.wire.messages import Method
from tests.unit.control.stage import config_of

SENT = [kind for kind in CommandKind if kind is not CommandKind.PUBLISH]


def test_every_command_but_publish_is_a_method() -> None:
    assert set(METHODS) == set(SENT)
    assert {str(kind) for kind in METHODS} == {str(method) for method in METHODS.values()}
    # Not asked for by a replica's machine: the end of a sidecar, and operations on weights.
    others = {Method.SHUTDOWN, Method.UPDATE_WEIGHTS, Method.WEIGHTS_GROUP}
    assert set(Method) - set(METHODS.values()) == others


def test_a_replica_may_come_back_without_its_weights() -> None:
    onload = Command(CommandKind.ONLOAD, 0, ALL_TAGS)
    assert success(onload, 0, {"result": "ready"}).weights_valid
    assert not success(onload, 0, {"result": "weights_pending"}).weights_valid


@pytest.mark.parametrize("kind", SENT)
def test_the_coordinator_waits_longer_than_the_sidecar(kind: CommandKind) -> None:
    config = config_of()
    args = arguments(Command(kind, 0, ALL_TAGS), "m/replica-0#0", 3, config)
    assert args["worker_id"] == "m/replica-0#0"
    assert args["generation"] == 3
    inner = args.get("deadline_seconds", args.get("drain_seconds", 0.0))
    if kind is CommandKind.START_WORKER:
        inner = config.engine.startup_seconds + 40.0  # its own end and that of a predecessor
    assert timeout_seconds(kind, config) > inner


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        (CommandKind.START_WORKER, Event(EventKind.WORKER_READY, 0, base_url="http://h:1")),
        (CommandKind.OPEN_ADMISSION, Event(EventKind.ADMISSION_OPENED)),
        (CommandKind.CLOSE_ADMISSION, Event(EventKind.ADMISSION_CLOSED)),
        (CommandKind.OFFLOAD, Event(EventKind.RELEASED, 0)),
        (CommandKind.ONLOAD, Event(EventKind.RESUMED, 0)),
        (CommandKind.STOP_WORKER, Event(EventKind.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT)),
    ],
)
def test_success(kind: CommandKind, event: Event) -> None:
    assert success(Command(kind, 0, ALL_TAGS), 0, {"base_url": "http://h:1"}) == event


def test_only_the_head_is_published() -> None:
    event = success(Command(CommandKind.START_WORKER, 1), 1, {"base_url": "http://h:1"})
    assert event == Event(EventKind.WORKER_READY, 1)


def test_a_failure_is_proof_of_an_end_only_when_the_sidecar_saw_it() -> None:
    assert failure(1, CommandFailed("gone", "exited")).evidence is Evidence.CONFIRMED_EXIT
    for code in ("recovery_required", "internal", "stale_generation", ""):
        event = failure(1, CommandFailed("doubt", code))
        assert event == Event(EventKind.FAIL, reason="doubt")
