"""The coordinator's view of its sidecars: who is connected, when it was last heard, and which commands are in flight.

One `NodeLink` per node of the plan. A command belongs to the sidecar process that it was sent to: it is sent again
under the same id while no result came, and ends with that sidecar's result, with its end, or with the deadline. The
sidecar makes repetition harmless.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.errors import RecoveryRequired, RelaxError
from relax_slurm.wire.messages import Method, Result, WorkerStatus

Send = Callable[[bytes, dict[str, Any]], Awaitable[bool]]
RESEND_SECONDS = (2.0, 30.0)
"""First and longest pause before a command is sent again; a new connection of the sidecar does not wait for it."""
REMEMBERED = 64
"""How many replaced sidecars of a node are known by name."""


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
    """The sidecar that had the command is gone and will not answer."""

    code = "node_gone"


@dataclass(slots=True)
class _Pending:
    body: dict[str, Any]
    result: asyncio.Future[Result]
    asking: asyncio.Task[Any] | None
    """Who waits for the result."""
    sent_to: str = ""
    """Incarnation that has it; empty while nobody was there to send it to."""

    @property
    def withdrawn(self) -> bool:
        """Whether it is not wanted any more. Its task hears that it is cancelled only once the loop comes to it."""
        return self.asking is not None and self.asking.cancelling() > 0


@dataclass(slots=True)
class NodeLink:
    """One planned node."""

    name: str
    identity: bytes | None = None
    """Where its sidecar is reached now; None while there is none."""
    incarnation: str = ""
    former: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Sidecars that are over; whatever still comes from them is refused."""
    last_heard: float = 0.0
    report: dict[str, Any] | None = None
    workers: dict[str, WorkerStatus] = field(default_factory=dict)
    silent: bool = False
    given_up: bool = False
    """Silent for so long that its replicas have failed."""
    step_ended: str | None = None
    """How the node's step ended, when it did and no new one has reported: a sentence."""
    lost: bool = False
    """The step ended and will not be started again: nobody will ever answer."""
    pending: dict[str, _Pending] = field(default_factory=dict)

    def heard(self, now: float) -> None:
        """Something well-formed of the current incarnation arrived."""
        self.last_heard = now
        self.silent = self.given_up = False


class NodeLinks:
    """All planned nodes and the commands in flight to them."""

    def __init__(
        self,
        nodes: Iterable[str],
        epoch: str,
        send: Send,
        clock: Callable[[], float],
        *,
        resend_seconds: tuple[float, float] = RESEND_SECONDS,
    ) -> None:
        self.nodes = {name: NodeLink(name) for name in nodes}
        self._epoch = epoch
        self._send = send
        self._clock = clock
        self._resend_seconds = resend_seconds

    def owner_of(self, node: str, incarnation: str) -> NodeLink | None:
        """The link, when this incarnation is the current one."""
        link = self.nodes.get(node)
        return link if link is not None and link.incarnation == incarnation != "" else None

    async def follow(self, link: NodeLink, identity: bytes) -> None:
        """The sidecar speaks from this address; when it is a new one, what may have got lost is sent again."""
        if link.identity == identity:
            return
        link.identity = identity
        for pending in list(link.pending.values()):
            await self._deliver(link, pending)

    def retire(self, link: NodeLink, reason: str) -> None:
        """The sidecar process is over: it is never listened to again, and the commands that it had end unanswered."""
        if link.incarnation:
            link.former.append(link.incarnation)
        link.incarnation, link.identity, link.workers = "", None, {}
        for pending in link.pending.values():
            if (pending.sent_to or link.lost) and not pending.result.done():
                pending.result.set_exception(NodeGone(f"{pending.body['method']} on {link.name}: {reason}"))

    def resolve(self, link: NodeLink, result: Result) -> None:
        """Hand a result to whoever waits for it; a late or unknown one is dropped."""
        pending = link.pending.get(result.id)
        if pending is not None and not pending.result.done():
            pending.result.set_result(result)

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
        loop = asyncio.get_running_loop()
        pending = link.pending[operation_id] = _Pending(body, loop.create_future(), asyncio.current_task())
        deadline = self._clock() + timeout_seconds
        pause, longest = self._resend_seconds
        try:
            await self._deliver(link, pending)
            while not pending.result.done():
                left = deadline - self._clock()
                if left <= 0:
                    raise CommandUnanswered(
                        f"{method} on {node} got no result within {timeout_seconds:g} s; its GPUs stay fenced "
                        f"until there is evidence of release"
                    )
                done, _ = await asyncio.wait({pending.result}, timeout=min(pause, left))
                if not done and left > pause:
                    await self._deliver(link, pending)
                    pause = min(pause * 2, longest)
            return _value(method, node, pending.result.result())
        finally:
            del link.pending[operation_id]
            if pending.result.done():
                pending.result.exception()  # seen, also when this command was cancelled meanwhile

    async def _deliver(self, link: NodeLink, pending: _Pending) -> None:
        incarnation = link.incarnation
        if link.identity is not None and not pending.withdrawn and await self._send(link.identity, pending.body):
            pending.sent_to = incarnation


def _value(method: Method, node: str, result: Result) -> dict[str, Any]:
    if result.ok:
        return result.value
    error = result.error or {}
    message = str(error.get("message", "no reason given"))
    raise CommandFailed(f"{method} on {node}: {message}", str(error.get("code", "internal")))
