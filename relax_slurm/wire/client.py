"""Asking the coordinator: one REQ socket per question in flight, thrown away when it times out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import zmq
import zmq.asyncio

from relax_slurm.errors import ProtocolError, RelaxError, Unavailable
from relax_slurm.wire.codec import MAGIC, MAX_FRAME_BYTES, Garbage, from_frames, pack, to_frames, unpack
from relax_slurm.wire.keys import Credentials
from relax_slurm.wire.messages import Reply, parse_reply

AGAIN_SECONDS = 0.05


class RemoteError(RelaxError):
    """The coordinator answered with an error; `remote_code` is its name for it."""

    code = "remote"

    def __init__(self, message: str, remote_code: str) -> None:
        super().__init__(message)
        self.remote_code = remote_code


def curve_client(socket: zmq.asyncio.Socket, credentials: Credentials) -> None:
    """Make a socket a CURVE client of the run, bounded and never lingering."""
    socket.curve_publickey = credentials.own.public
    socket.curve_secretkey = credentials.own.secret
    socket.curve_serverkey = credentials.server_public
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.linger = 0
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)


class ControlClient:
    """Requests to one coordinator address. Belongs to the event loop it is used in."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        attempt_seconds: float = 5.0,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self.address = address
        self._credentials = credentials
        self._attempt_seconds = attempt_seconds
        self._new_id = new_id
        self._context = zmq.asyncio.Context()
        self._idle: list[zmq.asyncio.Socket] = []

    async def request(
        self, kind: str, *, timeout_seconds: float = 10.0, operation_id: str | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask, and ask again under the same id on a new socket until the deadline.

        Raises `RemoteError` for the coordinator's own refusal and `Unavailable` when nobody answered.
        """
        operation = operation_id or self._new_id()
        body = {"kind": kind, "id": operation, **fields}
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Unavailable(
                    f"no answer to {kind!r} from the coordinator at {self.address} within {timeout_seconds:g} s; "
                    f"`relax-slurm status` shows whether the run is alive"
                )
            reply = await self._ask_once(body, min(left, self._attempt_seconds))
            if reply is None:
                # Not every failure takes time, and a wrong answer at once must not become a busy loop.
                await asyncio.sleep(min(AGAIN_SECONDS, left))
                continue
            if reply.ok:
                return reply.result
            error = reply.error or {}
            raise RemoteError(str(error.get("message", "refused")), str(error.get("code", "internal")))

    async def _ask_once(self, body: dict[str, Any], seconds: float) -> Reply | None:
        socket = self._idle.pop() if self._idle else self._connect()
        reusable = False
        try:
            async with asyncio.timeout(seconds):
                # REQ adds the empty delimiter itself.
                await socket.send_multipart([MAGIC, pack(body)])
                frames = await socket.recv_multipart()
            if len(frames) == 2 and frames[0] == MAGIC:
                reply = parse_reply(unpack(frames[1]))
                if reply.id == body["id"]:
                    reusable = True
                    return reply
        except (TimeoutError, zmq.ZMQError, Garbage, ProtocolError):
            return None
        finally:
            if reusable and len(self._idle) < 8:
                self._idle.append(socket)
            else:
                socket.close(linger=0)
        return None

    def _connect(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.REQ)
        curve_client(socket, self._credentials)
        socket.connect(self.address)
        return socket

    def close(self) -> None:
        """Drop every socket."""
        while self._idle:
            self._idle.pop().close(linger=0)
        self._context.destroy(linger=0)

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class SidecarLink:
    """The sidecar's DEALER: sends and receives bodies; libzmq reconnects by itself."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        curve_client(self._socket, credentials)
        self._socket.sndhwm = self._socket.rcvhwm = 1024
        # Nothing is queued for a coordinator that is away: what is said then is stale when it comes back.
        self._socket.immediate = True
        self._socket.connect(address)
        self.garbage = 0

    async def send(self, body: dict[str, Any]) -> bool:
        """Send one body; False when the coordinator is not connected or does not keep up.

        Nothing is lost by that: beats carry the whole state and a command that got no result comes again.
        """
        try:
            await self._socket.send_multipart(to_frames(body), flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    async def receive(self) -> dict[str, Any]:
        """The next body; garbage is counted and skipped."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                return from_frames(frames)
            except Garbage:
                self.garbage += 1

    def close(self, linger_seconds: float = 0.0) -> None:
        """Drop the socket; what was sent gets `linger_seconds` (in which this blocks) to leave."""
        self._context.destroy(linger=int(linger_seconds * 1000))
