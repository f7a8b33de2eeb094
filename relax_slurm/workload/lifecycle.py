"""What a workload asks of the run's coordinator: turns on shared GPUs and the commit gate.

`relax_slurm.client.lifecycle` satisfies it over ZeroMQ. Every call carries an operation id of its own and repeats
itself safely; every refusal is a `RelaxError`. Where roles share no GPUs the same calls are no-ops, so that a workload
is written once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from relax_slurm.core.plan import Role

T = TypeVar("T")


class Lifecycle(Protocol):
    """One run's coordinator, from a workload's or a trainer's side."""

    async def begin_batch(self, batch: int) -> None:
        """Open a batch; returns when rollout is READY, its lease ACTIVE."""

    async def offload_rollout(self, batch: int) -> None:
        """Take rollout off its GPUs; returns when every replica is confirmed SLEEPING, else raises."""

    async def onload_rollout(self, batch: int) -> None:
        """Bring rollout back for student scoring, after `begin_student_scoring`."""

    async def acknowledge_rollout_offloaded(self, batch: int) -> None:
        """Say that rollout has left; only after a confirmed release."""

    async def activate(self, role: Role, batch: int) -> None:
        """Give genrm or teacher its GPUs; returns when it is READY."""

    async def deactivate(self, role: Role, batch: int) -> None:
        """Take genrm or teacher off its GPUs; returns when that is confirmed, else raises."""

    async def begin_student_scoring(self, batch: int) -> None:
        """Give rollout its GPUs again."""

    async def commit_batch(self, batch: int) -> None:
        """Let training have the batch."""

    async def fail_batch(self, batch: int, error: str) -> None:
        """Give the batch up; whoever waits for it gets the error."""

    async def wait_committed(self, batch: int, timeout_seconds: float) -> None:
        """Return when the batch is committed. When it failed, an error with its reason; DeadlineExceeded."""

    async def get_state(self) -> dict[str, Any]:
        """The state document, with `leases` and `batch`."""

    def training(self, batch: int) -> AbstractAsyncContextManager[None]:
        """Training's lease on the shared GPUs, held inside the block."""


async def settled(work: Awaitable[T]) -> tuple[T | None, BaseException | None, bool]:
    """Await what a cancellation of the caller must not cut: a release of GPUs, a commit, the word that a batch failed.

    The result or the error of the work, and whether the caller was cancelled meanwhile; raising it is the caller's
    business. `work` has to be bounded by itself, as calls of `Lifecycle` are.
    """
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if task.cancelled():
        return None, asyncio.CancelledError(), cancelled
    error = task.exception()
    return (None, error, cancelled) if error is not None else (task.result(), None, cancelled)
