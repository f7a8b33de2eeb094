"""One request and its answer, as a handler sees it.

Every answering method has a callback form (`send`, `on_drain`) beside the awaitable one, because a task per
request would cost as much as the forwarding itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from enum import IntEnum
from typing import Any

import msgspec

from relax_slurm.errors import RelaxError
from relax_slurm.forward.http import Header, Request, date_line, render, status_line

log = logging.getLogger("relax_slurm.forward")

JSON_LINE = b"content-type: application/json\r\n"
_JOIN_BELOW = 64 * 1024
encode_json = msgspec.json.Encoder().encode


class ClientGone(Exception):
    """The client closed its connection; there is nobody to answer."""


class Phase(IntEnum):
    """Where an answer stands."""

    NEW = 0
    """Nothing was sent."""
    STREAMING = 1
    """The head was sent, the body is under way."""
    DONE = 2
    """The answer is complete or was cut."""


_NEW, _STREAMING, _DONE = Phase  # member access on an enum class costs more than the comparison
_NO_NAMES: frozenset[bytes] = frozenset()
_NO_BODY = frozenset({204, 304})


class Link:
    """What an exchange needs from its connection. `connection.Connection` is the implementation."""

    __slots__ = ("ending", "writable")
    ending: bool
    """True when the connection will close after the present answer."""
    writable: bool
    """False while more than the high-water mark is unsent."""

    def write(self, data: bytes) -> None:
        """Queue bytes for the client; ignored once it is gone."""
        raise AssertionError

    def writelines(self, parts: list[bytes]) -> None:
        """`write` of several pieces without joining them."""
        raise AssertionError

    def finished(self, exchange: Exchange, *, close: bool) -> None:
        """The answer of `exchange` is complete; go on to the next request or close."""
        raise AssertionError

    def cut(self) -> None:
        """Close the connection at once, in the middle of an answer."""
        raise AssertionError


class Exchange:
    """A request with its answer: `respond` once, or `start`, `write`/`send`…, `end`.

    Answering twice is a RuntimeError; answering a client that is gone does nothing. `gone` turns true as
    soon as the client closed its side: an answer may still be written (the client may only have shut down
    its sending half), but work on its behalf should stop.
    """

    __slots__ = (
        "_chunked",
        "_drain_callback",
        "_extra_block",
        "_gone_callbacks",
        "_left",
        "_link",
        "extra_names",
        "gone",
        "phase",
        "request",
        "sent_bytes",
        "status",
    )

    def __init__(self, link: Link, request: Request) -> None:
        self.request = request
        self.gone = False
        self.phase: Phase = _NEW
        self.status = 0
        """Status that was sent; 0 before."""
        self.sent_bytes = 0
        """Body bytes handed to the connection, without framing."""
        self.extra_names = _NO_NAMES
        self._link = link
        self._extra_block = b""
        self._gone_callbacks: list[Callable[[], None]] | None = None
        self._drain_callback: Callable[[], None] | None = None
        self._chunked = False
        self._left: int | None = None

    # headers

    def add_header(self, name: bytes, value: bytes) -> None:
        """Put a header (lowercase name) on whatever answer is sent, errors included; replaces an upstream's one."""
        self._extra_block += render(((name, value),))
        self.extra_names |= {name}

    # whole answers

    def respond(self, status: int, body: bytes = b"", headers: Iterable[Header] = ()) -> None:
        """Send a complete answer. `headers` without framing, names in lowercase."""
        self.respond_block(status, date_line() + render(headers) if headers else date_line(), body)

    def respond_json(self, status: int, obj: Any, headers: Iterable[Header] = ()) -> None:
        """Send `obj` (anything msgspec can encode) as JSON."""
        self.respond_block(status, date_line() + JSON_LINE + (render(headers) if headers else b""), encode_json(obj))

    def respond_error(self, error: RelaxError, *, close: bool = False) -> None:
        """Answer `error`: its HTTP status, `{"error": …}`, and Retry-After when it has one."""
        block = date_line() + JSON_LINE
        if error.retry_after is not None:
            block += b"retry-after: %d\r\n" % error.retry_after
        self.respond_block(error.http_status, block, encode_json({"error": error.as_json()}), close=close)

    def respond_block(self, status: int, block: bytes, body: bytes, *, close: bool = False) -> None:
        """`respond` with header lines already rendered. The forwarder's single-write path."""
        if self.phase:
            raise RuntimeError(f"{self.request.method} {self.request.path} was answered twice")
        self.phase = _DONE
        self.status = status
        request = self.request
        link = self._link
        close = close or not request.keep_alive or link.ending
        if close:
            tail = b"connection: close\r\n\r\n"
        elif request.http10:
            tail = b"connection: keep-alive\r\n\r\n"
        else:
            tail = b"\r\n"
        if status in _NO_BODY or request.method == "HEAD":
            length = b"" if status in _NO_BODY else b"content-length: %d\r\n" % len(body)
            link.write(status_line(status) + self._extra_block + block + length + tail)
        elif len(body) < _JOIN_BELOW:
            self.sent_bytes = len(body)
            head = b"%b%b%bcontent-length: %d\r\n%b%b"
            link.write(head % (status_line(status), self._extra_block, block, len(body), tail, body))
        else:
            self.sent_bytes = len(body)
            head = b"%b%b%bcontent-length: %d\r\n%b"
            link.writelines([head % (status_line(status), self._extra_block, block, len(body), tail), body])
        self._gone_callbacks = self._drain_callback = None  # they may refer back to this exchange
        link.finished(self, close=close)

    # streamed answers

    def start(self, status: int, headers: Iterable[Header] = (), *, length: int | None = None) -> None:
        """Send the head; the body follows in pieces. Chunked, or by Content-Length when `length` is given."""
        self.start_block(status, date_line() + render(headers), length=length)

    def start_block(self, status: int, block: bytes, *, length: int | None = None) -> None:
        """`start` with header lines already rendered."""
        if self.phase:
            raise RuntimeError(f"{self.request.method} {self.request.path} was answered twice")
        self.phase = _STREAMING
        self.status = status
        request = self.request
        if length is None and request.http10:
            # HTTP/1.0 has no chunks: the end of the connection is the end of the body
            request.keep_alive = False
        close = not request.keep_alive or self._link.ending
        request.keep_alive = not close
        if status in _NO_BODY or request.method == "HEAD":
            framing = b"" if length is None or status in _NO_BODY else b"content-length: %d\r\n" % length
            self._left = 0
        elif length is not None:
            framing = b"content-length: %d\r\n" % length
            self._left = length
        elif request.http10:
            framing = b""
        else:
            framing = b"transfer-encoding: chunked\r\n"
            self._chunked = True
        if close:
            framing += b"connection: close\r\n"
        elif request.http10:
            framing += b"connection: keep-alive\r\n"
        self._link.write(b"%b%b%b%b\r\n" % (status_line(status), self._extra_block, block, framing))

    def send(self, chunk: bytes) -> bool:
        """Queue a piece of the body; False when the client reads too slowly and the producer should pause.

        Pieces for a client that is gone, or of an answer without a body, are dropped.
        """
        if self.phase is not _STREAMING:
            if self.phase is _DONE:
                return True
            raise RuntimeError(f"{self.request.method} {self.request.path}: send() before start()")
        size = len(chunk)
        if not size:
            return True
        link = self._link
        if self._chunked:
            if size < _JOIN_BELOW:
                link.write(b"%x\r\n%b\r\n" % (size, chunk))
            else:
                link.writelines([b"%x\r\n" % size, chunk, b"\r\n"])
        else:
            if self._left is not None:
                if self.status in _NO_BODY or self.request.method == "HEAD":
                    return True
                if size > self._left:
                    self.cut()
                    raise RuntimeError(f"{self.request.path}: the answer's body is longer than its Content-Length")
                self._left -= size
            link.write(chunk)
        self.sent_bytes += size
        return link.writable

    async def write(self, chunk: bytes) -> None:
        """`send`, then wait while the client reads too slowly. ClientGone when it left."""
        if self.gone:
            raise ClientGone
        if not self.send(chunk):
            await self.drained()

    async def drained(self) -> None:
        """Wait until more may be sent. ClientGone when the client left."""
        if not self.gone and not self._link.writable:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def wake() -> None:
                if not waiter.done():
                    waiter.set_result(None)

            self.on_drain(wake)
            await waiter
        if self.gone:
            raise ClientGone

    def end(self) -> None:
        """Finish the body. A body shorter than its announced length is cut instead, so that nobody takes it
        for whole.
        """
        if self.phase is not _STREAMING:
            if self.phase is _DONE:
                return
            raise RuntimeError(f"{self.request.method} {self.request.path}: end() before start()")
        if self._left:
            self.cut()
            return
        self.phase = _DONE
        if self._chunked:
            self._link.write(b"0\r\n\r\n")
        self._gone_callbacks = self._drain_callback = None
        self._link.finished(self, close=not self.request.keep_alive)

    def cut(self) -> None:
        """Break the answer off: the connection closes without the end of the body."""
        if self.phase is not _DONE:
            self.phase = _DONE
            self._gone_callbacks = self._drain_callback = None
            self._link.cut()

    def fail(self, error: BaseException) -> None:
        """Answer an exception: a RelaxError as itself, anything else as a 500 that is logged; cut when too late."""
        if self.phase is _STREAMING:
            if isinstance(error, RelaxError):
                log.warning("%s %s: cut after the first byte: %s", self.request.method, self.request.path, error)
            elif not isinstance(error, ClientGone):
                log.error("%s %s: cut after the first byte", self.request.method, self.request.path, exc_info=error)
            self.cut()
        elif self.phase is _NEW:
            if isinstance(error, RelaxError):
                self.respond_error(error)
            elif isinstance(error, ClientGone):
                self.cut()
            else:
                log.error("%s %s: handler failed", self.request.method, self.request.path, exc_info=error)
                self.respond_error(RelaxError("the server failed on this request; its log has the cause"), close=True)
        elif not isinstance(error, RelaxError | ClientGone):
            log.error("%s %s: failed after its answer", self.request.method, self.request.path, exc_info=error)

    # the client

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the client closes its side (at once if it already has)."""
        if self.gone:
            callback()
        elif self._gone_callbacks is None:
            self._gone_callbacks = [callback]
        else:
            self._gone_callbacks.append(callback)

    def on_drain(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when the client has caught up. One producer per answer: the last callback counts."""
        self._drain_callback = callback

    def client_left(self) -> None:
        """The connection's word that the client closed its side."""
        if not self.gone:
            self.gone = True
            callbacks, self._gone_callbacks = self._gone_callbacks, None
            for callback in callbacks or ():
                callback()
            self.client_drained()

    def client_drained(self) -> None:
        """The connection's word that unsent bytes fell below the low-water mark."""
        callback, self._drain_callback = self._drain_callback, None
        if callback is not None:
            callback()


Handler = Callable[[Exchange], Awaitable[None] | None]
"""Answers an exchange. A coroutine function runs as a task and must have answered when it returns; a plain
function that returns None has answered already or has arranged that a callback will."""
