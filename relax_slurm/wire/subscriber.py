"""Discovery by subscription: the sockets around `core.registry.SubscriberState` (docs/protocol.md, Discovery).

Used by the gateway, by direct clients and by monitors. One task reads; `current()` is a plain attribute look-up, so
asking for the view costs nothing per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import zmq
import zmq.asyncio

from relax_slurm.core.discovery import from_json
from relax_slurm.core.plan import Role
from relax_slurm.core.snapshot import RoleSnapshot
from relax_slurm.core.subscription import Action, SubscriberState
from relax_slurm.core.update import update_from_json
from relax_slurm.errors import RelaxError
from relax_slurm.wire.client import ControlClient, curve_client
from relax_slurm.wire.codec import from_topic_frames
from relax_slurm.wire.keys import Credentials
from relax_slurm.wire.messages import Heartbeat, parse_discovery
from relax_slurm.wire.server import DISCOVERY_HIGH_WATER

log = logging.getLogger(__name__)


class DiscoverySubscriber:
    """Keeps one view per role equal to the coordinator's, or says that it cannot.

    `start()` and `close()` belong to one event loop. `current(role)` is None when there is no view within the staleness
    bound.
    """

    def __init__(
        self,
        control_address: str,
        discovery_address: str,
        credentials: Credentials,
        roles: Iterable[Role],
        *,
        staleness_seconds: float = 10.0,
    ) -> None:
        self.states = {role: SubscriberState(role, staleness_seconds=staleness_seconds) for role in roles}
        self.run_state = ""
        self.garbage = 0
        self._client = ControlClient(control_address, credentials, attempt_seconds=2.0)
        self._address = discovery_address
        self._credentials = credentials
        self._context = zmq.asyncio.Context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: set[Role] = set()
        self._changed = asyncio.Event()

    def start(self) -> None:
        """Subscribe first, then ask for snapshots, so that no update can fall between."""
        socket = self._context.socket(zmq.SUB)
        curve_client(socket, self._credentials)
        socket.rcvhwm = DISCOVERY_HIGH_WATER
        socket.connect(self._address)
        for role in self.states:
            socket.subscribe(f"snap.{role}")
        socket.subscribe("beat")
        for work in (self._read(socket), self._tick()):
            self._spawn(work)

    def current(self, role: Role) -> RoleSnapshot | None:
        """The role's view, or None while discovery is unavailable."""
        state = self.states.get(role)
        return state.current(time.monotonic()) if state is not None else None

    def invalidate(self, role: Role) -> None:
        """A request timed out or was cancelled: the view is in doubt, ask again."""
        state = self.states.get(role)
        if state is not None:
            self._do(state, state.invalidate(time.monotonic()))

    async def changed(self) -> None:
        """Wait until any view changes."""
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Stop reading and drop the sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        self._context.destroy(linger=0)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            # The views age towards their bound, so nobody routes by what is not followed any more.
            log.error("discovery is not followed any more: a fault of relax-slurm", exc_info=fault)

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                self._take(from_topic_frames(frames)[1])
            except RelaxError:
                self.garbage += 1

    def _take(self, body: dict[str, Any]) -> None:
        message, now = parse_discovery(body), time.monotonic()
        if isinstance(message, Heartbeat):
            self.run_state = message.state
            for state in self.states.values():
                self._do(state, state.on_heartbeat(message.epoch, message.revisions, now))
            return
        update = update_from_json(body)
        watched = self.states.get(update.role)
        if watched is not None:
            self._do(watched, watched.on_update(update, now))

    async def _tick(self) -> None:
        while True:
            for state in self.states.values():
                self._do(state, state.on_time(time.monotonic()))
            await asyncio.sleep(0.5)

    def _do(self, state: SubscriberState, action: Action) -> None:
        if action is Action.APPLIED:
            self._changed.set()
        elif action is Action.RESYNC and state.role not in self._asking:
            self._asking.add(state.role)
            self._spawn(self._ask(state))

    async def _ask(self, state: SubscriberState) -> None:
        snapshot: RoleSnapshot | None = None
        # A failed question is asked again by `_tick`; until then the view ages towards its bound.
        with contextlib.suppress(RelaxError):
            answer = await self._client.request("get_snapshot", role=str(state.role), timeout_seconds=4.0)
            snapshot = from_json(answer.get("snapshot"))
        self._asking.discard(state.role)  # before the snapshot is taken, because that may ask again
        if snapshot is not None:
            self._do(state, state.on_snapshot(snapshot, time.monotonic()))
