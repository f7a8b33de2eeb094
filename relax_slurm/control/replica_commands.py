"""Between a replica's machine and the wire: a `Command` as a method with arguments, an outcome as an `Event`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.links import CommandFailed
from relax_slurm.core.replica_events import Command, CommandKind, Event, EventKind, Evidence
from relax_slurm.wire.messages import Method

METHODS: Mapping[CommandKind, Method] = {
    CommandKind.START_WORKER: Method.START_WORKER,
    CommandKind.STOP_WORKER: Method.STOP_WORKER,
    CommandKind.OPEN_ADMISSION: Method.OPEN_ADMISSION,
    CommandKind.CLOSE_ADMISSION: Method.CLOSE_ADMISSION,
    CommandKind.OFFLOAD: Method.OFFLOAD,
    CommandKind.ONLOAD: Method.ONLOAD,
}
ENDING_SECONDS = 60.0
"""What a sidecar may need to end a process for certain: a start that failed includes that, and so does a start after an
earlier worker."""


def timeout_seconds(kind: CommandKind, config: RunConfig) -> float:
    """How long a result may take; longer than the sidecar's own deadline, so that its reason arrives first."""
    if kind is CommandKind.START_WORKER:
        return config.engine.startup_seconds + ENDING_SECONDS
    if kind is CommandKind.STOP_WORKER:
        return config.control.drain_seconds + ENDING_SECONDS
    return config.control.operation_seconds


def arguments(command: Command, worker_id: str, generation: int, config: RunConfig) -> dict[str, Any]:
    """The `args` of every method but `start_worker`, which adds what `worker_args` makes."""
    base: dict[str, Any] = {"worker_id": worker_id, "generation": generation}
    control = config.control
    if command.kind in (CommandKind.CLOSE_ADMISSION, CommandKind.STOP_WORKER):
        return base | {"drain_seconds": control.drain_seconds}
    if command.kind in (CommandKind.OFFLOAD, CommandKind.ONLOAD):
        seconds = control.operation_seconds - control.drain_seconds
        return base | {"tags": sorted(command.tags), "deadline_seconds": seconds}
    return base


def success(command: Command, rank: int, value: Mapping[str, Any]) -> Event:
    """What a good result says."""
    match command.kind:
        case CommandKind.START_WORKER:
            url = value.get("base_url") if rank == 0 else None
            return Event(EventKind.WORKER_READY, rank, base_url=url)
        case CommandKind.OPEN_ADMISSION:
            return Event(EventKind.ADMISSION_OPENED)
        case CommandKind.CLOSE_ADMISSION:
            return Event(EventKind.ADMISSION_CLOSED)
        case CommandKind.OFFLOAD:
            return Event(EventKind.RELEASED, rank, tags=command.tags)
        case CommandKind.ONLOAD:
            valid = value.get("result") != "weights_pending"
            return Event(EventKind.RESUMED, rank, tags=command.tags, weights_valid=valid)
        case _:
            return Event(EventKind.WORKER_EXITED, rank, evidence=Evidence.CONFIRMED_EXIT)


def failure(rank: int, error: CommandFailed) -> Event:
    """What a sidecar's refusal says."""
    if error.remote_code == "exited":
        # The sidecar saw the whole process tree end: a failure, and proof of release.
        return Event(EventKind.WORKER_EXITED, rank, evidence=Evidence.CONFIRMED_EXIT, reason=error.message)
    return Event(EventKind.FAIL, reason=error.message)
