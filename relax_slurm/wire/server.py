"""The coordinator's two sockets: ROUTER for control, XPUB for discovery, both CURVE servers with a list of keys."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from relax_slurm.errors import StartupFailed
from relax_slurm.wire.codec import MAX_FRAME_BYTES, Garbage, from_frames, to_frames, to_topic_frames
from relax_slurm.wire.keys import KeyPair
from relax_slurm.wire.messages import PeerKind

CONTROL_HIGH_WATER = 4096
DISCOVERY_HIGH_WATER = 1024
ZAP_DOMAIN = b"relax"


@dataclass(slots=True)
class WireCounters:
    """What arrived that was not a message, and what could not be sent."""

    garbage: int = 0
    denied: int = 0
    undeliverable: int = 0
    faults: int = 0
    """Well-formed messages that a fault of ours kept from being handled."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """One well-formed message with the peer's routing identity and its kind as CURVE proved it."""

    identity: bytes
    peer: PeerKind
    body: dict[str, Any]


@dataclass(slots=True)
class _AllowedKeys:
    """Answers the authenticator: is this public key one of the run's?"""

    kinds: Mapping[bytes, PeerKind]
    counters: WireCounters

    def callback(self, domain: str, key: bytes) -> bool:
        known = key in self.kinds
        if not known:
            self.counters.denied += 1
        return known


@dataclass(slots=True)
class ControlServer:
    """Owns both sockets. Not thread-safe; lives in one event loop."""

    own: KeyPair
    allowed: Mapping[bytes, PeerKind]
    counters: WireCounters = field(default_factory=WireCounters)
    _context: zmq.asyncio.Context = field(default_factory=zmq.asyncio.Context)
    _authenticator: AsyncioAuthenticator | None = None
    _control: zmq.asyncio.Socket | None = None
    _discovery: zmq.asyncio.Socket | None = None

    def bind(self, host: str, ports: Iterable[int]) -> tuple[int, int]:
        """Bind control and discovery to the first two free ports; answers both. `StartupFailed` when there are none."""
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain=ZAP_DOMAIN.decode(), credentials_provider=_AllowedKeys(self.allowed, self.counters)
        )
        self._control = self._socket(zmq.ROUTER, CONTROL_HIGH_WATER)
        self._control.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._discovery = self._socket(zmq.XPUB, DISCOVERY_HIGH_WATER)
        candidates = iter(ports)
        return _bind_first(self._control, host, candidates), _bind_first(self._discovery, host, candidates)

    def _socket(self, kind: int, high_water: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.curve_server = True
        socket.curve_secretkey = self.own.secret
        socket.curve_publickey = self.own.public
        socket.zap_domain = ZAP_DOMAIN
        socket.sndhwm = socket.rcvhwm = high_water
        socket.maxmsgsize = MAX_FRAME_BYTES
        socket.linger = 0
        socket.setsockopt(zmq.HEARTBEAT_IVL, 5_000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 15_000)
        return socket

    async def receive(self) -> Incoming:
        """The next well-formed message; garbage is counted and skipped."""
        assert self._control is not None
        while True:
            frames = await self._control.recv_multipart(copy=False)
            try:
                kind = self.allowed[str(frames[-1].get("User-Id")).encode()]
                return Incoming(frames[0].bytes, kind, from_frames([frame.bytes for frame in frames[1:]]))
            except (Garbage, KeyError, zmq.ZMQError):
                self.counters.garbage += 1

    async def send(self, identity: bytes, body: dict[str, Any]) -> bool:
        """Send to one peer without waiting; False when it is gone or its queue is full."""
        assert self._control is not None
        try:
            await self._control.send_multipart([identity, *to_frames(body)], flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            self.counters.undeliverable += 1
            return False
        return True

    async def publish(self, topic: str, body: dict[str, Any]) -> None:
        """Send to all subscribers of `topic`; slow ones lose messages and resync."""
        assert self._discovery is not None
        await self._discovery.send_multipart(to_topic_frames(topic, body))

    def close(self) -> None:
        """Close both sockets; pending messages are dropped. The last thing that happens in an event loop."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy(linger=0)

    async def aclose(self) -> None:
        """`close`, for a loop that goes on: another server in it must not get a descriptor that is still watched."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
            for _ in range(3):  # the cancelled task, its poll, and the callback that lets go of the descriptor
                await asyncio.sleep(0)
        self.close()


def _bind_first(socket: zmq.asyncio.Socket, host: str, ports: Iterable[int]) -> int:
    tried = 0
    for port in ports:
        tried += 1
        try:
            socket.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise StartupFailed(f"cannot bind {host}:{port}: {error.strerror}") from None
            continue
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
    raise StartupFailed(f"no free port on {host} among the {tried} tried; widen ports.first..ports.last")
