"""Commands of the coordinator made harmless to repeat: one result per id, in order per worker (docs/protocol.md)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from relax_slurm.wire.codec import pack
from relax_slurm.wire.messages import IdReused, Method

KEPT = 1024
URGENT = frozenset({Method.STOP_WORKER, Method.SHUTDOWN})
"""What does not wait for the worker's earlier commands: it makes them fail instead."""

Do = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


@dataclass(slots=True)
class _Operation:
    fingerprint: bytes
    """Digest of method and arguments: those of a weight update may be large, and a thousand are kept."""
    method: str
    outcome: asyncio.Task[dict[str, Any]]


class CommandTable:
    """The last `KEPT` operations by id. Commands of one worker run one after the other, others side by side."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._operations: OrderedDict[str, _Operation] = OrderedDict()
        self._running: dict[str, set[asyncio.Task[dict[str, Any]]]] = {}

    def method_of(self, operation: str) -> str | None:
        """The method that ran under this id, None when it is not known (any more)."""
        known = self._operations.get(operation)
        return None if known is None else known.method

    def begin(self, operation: str, method: str, args: dict[str, Any], do: Do) -> asyncio.Future[dict[str, Any]]:
        """Start the command, or answer the outcome of the same id; it resolves with the value or a `RelaxError`."""
        known = self._operations.get(operation)
        fingerprint = sha256(pack({"method": method, "args": args})).digest()
        if known is not None:
            if known.fingerprint == fingerprint:
                return known.outcome
            refused: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            refused.set_exception(IdReused(f"operation {operation} was {known.method}, now it is {method}"))
            return refused
        worker = str(args.get("worker_id", ""))
        running = self._running.setdefault(worker, set())
        # All of them, not only the last: one that an urgent command overtook may still be at work.
        before = frozenset() if method in URGENT else frozenset(running)
        task = asyncio.get_running_loop().create_task(self._run(method, args, do, before))
        running.add(task)
        task.add_done_callback(lambda task: self._ended(worker, task))
        self._operations[operation] = _Operation(fingerprint, method, task)
        self._forget()
        return task

    async def _run(
        self, method: str, args: dict[str, Any], do: Do, before: frozenset[asyncio.Task[dict[str, Any]]]
    ) -> dict[str, Any]:
        if before:
            await asyncio.wait(before)
        return await do(method, args)

    def _ended(self, worker: str, task: asyncio.Task[dict[str, Any]]) -> None:
        running = self._running[worker]
        running.discard(task)
        if not running:
            del self._running[worker]
        if not task.cancelled():
            task.exception()  # seen: whoever asked gets it, and nobody asking any more is no error
        self._forget()

    def _forget(self) -> None:
        """Drop the oldest results over the limit; what still runs must stay answerable."""
        surplus = len(self._operations) - self._kept
        if surplus > 0:
            over = [name for name, entry in self._operations.items() if entry.outcome.done()]
            for name in over[:surplus]:
                del self._operations[name]
