"""Where a direct client gets its routing view from: a subscription, or polling a gateway over HTTP.

Neither asks for anything per request: a view is used until it is older than its bound or put in doubt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from relax_slurm.client.pools import LoopPools
from relax_slurm.core.discovery import RoleSnapshot, SnapshotSource, from_json
from relax_slurm.core.plan import Role
from relax_slurm.errors import RelaxError, Unauthorized, Unavailable
from relax_slurm.forward.http import Header, checked


class Discovery(Protocol):
    """A routing view per role."""

    async def view(self, role: Role, *, newer: bool = False) -> RoleSnapshot:
        """The role's view; with `newer`, one that was not at hand already, if that is possible. Unavailable."""
        ...

    def invalidate(self, role: Role) -> None:
        """The view is in doubt; have it confirmed before long."""
        ...


class SubscribedDiscovery:
    """Views pushed by the coordinator. `source` is a started subscriber of the same event loop.

    `changed` (the subscriber's method of that name) lets the first request wait for the first view.
    """

    def __init__(
        self,
        source: SnapshotSource,
        changed: Callable[[], Awaitable[None]] | None = None,
        *,
        wait_seconds: float = 5.0,
    ) -> None:
        self._source = source
        self._changed = changed
        self._wait_seconds = wait_seconds

    async def view(self, role: Role, *, newer: bool = False) -> RoleSnapshot:
        """Part of Discovery. What is pushed cannot be hurried, so `newer` changes nothing."""
        snapshot = self._source.current(role)
        if snapshot is None and self._changed is not None:
            try:
                async with asyncio.timeout(self._wait_seconds):
                    while snapshot is None:
                        await self._changed()
                        snapshot = self._source.current(role)
            except TimeoutError:
                snapshot = self._source.current(role)
        if snapshot is None:
            raise Unavailable(f"{role}: no view of the registry; the coordinator is silent or has no such role")
        return snapshot

    def invalidate(self, role: Role) -> None:
        """Part of Discovery."""
        self._source.invalidate(role)


class PolledDiscovery:
    """Views fetched from `GATEWAY/ROLE/engines?schema=2` when the held one is too old or in doubt.

    `max_age_seconds` is how long a view is used unasked, `stale_seconds` how long it may stand in while the gateway
    does not answer; while a view is at hand, fetches are `pause_seconds` apart. Works from any event loop.
    """

    def __init__(
        self,
        gateway_url: str,
        token: str | None,
        *,
        max_age_seconds: float = 5.0,
        stale_seconds: float = 10.0,
        pause_seconds: float = 0.25,
        timeout_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fetches = 0
        """Requests sent so far."""
        self._url = gateway_url.rstrip("/")
        headers: list[Header] = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        self._headers = checked(headers)
        self._max_age_seconds = max_age_seconds
        self._stale_seconds = stale_seconds
        self._pause_seconds = pause_seconds
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._pools = LoopPools()
        self._views: dict[Role, tuple[RoleSnapshot, float]] = {}
        self._doubted: set[Role] = set()
        self._tried: dict[Role, float] = {}
        self._running: dict[tuple[int, Role], asyncio.Task[RoleSnapshot]] = {}

    async def view(self, role: Role, *, newer: bool = False) -> RoleSnapshot:
        """Part of Discovery. Callers that need a fetch at the same time share one."""
        held, now = self._views.get(role), self._clock()
        paused = now - self._tried.get(role, float("-inf")) < self._pause_seconds
        if held is not None:
            young = now - held[1] <= self._max_age_seconds and role not in self._doubted
            if (young and not newer) or (paused and now - held[1] <= self._stale_seconds):
                return held[0]
        loop = asyncio.get_running_loop()
        key = (id(loop), role)
        running = self._running.get(key)
        if running is None or running.get_loop() is not loop:
            running = self._running[key] = loop.create_task(self._fetch(role))
            running.add_done_callback(lambda task: self._fetched(key, task))
        try:
            # Shielded: one caller that gives up must not take the answer from the others.
            return await asyncio.shield(running)
        except Unauthorized:
            raise
        except RelaxError:
            self._doubted.add(role)
            if held is not None and self._clock() - held[1] <= self._stale_seconds:
                return held[0]
            raise

    def invalidate(self, role: Role) -> None:
        """Part of Discovery."""
        self._doubted.add(role)

    async def close(self) -> None:
        """End this loop's fetches and close its connection to the gateway."""
        loop = asyncio.get_running_loop()
        mine = [task for task in list(self._running.values()) if task.get_loop() is loop]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        await self._pools.close()

    def _fetched(self, key: tuple[int, Role], task: asyncio.Task[RoleSnapshot]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, even when everybody who waited has left

    async def _fetch(self, role: Role) -> RoleSnapshot:
        self._tried[role] = self._clock()
        self._doubted.discard(role)
        self.fetches += 1
        url = f"{self._url}/{role}/engines?schema=2"
        answer = await self._pools.here().request("GET", url, self._headers, timeout_seconds=self._timeout_seconds)
        if answer.status == 401:
            raise Unauthorized(f"{url} did not accept the token; use the one in the run's token file")
        if answer.status != 200:
            raise Unavailable(f"{url} answered {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}")
        snapshot = from_json(answer.body)
        if snapshot.role is not role:
            raise Unavailable(f"{url} answered with the view of {snapshot.role}")
        self._views[role] = (snapshot, self._clock())
        return snapshot
