"""One client connection: requests from the reader, exchanges for the handler, answers in order.

While an exchange runs, later bytes are kept unparsed (and reading pauses when they grow), so a pipelining client costs
no more memory than one that waits. Reading goes on otherwise, because that is how a client's leaving is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING, cast

from relax_slurm.errors import RelaxError, Unavailable
from relax_slurm.forward.clock import NEVER
from relax_slurm.forward.exchange import JSON_LINE, Exchange, Link, Phase, encode_json
from relax_slurm.forward.http import Request, date_line, status_line
from relax_slurm.forward.reader import SLICE_BYTES, Reading, Refusal, RequestReader

if TYPE_CHECKING:
    from relax_slurm.forward.server import HttpServer

_STASH_PAUSE_BYTES = 64 * 1024
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BETWEEN, _ENDED = Reading.BETWEEN, Reading.ENDED  # member access on an enum class is slow
_DONE = Phase.DONE


class Connection(asyncio.Protocol, Link):
    """Server side of one TCP connection."""

    __slots__ = (
        "_eof",
        "_exchange",
        "_held",
        "_lingering",
        "_paused_reading",
        "_pumping",
        "_reader",
        "_server",
        "_stash",
        "_task",
        "_transport",
        "_waited",
        "deadline",
    )

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._reader = RequestReader(server.limits, server.admit, server.budget)
        self._transport: asyncio.Transport | None = None
        self._stash: list[bytes] = []
        self._exchange: Exchange | None = None
        self._held = 0  # bytes of the running request's body
        self._task: asyncio.Task[None] | None = None
        self._pumping = False
        self._paused_reading = False
        self.writable = True
        self.ending = server.stopping
        self._eof = False
        self._lingering = False
        self._waited: Reading | None = None
        self.deadline = NEVER

    # transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection; refuse it when the server is full."""
        # uvloop's transports have the interface but not the base class
        self._transport = cast(asyncio.Transport, transport)
        server = self._server
        self._transport.set_write_buffer_limits(high=server.limits.write_high_water)
        self.deadline = server.loop.time() + server.limits.head_seconds
        if not server.opened(self):
            limit = server.limits.max_connections
            self._end_with(503, Unavailable(f"connections: {limit} are open, which is the limit; try again"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running exchange that its client is gone."""
        self._transport = None
        self._reader.close()
        self._reader.drop_ready()
        self._stash.clear()
        exchange, self._exchange = self._exchange, None
        self._server.budget.held -= self._held
        self._held = 0
        if exchange is not None:
            if exchange.phase is not _DONE:
                self._server.counters.aborted += 1
            exchange.client_left()
            exchange.client_drained()
        self._server.closed(self)

    def data_received(self, data: bytes) -> None:
        """Parse, or keep for later while an exchange runs."""
        reader = self._reader
        if self._exchange is not None or reader.ready or self._stash:
            self._keep(data)
        elif len(data) <= SLICE_BYTES:
            before = reader.reading
            reader.feed(data)
            if reader.ready or reader.refusal is not None:
                self._pump()
            elif reader.reading is not before or reader.expects:
                self._wait()
        elif reader.reading is not _ENDED:
            self._stash.append(data)
            self._pump()

    def eof_received(self) -> bool:
        """The client sent everything it will. Answers that are under way may still be written."""
        self._eof = True
        if self._exchange is not None:
            self._exchange.client_left()
        return self._exchange is not None or bool(self._reader.ready) or bool(self._stash)

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self.writable = False
        self._wait()

    def resume_writing(self) -> None:
        """The client caught up."""
        self.writable = True
        if self._exchange is not None:
            self.deadline = NEVER
            self._exchange.client_drained()
        else:
            self._wait()
            self._pump()

    # running exchanges

    def _keep(self, data: bytes) -> None:
        if self._reader.reading is _ENDED:
            return
        self._stash.append(data)
        if not self._paused_reading and sum(map(len, self._stash)) > _STASH_PAUSE_BYTES:
            self._paused_reading = True
            if self._transport is not None:
                self._transport.pause_reading()

    def _pump(self) -> None:
        """Run ready requests one after the other, then parse what was kept, until something has to be waited for."""
        if self._pumping:
            return
        self._pumping = True
        reader = self._reader
        try:
            while self._exchange is None and self.writable and self._transport is not None:
                if reader.ready:
                    self._run(reader.ready.popleft())
                elif reader.refusal is not None:
                    self._refuse(reader.refusal)
                elif self._stash and not self._lingering:
                    self._feed_stash()
                else:
                    break
        finally:
            self._pumping = False
        if self._exchange is None and self.writable and self._transport is not None and not self._lingering:
            if self._eof or reader.reading is _ENDED:
                self._close()
                return
            if self._paused_reading:
                self._paused_reading = False
                self._transport.resume_reading()
            self._wait()

    def _feed_stash(self) -> None:
        data = self._stash[0]
        if len(data) > SLICE_BYTES:
            self._stash[0] = data[SLICE_BYTES:]
            data = data[:SLICE_BYTES]
        else:
            del self._stash[0]
        self._reader.feed(data)

    def _run(self, request: Request) -> None:
        server = self._server
        server.counters.requests += 1
        self.deadline = NEVER
        self._waited = None
        self._held = len(request.body)
        exchange = self._exchange = Exchange(self, request)
        if self._eof:
            exchange.gone = True
        try:
            result = server.handler(exchange)
        except Exception as error:  # the boundary between the handler's code and the connection
            exchange.fail(error)
            return
        if result is not None:
            self._task = server.loop.create_task(self._await(exchange, result))

    async def _await(self, exchange: Exchange, result: Awaitable[None]) -> None:
        try:
            await result
        except asyncio.CancelledError:
            exchange.fail(Unavailable("the server is stopping; ask again"))
            raise
        except Exception as error:  # the boundary between the handler's code and the connection
            exchange.fail(error)
        else:
            if exchange.gone:
                exchange.cut()
            elif exchange.phase is not _DONE:
                exchange.fail(RuntimeError("the handler returned without finishing its answer"))

    def finished(self, exchange: Exchange, *, close: bool) -> None:
        """Part of Link: the answer is complete."""
        if exchange is not self._exchange:
            return
        self._exchange = None
        self._server.budget.held -= self._held
        self._held = 0
        if close or self.ending:
            self._reader.close()
            self._reader.refusal = None
            self._reader.drop_ready()
            self._stash.clear()
            self._close()
        elif self._pumping:
            return
        elif self._stash or self._eof or self._reader.reading is not _BETWEEN or self._reader.ready:
            # not from here: the handler's own code is still below us on the stack
            self._server.loop.call_soon(self._pump)
        else:
            self.deadline = self._server.loop.time() + self._server.limits.keep_alive_seconds
            self._server.clock.sooner(self)

    def _wait(self) -> None:
        """Set the deadline for what the connection waits for now, and let a waiting client send its body."""
        limits = self._server.limits
        reading = self._reader.reading
        if self._lingering or (reading is self._waited and self.writable and not self._reader.expects):
            return  # a head or a body has one deadline, however many pieces it comes in
        self._waited = None if reading is _BETWEEN else reading
        if not self.writable:
            wait = limits.stall_seconds
        elif reading is Reading.HEAD:
            wait = limits.head_seconds
        elif reading is Reading.BODY:
            wait = limits.body_seconds
            if self._reader.expects:
                self._reader.expects = False
                self.write(_CONTINUE)
        else:
            wait = limits.keep_alive_seconds
        self.deadline = self._server.loop.time() + wait
        self._server.clock.sooner(self)

    # endings

    def expired(self) -> None:
        """The deadline passed: close silently between requests, 408 inside one, cut a client that does not read."""
        self.deadline = NEVER
        transport = self._transport
        if transport is None:
            return
        reading = self._reader.reading
        if self._exchange is not None or not self.writable or self._lingering or transport.is_closing():
            transport.abort()
        elif reading in (Reading.HEAD, Reading.BODY):
            self._server.counters.timeouts += 1
            part = "headers" if reading is Reading.HEAD else "body"
            self._reader.refuse(
                Refusal(408, "request_timeout", f"request: its {part} did not arrive in time; send it faster")
            )
            self._pump()
        else:
            transport.close()

    def _refuse(self, refusal: RelaxError) -> None:
        self._reader.refusal = None
        self._server.counters.bad_requests += 1
        self._end_with(
            refusal.status if isinstance(refusal, Refusal) else refusal.http_status, refusal, self._reader.refusal_block
        )

    def _end_with(self, status: int, error: RelaxError, block: bytes = b"") -> None:
        """Answer, close our side, and throw away for a moment what the client still sends: closing with
        unread bytes would reset the connection, and the client would never see the answer."""
        body = encode_json({"error": error.as_json()})
        retry = b"" if error.retry_after is None else b"retry-after: %d\r\n" % error.retry_after
        self.write(
            b"%b%b%b%b%bcontent-length: %d\r\nconnection: close\r\n\r\n%b"
            % (status_line(status), date_line(), JSON_LINE, retry, block, len(body), body)
        )
        self._lingering = True
        self._reader.close()
        self._stash.clear()
        transport = self._transport
        if transport is None:
            return
        if self._eof:
            transport.close()
            return
        if self._paused_reading:
            self._paused_reading = False
            transport.resume_reading()
        transport.write_eof()
        self.deadline = self._server.loop.time() + self._server.limits.linger_seconds
        self._server.clock.sooner(self)

    def _close(self) -> None:
        """Close once everything is sent, which a client that does not read can delay only so long."""
        if self._transport is not None:
            self._transport.close()
            self.deadline = self._server.loop.time() + self._server.limits.stall_seconds
            self._server.clock.sooner(self)

    def drain(self) -> None:
        """The server is stopping: close now when idle, else after the present answer."""
        self.ending = True
        if self._exchange is None and not self._reader.ready:
            self._close()

    def abort(self) -> None:
        """Close at once and cancel the handler."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    # the exchange's view

    def write(self, data: bytes) -> None:
        """Part of Link."""
        if self._transport is not None:
            self._transport.write(data)

    def writelines(self, parts: list[bytes]) -> None:
        """Part of Link."""
        if self._transport is not None:
            self._transport.writelines(parts)

    def cut(self) -> None:
        """Part of Link."""
        exchange, self._exchange = self._exchange, None
        if self._transport is not None:
            if exchange is not None and exchange.gone:
                self._server.counters.aborted += 1
            else:
                self._server.counters.cut += 1
            self._transport.abort()
