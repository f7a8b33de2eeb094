"""The wire as it can be: messages are lost, doubled, late and out of order, never changed.

Bodies go through the real codec, so that nobody shares a value with somebody else. The coordinator's end looks like
`wire.server.ControlServer`, the sidecar's like `wire.client.SidecarLink`, and a client is the real `ControlClient`
with its one socket call replaced.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from relax_slurm.errors import ProtocolError
from relax_slurm.wire.client import ControlClient
from relax_slurm.wire.codec import pack, unpack
from relax_slurm.wire.messages import PeerKind, Reply, parse_reply
from relax_slurm.wire.server import Incoming, WireCounters
from tests.chaos.story import Story
from tests.chaos.weather import CALM, Weather

Deliver = Callable[[dict[str, Any]], None]
QUIET = frozenset({"beat", "beat_ack"})


class Path:
    """One direction between two peers, with chances of its own."""

    def __init__(self, network: Network, name: str) -> None:
        self._network, self._name = network, name
        self._rng = random.Random(f"{network.seed}/{name}")

    def carry(self, body: dict[str, Any], deliver: Deliver) -> None:
        """Send a body on its way."""
        network, rng, data = self._network, self._rng, pack(body)
        weather = network.weather
        chance = rng.random()
        if chance < weather.drop:
            network.told(self._name, body, "is lost")
            return
        times = 2 if chance < weather.drop + weather.double else 1
        if times == 2:
            network.told(self._name, body, "comes twice")
        for _ in range(times):
            delay = rng.uniform(0.0005, 0.01)
            if rng.random() < weather.far:
                delay = rng.uniform(0.01, weather.far_seconds)
            asyncio.get_running_loop().call_later(delay, self._arrive, data, deliver)

    def _arrive(self, data: bytes, deliver: Deliver) -> None:
        body = unpack(data)
        if body["kind"] not in QUIET:
            self._network.told(self._name, body, "arrives")
        deliver(body)


class Network:
    """Everything between processes."""

    def __init__(self, seed: str, story: Story) -> None:
        self.seed, self.story = seed, story
        self.weather: Weather = CALM
        self.counters = WireCounters()
        self._inbox: asyncio.Queue[Incoming] = asyncio.Queue()
        self._peers: dict[bytes, tuple[Path, Deliver]] = {}
        self._addresses = 0

    def told(self, name: str, body: dict[str, Any], what: str) -> None:
        """One step of the story about a message."""
        self.story.tell("wire", "%s: %s %s", name, Words(body), what)

    # --- the coordinator's end: as a ControlServer --------------------------------------------------------------

    async def receive(self) -> Incoming:
        """The next message."""
        return await self._inbox.get()

    async def send(self, identity: bytes, body: dict[str, Any]) -> bool:
        """Send to whoever has this address; False when nobody has."""
        peer = self._peers.get(identity)
        if peer is None:
            return False
        path, deliver = peer
        path.carry(body, deliver)
        return True

    async def publish(self, topic: str, body: dict[str, Any]) -> None:
        """Nobody subscribes here: what is published is looked at where it is published."""

    # --- the others' end ------------------------------------------------------------------------------------------

    def address(self, back: Path, deliver: Deliver) -> bytes:
        """A new address that the coordinator can answer to."""
        self._addresses += 1
        identity = b"peer-%d" % self._addresses
        self._peers[identity] = (back, deliver)
        return identity

    def forget(self, identity: bytes) -> None:
        """Nobody listens there any more."""
        self._peers.pop(identity, None)

    def to_coordinator(self, identity: bytes, peer: PeerKind) -> Deliver:
        """What puts a body into the coordinator's inbox."""
        return lambda body: self._inbox.put_nowait(Incoming(identity, peer, body))


class SimLink:
    """A sidecar's connection. While it is `cut` nothing passes, and nobody is told."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._out, self._back = Path(network, f"{name} to head"), Path(network, f"head to {name}")
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.dead = self.cut = False
        self.identity = network.address(self._back, self._arrives)

    async def send(self, body: dict[str, Any]) -> bool:
        """As SidecarLink's."""
        if self.dead:
            return False
        if self.cut:
            return True  # nobody notices at once
        self._out.carry(body, self._network.to_coordinator(self.identity, PeerKind.SIDECAR))
        return True

    async def receive(self) -> dict[str, Any]:
        """As SidecarLink's."""
        return await self._incoming.get()

    def reconnect(self) -> None:
        """Another address for the same process."""
        self._network.forget(self.identity)
        self.identity = self._network.address(self._back, self._arrives)

    def _arrives(self, body: dict[str, Any]) -> None:
        if not self.cut:
            self._incoming.put_nowait(body)

    def close(self) -> None:
        """The process is gone: nothing leaves and nothing arrives."""
        self.dead = True
        self._network.forget(self.identity)


class SimClient(ControlClient):
    """The real client on the simulated wire: a new address for every try, as it takes a new socket."""

    def __init__(self, network: Network, name: str, *, attempt_seconds: float) -> None:
        self.address, self._attempt_seconds = "simulated", attempt_seconds
        self._network, self._name, self._ids = network, name, 0
        self._out, self._back = Path(network, f"{name} to head"), Path(network, f"head to {name}")

    def _new_id(self) -> str:
        self._ids += 1
        return f"{self._name}-{self._ids}"

    async def _ask_once(self, body: dict[str, Any], seconds: float) -> Reply | None:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()

        def deliver(reply: dict[str, Any]) -> None:
            if not answer.done():
                answer.set_result(reply)

        identity = self._network.address(self._back, deliver)
        try:
            self._out.carry(body, self._network.to_coordinator(identity, PeerKind.CLIENT))
            async with asyncio.timeout(seconds):
                reply = parse_reply(await answer)
            return reply if reply.id == body["id"] else None
        except (TimeoutError, ProtocolError):
            return None
        finally:
            self._network.forget(identity)

    def close(self) -> None:
        """Nothing is open."""


class Words:
    """A message in a few words, found when somebody reads."""

    __slots__ = ("_body",)

    def __init__(self, body: dict[str, Any]) -> None:
        self._body = body

    def __str__(self) -> str:
        return words(self._body)


def words(body: dict[str, Any]) -> str:
    """A message in a few words."""
    kind = body["kind"]
    if kind == "command":
        args = body["args"]
        return f"{body['method']} {args.get('worker_id', '')} g{args.get('generation', '')} [{body['id']}]"
    if kind in ("result", "reply"):
        error = body.get("error")
        end = "ok" if body["ok"] else f"{error['code']}: {error['message']}"
        return f"{kind} of [{body['id']}] {end}"
    if kind == "event":
        return f"event {body['event']} of {body['worker']['worker_id']}"
    rest = [str(body[key]) for key in ("batch", "holder", "role", "method", "node", "proof", "code") if body.get(key)]
    return " ".join([kind, *rest, f"[{body['id']}]" if "id" in body else ""]).strip()
