"""The coordinator's view of its sidecars: who is connected, when it was last heard, and which commands are in flight.

One `NodeLink` per node of the plan. A command is sent, sent again under the same id while no result came, and ends with
the sidecar's result, the deadline, or the end of the node's step; the sidecar makes repetition harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.errors import RecoveryRequired, RelaxError
from relax_slurm.wire.messages import Method, Result, WorkerStatus

Send = Callable[[bytes, dict[str, Any]], Awaitable[bool]]
RESEND_SECONDS = 2.0


class CommandFailed(RelaxError):
    """A sidecar carried a command out and says that it failed; `code` is the sidecar's name for it."""

    code = "command_failed"

    def __init__(self, message: str, remote_code: str) -> None:
        super().__init__(message)
        self.remote_code = remote_code


class CommandUnanswered(RecoveryRequired):
    """No result within the deadline: what the sidecar did is unknown, so the GPU stays fenced."""

    code = "command_unanswered"


class NodeGone(RelaxError):
    """The node's step ended while the command was in flight."""

    code = "node_gone"


@dataclass(slots=True)
class NodeLink:
    """One planned node."""

    name: str
    identity: bytes | None = None
    incarnation: str = ""
    last_heard: float = 0.0
    report: dict[str, Any] | None = None
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    silent: bool = False
    step_ended: str | None = None
    """How the node's step ended, when it did and no new one has reported: a sentence."""
    lost: bool = False
    """The step ended and will not be started again: nobody will ever answer."""

    def heard(self, now: float) -> None:
        """Something well-formed of the current incarnation arrived."""
        self.last_heard = now
        self.silent = False


@dataclass(slots=True)
class _Pending:
    link: NodeLink
    result: asyncio.Future[Result]


class NodeLinks:
    """All planned nodes and the commands in flight to them."""

    def __init__(self, nodes: Iterable[str], epoch: str, send: Send, clock: Callable[[], float]) -> None:
        self.nodes = {name: NodeLink(name) for name in nodes}
        self._epoch = epoch
        self._send = send
        self._clock = clock
        self._pending: dict[str, _Pending] = {}

    def owner_of(self, node: str, incarnation: str) -> NodeLink | None:
        """The link, when this incarnation is the current one."""
        link = self.nodes.get(node)
        return link if link is not None and link.incarnation == incarnation else None

    def resolve(self, result: Result) -> None:
        """Hand a result to whoever waits for it; a late or unknown one is dropped."""
        pending = self._pending.get(result.id)
        if pending is not None and not pending.result.done():
            pending.result.set_result(result)

    def fail_pending(self, link: NodeLink, error: Exception) -> None:
        """The node's step ended: nobody will answer any more."""
        for pending in self._pending.values():
            if pending.link is link and not pending.result.done():
                pending.result.set_exception(error)

    async def command(
        self, node: str, method: Method, args: dict[str, Any], *, operation_id: str, timeout_seconds: float
    ) -> dict[str, Any]:
        """Carry out one command on one node and answer its value.

        Raises `CommandFailed` (the sidecar says no), `NodeGone`, or `CommandUnanswered` after `timeout_seconds`.
        """
        link = self.nodes[node]
        if link.lost:
            raise NodeGone(f"{method} on {node}: {link.step_ended}")
        body = {"kind": "command", "id": operation_id, "epoch": self._epoch, "method": str(method), "args": args}
        pending = _Pending(link, asyncio.get_running_loop().create_future())
        self._pending[operation_id] = pending
        deadline = self._clock() + timeout_seconds
        try:
            while True:
                if link.identity is not None:
                    await self._send(link.identity, body)
                left = deadline - self._clock()
                if left <= 0:
                    raise CommandUnanswered(
                        f"{method} on {node} got no result within {timeout_seconds:g} s; its GPUs stay fenced "
                        f"until there is evidence of release"
                    )
                done, _ = await asyncio.wait({pending.result}, timeout=min(RESEND_SECONDS, left))
                if done:
                    return _value(method, node, pending.result.result())
        finally:
            del self._pending[operation_id]


def _value(method: Method, node: str, result: Result) -> dict[str, Any]:
    if result.ok:
        return result.value
    error = result.error or {}
    message = str(error.get("message", "no reason given"))
    raise CommandFailed(f"{method} on {node}: {message}", str(error.get("code", "internal")))
