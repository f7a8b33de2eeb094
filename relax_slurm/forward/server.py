"""The HTTP/1.1 server: listening, counting, stopping. Connections do the work (`connection.py`)."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass

from relax_slurm.forward.clock import DeadlineClock
from relax_slurm.forward.connection import Connection
from relax_slurm.forward.exchange import Handler
from relax_slurm.forward.http import Limits
from relax_slurm.forward.reader import Admit, Budget


@dataclass(slots=True)
class Counters:
    """What a server has seen since it started."""

    connections: int = 0
    """Accepted, in total."""
    refused: int = 0
    """Accepted over the limit and answered 503."""
    requests: int = 0
    """Handed to the handler."""
    bad_requests: int = 0
    """Refused by the parser, a limit or the admission."""
    timeouts: int = 0
    """Answered 408."""
    aborted: int = 0
    """Clients that left before their answer was complete."""
    cut: int = 0
    """Answers that the server broke off."""


class HttpServer:
    """Serves `handler` on one listening socket, on the loop that `start` runs in. Works on asyncio and on uvloop.

    `admit` sees the head of each request with a body before the body is read, and may refuse it (`reader.Admit`).
    """

    loop: asyncio.AbstractEventLoop
    clock: DeadlineClock

    def __init__(self, handler: Handler, limits: Limits | None = None, admit: Admit | None = None) -> None:
        self.handler = handler
        self.admit = admit
        self.budget = Budget()
        self.limits = limits or Limits()
        self.counters = Counters()
        self.stopping = False
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._empty: asyncio.Event | None = None

    @property
    def open_connections(self) -> int:
        """Client connections that are open now."""
        return len(self._connections)

    async def start(self, host: str = "127.0.0.1", port: int = 0, sock: socket.socket | None = None) -> int:
        """Listen on `host:port` (0 picks one) or on a bound socket; the port. OSError when it cannot be had."""
        self.loop = asyncio.get_running_loop()
        self.clock = DeadlineClock(self.loop)
        self.stopping = False
        self._empty = asyncio.Event()
        backlog = self.limits.backlog
        if sock is not None:
            self._listener = await self.loop.create_server(lambda: Connection(self), sock=sock, backlog=backlog)
        else:
            self._listener = await self.loop.create_server(lambda: Connection(self), host, port, backlog=backlog)
        return int(self._listener.sockets[0].getsockname()[1])

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Stop listening, close idle connections, give running answers `grace_seconds`, then cut what is left."""
        if self._listener is None:
            return
        self.stopping = True
        listener, self._listener = self._listener, None
        listener.close()
        for connection in list(self._connections):
            connection.drain()
        if not await self._drained(grace_seconds):
            for connection in list(self._connections):
                connection.abort()
            await self._drained(1.0)
        self.clock.close()

    async def _drained(self, seconds: float) -> bool:
        assert self._empty is not None
        if self._connections:
            self._empty.clear()
            try:
                async with asyncio.timeout(seconds):
                    await self._empty.wait()
            except TimeoutError:
                return False
        return True

    @property
    def buffered_bytes(self) -> int:
        """Request-body bytes held now: being read, waiting for their turn or being answered."""
        return self.budget.held

    # the connections' side

    def opened(self, connection: Connection) -> bool:
        """Count a new connection; False when it is one too many."""
        self.counters.connections += 1
        self._connections.add(connection)
        self.clock.watch(connection)
        if len(self._connections) > self.limits.max_connections:
            self.counters.refused += 1
            return False
        return True

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        self._connections.discard(connection)
        self.clock.forget(connection)
        if not self._connections and self._empty is not None:
            self._empty.set()
