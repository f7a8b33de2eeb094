"""Connections to upstreams, kept alive and bounded per origin.

A request is written once. A pooled connection is looked at for an end of file before it is used, and when
it fails all the same, the caller gets UpstreamFailed: repeating a POST could run it twice. Proxy
environment variables are never read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field

from relax_slurm.errors import Unavailable, UpstreamFailed
from relax_slurm.forward.call import Call, Collect, Response
from relax_slurm.forward.clock import DeadlineClock
from relax_slurm.forward.http import Header, render
from relax_slurm.forward.origin import Origin, parse_url, request_line
from relax_slurm.forward.pooled import UpstreamConnection

_LOOK_AFTER_SECONDS = 0.005
"""A connection that rested shorter than this was just read from, so its end of file would have been seen."""

_JOIN_BELOW = 64 * 1024


@dataclass(frozen=True, slots=True)
class UpstreamLimits:
    """Bounds of a pool. Times in seconds."""

    max_connections_per_origin: int = 1024
    """Open connections to one origin; further calls wait for one."""
    max_waiting_per_origin: int = 4096
    """Calls that may wait; one more is refused with Unavailable."""
    idle_seconds: float = 3.0
    """Rest after which a pooled connection is closed. Below the 5 s after which uvicorn (SGLang) closes its side."""
    connect_seconds: float = 5.0
    """TCP (and TLS) connection set-up."""
    max_response_bytes: int = 256 * 1024 * 1024
    """Largest answer that is collected in memory; relayed answers are not bounded."""


@dataclass(slots=True)
class _Pool:
    """Connections of one origin. `open` counts those connecting, busy and idle."""

    origin: Origin

    idle: list[UpstreamConnection] = field(default_factory=list)
    waiting: dict[Call, None] = field(default_factory=dict)
    open: int = 0
    connecting: int = 0


class Upstream:
    """A pool for one event loop (the one that runs at the first request)."""

    def __init__(self, limits: UpstreamLimits | None = None, *, ssl_context: ssl.SSLContext | None = None) -> None:
        self.limits = limits or UpstreamLimits()
        self._ssl = ssl_context
        self._pools: dict[Origin, _Pool] = {}
        self._connections: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._started = False

    loop: asyncio.AbstractEventLoop
    clock: DeadlineClock

    async def request(
        self,
        method: str,
        url: str,
        headers: Iterable[Header] = (),
        body: bytes = b"",
        timeout_seconds: float = 10.0,
    ) -> Response:
        """A small call with the whole answer. UpstreamFailed, DeadlineExceeded or Unavailable when there is
        none.

        `headers` without Host and framing, names in lowercase. Cancelling the caller closes the connection.
        """
        origin, first = request_line(method, url)
        payload = make_payload(method, first, render(headers), body)
        call = Collect(
            self,
            origin,
            payload,
            head_only=method == "HEAD",
            max_bytes=self.limits.max_response_bytes,
        )
        self.submit(call, timeout_seconds)
        try:
            return await call.future
        finally:
            call.cancel()

    def submit(self, call: Call, timeout_seconds: float) -> None:
        """Send `call` on a pooled or new connection, now or when one is free; its deadline starts now.

        Unavailable (raised, nothing sent) when too many calls wait for the origin or the pool was closed.
        """
        if not self._started:
            self._begin()
        pool = self._pools.get(call.origin)
        if pool is None:
            pool = self._pools[call.origin] = _Pool(call.origin)
        now = self.loop.time()
        idle = pool.idle
        while idle:
            connection = idle.pop()
            rested = now - connection.idle_since
            if rested < _LOOK_AFTER_SECONDS or (rested < self.limits.idle_seconds and not connection.is_stale()):
                call.deadline = now + timeout_seconds
                self.clock.watch(call)
                connection.send(call)
                return
            connection.close()
        if self._closed:
            raise Unavailable(f"{call.origin}: the connection pool is closed; the process is stopping")
        if len(pool.waiting) >= self.limits.max_waiting_per_origin:
            raise Unavailable(f"{call.origin}: {len(pool.waiting)} requests wait for a connection, which is the limit")
        call.deadline = now + timeout_seconds
        self.clock.watch(call)
        pool.waiting[call] = None
        self._open_for_waiting(pool)

    async def close(self) -> None:
        """Close every connection; running calls fail with UpstreamFailed. The pool takes no more calls."""
        self._closed = True
        if not self._started:
            return
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for task in list(self._connecting):
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for pool in self._pools.values():
            for call in list(pool.waiting):
                call.fail(UpstreamFailed(f"{call.origin}: the connection pool was closed"))
            pool.idle.clear()
        for connection in list(self._connections):
            if connection.call is not None:
                connection.call.fail(UpstreamFailed(f"{connection.origin}: the connection pool was closed"))
            connection.close()
        self.clock.close()

    def counts(self, url: str) -> dict[str, int]:
        """`open`, `idle` and `waiting` of the origin of `url`."""
        origin = parse_url(url)[0]
        pool = self._pools.get(origin) or _Pool(origin)
        return {"open": pool.open, "idle": len(pool.idle), "waiting": len(pool.waiting)}

    # the calls' and connections' side

    def drop(self, call: Call) -> None:
        """Forget a call: close the connection that carries it, or take it out of the queue."""
        if not self._started:
            return
        self.clock.forget(call)
        connection = call.connection
        if connection is not None:
            call.connection = None
            connection.close()
        elif (pool := self._pools.get(call.origin)) is not None:
            pool.waiting.pop(call, None)

    def release(self, connection: UpstreamConnection, call: Call, *, clean: bool) -> None:
        """A call is over: its connection goes to the next one that waits, to rest, or away."""
        self.clock.forget(call)
        if not clean or self._closed or connection.transport is None or connection.transport.is_closing():
            connection.close()
            return
        if connection.paused:
            connection.paused = False
            connection.transport.resume_reading()
        self._offer(self._pools[connection.origin], connection)

    def lost(self, connection: UpstreamConnection) -> None:
        """A connection is gone; somebody who waits may open another."""
        self._connections.discard(connection)
        pool = self._pools[connection.origin]
        pool.open -= 1
        if connection in pool.idle:
            pool.idle.remove(connection)
        self._open_for_waiting(pool)

    def _offer(self, pool: _Pool, connection: UpstreamConnection) -> None:
        if pool.waiting:
            call = next(iter(pool.waiting))
            del pool.waiting[call]
            connection.send(call)
            return
        connection.idle_since = self.loop.time()
        pool.idle.append(connection)
        if self._sweeper is None:
            self._sweeper = self.loop.call_later(self.limits.idle_seconds, self._sweep)

    def _open_for_waiting(self, pool: _Pool) -> None:
        """Start a connection for a call that has none coming. A call that is served earlier leaves it to the pool."""
        if (
            not self._closed
            and len(pool.waiting) > pool.connecting
            and pool.open < self.limits.max_connections_per_origin
        ):
            pool.open += 1
            pool.connecting += 1
            task = self.loop.create_task(self._connect(pool))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, pool: _Pool) -> None:
        """Open one connection; the call that has waited longest learns of a failure."""
        origin = pool.origin
        connected = False
        try:
            async with asyncio.timeout(self.limits.connect_seconds):
                _, connection = await self.loop.create_connection(
                    lambda: UpstreamConnection(self, origin),
                    origin.host,
                    origin.port,
                    ssl=self._tls() if origin.secure else None,
                )
            connected = True
        except TimeoutError:
            reason = f"no connection within {self.limits.connect_seconds:g} s"
        except (OSError, ssl.SSLError) as error:
            reason = f"cannot connect ({error})"
        finally:
            pool.connecting -= 1
            if not connected:
                pool.open -= 1
        if not connected:
            if pool.waiting:
                next(iter(pool.waiting)).fail(UpstreamFailed(f"{origin}: {reason}; is the server up?"))
            self._open_for_waiting(pool)
            return
        if connection.transport is not None:  # else it closed in the meantime and was counted as lost
            self._connections.add(connection)
            self._offer(pool, connection)

    def _tls(self) -> ssl.SSLContext:
        if self._ssl is None:
            self._ssl = ssl.create_default_context()
        return self._ssl

    def _begin(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = DeadlineClock(self.loop)
        self._started = True

    def _sweep(self) -> None:
        """Close connections that rested too long; run again while any rest."""
        self._sweeper = None
        oldest = self.loop.time() - self.limits.idle_seconds
        resting = False
        for pool in self._pools.values():
            old = [connection for connection in pool.idle if connection.idle_since <= oldest]
            if old:
                pool.idle = [connection for connection in pool.idle if connection.idle_since > oldest]
                for connection in old:
                    connection.close()
            resting = resting or bool(pool.idle)
        for origin in [o for o, pool in self._pools.items() if not (pool.open or pool.waiting)]:
            del self._pools[origin]
        if resting:
            self._sweeper = self.loop.call_later(self.limits.idle_seconds / 2, self._sweep)


def make_payload(method: str, first: bytes, block: bytes, body: bytes) -> list[bytes]:
    """A request's bytes: `first` (request and Host line), the rendered headers, framing, and the body."""
    if body or method in ("POST", "PUT", "PATCH"):
        head = b"%b%bcontent-length: %d\r\n\r\n" % (first, block, len(body))
    else:
        head = b"%b%b\r\n" % (first, block)
    if len(body) < _JOIN_BELOW:
        return [head + body]
    return [head, body]
