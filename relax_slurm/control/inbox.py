"""What arrives on the control socket: checked, given to the coordinator, and answered (docs/protocol.md)."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from relax_slurm.control.refusals import Fault, TooManyWaiting
from relax_slurm.control.state_document import state_document
from relax_slurm.errors import RelaxError
from relax_slurm.wire.lifecycle_messages import LifecycleAsk, WaitCommitted
from relax_slurm.wire.messages import (
    Beat,
    FromSidecar,
    GatewayUp,
    GetSnapshot,
    GetState,
    Hello,
    IdReused,
    MoveRole,
    PeerKind,
    Request,
    Result,
    StepEnded,
    Stop,
    parse_for_coordinator,
)
from relax_slurm.wire.messages import Event as WorkerEvent
from relax_slurm.wire.server import Incoming
from relax_slurm.wire.weight_messages import GetWeights, UpdateWeights, WeightsGroup

if TYPE_CHECKING:
    from relax_slurm.control.coordinator import Coordinator

log = logging.getLogger(__name__)
KEPT_ANSWERS = 1024
"""How many answers to requests that change something are kept for a client that asks again under the same id."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A request that changed something, as its own fingerprint, and what was answered."""

    request: Request
    result: dict[str, Any]


MAX_WAITING = 4096
"""How many clients may wait for the end of an operation or of a batch; at most half of them for a batch."""


class Inbox:
    """Reads one message after the other; what one of them does is complete before the next is looked at."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._of = coordinator
        self._server = coordinator.server
        self._answers: OrderedDict[str, Answered] = OrderedDict()
        self._waiting: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled. No message ends it."""
        while True:
            incoming = await self._server.receive()
            try:
                await self._handle(incoming)
            except RelaxError as error:
                await self._refuse(incoming, error)
            except Exception as error:  # the edge to other processes: no message may end the run
                log.error("message %s was not handled", incoming.body.get("kind"), exc_info=error)
                self._server.counters.faults += 1
                await self._refuse(incoming, Fault(f"{type(error).__name__}: {error}; see the coordinator's log"))

    async def _refuse(self, incoming: Incoming, error: RelaxError) -> None:
        operation = incoming.body.get("id")
        if incoming.peer is PeerKind.CLIENT:
            body = self._reply(operation if isinstance(operation, str) else "", error=error)
        else:
            body = {"kind": "refused", "code": error.code, "message": error.message, "epoch": self._of.epoch}
        await self._server.send(incoming.identity, body)

    def _reply(
        self, operation: str, result: dict[str, Any] | None = None, error: RelaxError | None = None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"kind": "reply", "id": operation, "epoch": self._of.epoch, "ok": error is None}
        if error is None:
            return body | {"result": result or {}}
        return body | {"error": {"code": error.code, "message": error.message}}

    async def _handle(self, incoming: Incoming) -> None:
        message = parse_for_coordinator(incoming.body, incoming.peer)
        if isinstance(message, Hello | Beat | WorkerEvent | Result):
            await self._from_sidecar(incoming.identity, message)
            return
        if isinstance(message, LifecycleAsk | WaitCommitted):
            self._answer_later(incoming.identity, message)
            return
        known = self._answers.get(message.id)
        if known is not None and known.request != message:
            raise IdReused(f"id {message.id} was {known.request.kind}, now it is {message.kind} or other arguments")
        if known is None and isinstance(message, UpdateWeights | WeightsGroup | GetWeights):
            # Has a memory of its own, because what these carry may be large.
            await self._server.send(incoming.identity, self._reply(message.id, self._of.weights.answer(message)))
            return
        result = self._answer(message) if known is None else known.result
        await self._server.send(incoming.identity, self._reply(message.id, result))

    def _answer_later(self, identity: bytes, message: LifecycleAsk | WaitCommitted) -> None:
        """Change what is to be changed now, and answer when it has come to its end. Nobody else waits for that."""
        leases = self._of.leases
        # A place for the answer comes first: what is refused must not have been done. Waits leave half of them free.
        room = MAX_WAITING // 2 if isinstance(message, WaitCommitted) else MAX_WAITING
        if message.id not in self._waiting and len(self._waiting) >= room:
            raise TooManyWaiting(f"{message.kind}: {room} clients wait for an answer already; ask later")
        if isinstance(message, WaitCommitted):
            wait = partial(leases.committed, message.batch, message.seconds)
        else:
            wait = partial(leases.result, self._of.on_lifecycle(message))
        before = self._waiting.pop(message.id, None)
        if before is not None:
            before.cancel()  # who asks again has given up the connection it asked on before
        task = self._waiting[message.id] = self._of.spawn(self._await_and_answer(identity, message.id, wait))
        task.add_done_callback(lambda _: self._waited(message.id, task))

    def _waited(self, operation: str, task: asyncio.Task[None]) -> None:
        if self._waiting.get(operation) is task:
            del self._waiting[operation]

    async def _await_and_answer(
        self, identity: bytes, operation: str, wait: Callable[[], Awaitable[dict[str, Any]]]
    ) -> None:
        try:
            body = self._reply(operation, await wait())
        except RelaxError as error:
            body = self._reply(operation, error=error)
        await self._server.send(identity, body)

    async def _from_sidecar(self, identity: bytes, message: FromSidecar) -> None:
        if isinstance(message, Hello):
            await self._of.on_hello(identity, message)
            return
        link = self._of.current(message.node, message.incarnation, message.epoch)
        # Its address is that of its last message: after a new connection it is another one.
        await self._of.links.follow(link, identity)
        match message:
            case Beat():
                ack = {"kind": "beat_ack", "epoch": self._of.epoch, "seq": message.seq}
                await self._server.send(identity, ack)
                self._of.on_beat(link, message)
            case WorkerEvent():
                self._of.on_event(link, message)
            case Result():
                self._of.on_result(link, message)

    def _answer(self, message: Request) -> dict[str, Any]:
        of = self._of
        match message:
            case GetSnapshot():
                return {"snapshot": of.publisher.snapshot(message.role)}
            case GetState():
                return state_document(of)
            case StepEnded():
                result = of.on_step_ended(message)
            case GatewayUp():
                of.on_gateway(message.url)
                result = {"epoch": of.epoch}
            case MoveRole():
                result = of.on_move(message)
            case Stop():
                of.on_stop(message)
                result = {"state": of.run.state}
            case _:
                return {"epoch": of.epoch, "state": of.run.state}
        self._answers[message.id] = Answered(message, result)
        if len(self._answers) > KEPT_ANSWERS:
            self._answers.popitem(last=False)
        return result
