"""Faults planted on purpose: each takes one safeguard away, and the simulation has to find it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from relax_slurm.control import dispatch
from relax_slurm.control.dispatch import Dispatch
from relax_slurm.control.role_mover import RoleMover
from relax_slurm.core.batch import BatchEvent, BatchState
from relax_slurm.core.lease import LeaseEvent, LeaseState
from relax_slurm.core.lifecycle import ROLLOUT, Lifecycle, Verdict
from relax_slurm.core.operations import Operations, Progress
from relax_slurm.core.replica_events import Worker
from relax_slurm.workload import deferred
from sidecars.commands import CommandTable
from sidecars.daemon import NodeDaemon

Plant = Callable[[], AbstractContextManager[Any]]


def _no_look_at_rivals() -> AbstractContextManager[Any]:
    return patch.object(Lifecycle, "_want_free", lambda self, holder, what, unproven: None)


def _no_evidence() -> AbstractContextManager[Any]:
    return patch.object(RoleMover, "unproven", lambda self: {})


def _late_answer_counts() -> AbstractContextManager[Any]:
    settle = Lifecycle.settle

    def late(self: Lifecycle, operation_id: str, failure: str = "") -> bool:
        operation = self._operations.get(operation_id)
        if operation is not None and operation.progress is Progress.FAILED and not failure:
            lease = self.leases[operation.ask.holder or ROLLOUT]
            if lease.state is LeaseState.BLOCKED:
                lease.apply(LeaseEvent.RECOVER)
        return settle(self, operation_id, failure)

    return patch.object(Lifecycle, "settle", late)


def _commit_without_a_look() -> AbstractContextManager[Any]:
    def commit(self: Lifecycle, ask: Any, _: Any) -> None:
        if ask.batch not in self._committed:
            self._pending(ask.batch).apply(BatchEvent.COMMIT)
            self._committed[ask.batch] = None

    return patch.object(Lifecycle, "_commit_batch", commit)


def _any_generation() -> AbstractContextManager[Any]:
    do = NodeDaemon._do

    async def anyone(self: NodeDaemon, method: str, args: dict[str, Any]) -> dict[str, Any]:
        worker = self.workers.get(str(args.get("worker_id", "")))
        if worker is not None and method not in ("start_worker", "shutdown"):
            args = args | {"generation": worker.generation}
        return await do(self, method, args)

    return patch.object(NodeDaemon, "_do", anyone)


def _acknowledged_without_evidence() -> AbstractContextManager[Any]:
    acknowledge = Lifecycle._acknowledge
    return patch.object(Lifecycle, "_acknowledge", lambda self, ask, _: acknowledge(self, ask, {}))


def _a_retry_is_new() -> AbstractContextManager[Any]:
    return patch.object(Operations, "find", lambda self, ask: None)


def _a_repeated_command_runs_again() -> AbstractContextManager[Any]:
    begin = CommandTable.begin

    def again(
        self: CommandTable, operation: str, method: str, args: dict[str, Any], do: Any
    ) -> asyncio.Future[dict[str, Any]]:
        known = self._operations.get(operation)
        if known is not None and known.outcome.done():
            del self._operations[operation]
        return begin(self, operation, method, args, do)

    return patch.object(CommandTable, "begin", again)


def _silence_is_release() -> AbstractContextManager[Any]:
    evidence = Worker.evidence.fget  # type: ignore[attr-defined]
    return patch.object(Worker, "evidence", property(lambda self: evidence(self) or self.silent))


def _failed_batches_go_on() -> AbstractContextManager[Any]:
    def forgiving(self: Lifecycle, ask: Any, unproven: Any) -> Any:
        failure, self.failure = self.failure, ""
        try:
            with patch.object(Lifecycle, "_pending", Lifecycle._open):
                return activate(self, ask, unproven)
        finally:
            self.failure = failure

    activate = Lifecycle._activate
    return patch.object(Lifecycle, "_activate", forgiving)


def _nothing_is_withdrawn() -> AbstractContextManager[Any]:
    return patch.object(Dispatch, "withdraw", lambda self, slot: None)


def _nothing_is_written_back() -> AbstractContextManager[Any]:
    return patch.object(deferred, "write_back", lambda originals, copies, expected: None)


def _nobody_hears_of_failures() -> AbstractContextManager[Any]:
    def verdict(self: Lifecycle, number: int) -> Verdict:
        return Verdict(BatchState.COMMITTED if number in self._committed else BatchState.PENDING)

    return patch.object(Lifecycle, "verdict", verdict)


def _weights_are_always_valid() -> AbstractContextManager[Any]:
    success = dispatch.success
    return patch.object(
        dispatch, "success", lambda command, rank, value: success(command, rank, {**value, "result": "ready"})
    )


def _released_is_said_at_once() -> AbstractContextManager[Any]:
    return patch("tests.chaos.engines.SimHosted._move", _hasty)


async def _hasty(self: Any, engine: Any, tags: frozenset[str], deadline_seconds: float, why: str) -> None:
    asyncio.get_running_loop().call_later(0.5, self._bench.cards.set_tags, engine, tags, why)


PLANTED: Mapping[str, Plant] = {
    "a lease is given without a look at rivals": _no_look_at_rivals,
    "nobody asks for evidence": _no_evidence,
    "a late answer clears BLOCKED": _late_answer_counts,
    "a commit without a look at who sleeps": _commit_without_a_look,
    "the sidecar ignores generations": _any_generation,
    "rollout is acknowledged without evidence": _acknowledged_without_evidence,
    "a retry starts a second operation": _a_retry_is_new,
    "the sidecar runs a repeated command again": _a_repeated_command_runs_again,
    "silence is release": _silence_is_release,
    "activation in a failed batch": _failed_batches_go_on,
    "commands of an ended replica are still sent": _nothing_is_withdrawn,
    "a commit without write-back": _nothing_is_written_back,
    "nobody hears that a batch failed": _nobody_hears_of_failures,
    "weights that are missing count as valid": _weights_are_always_valid,
    "a release is said before the memory is free": _released_is_said_at_once,
}
IN_THE_MACHINES = (
    "a lease is given without a look at rivals",
    "a late answer clears BLOCKED",
    "a commit without a look at who sleeps",
    "rollout is acknowledged without evidence",
    "a retry starts a second operation",
    "activation in a failed batch",
)
"""Those whose safeguard is in `core.lifecycle` or `core.operations`."""
