"""One connection to an upstream: sends a call's bytes, parses the answer with llhttp, feeds the call's callbacks."""

from __future__ import annotations

import asyncio
import select
from typing import TYPE_CHECKING, cast

import httptools

from relax_slurm.errors import UpstreamFailed
from relax_slurm.forward.call import Call
from relax_slurm.forward.http import Headers

if TYPE_CHECKING:
    from relax_slurm.forward.origin import Origin
    from relax_slurm.forward.upstream import Upstream

_HOLD_BYTES = 256 * 1024
"""An answer of known length up to this is handed over whole: one write, and a failure half-way is still a clean 502."""

_MAX_HEAD_BYTES = 256 * 1024


class UpstreamConnection(asyncio.Protocol):
    """Client side of one TCP connection. Carries one call at a time and goes back to the pool only when clean."""

    __slots__ = (
        "_announced",
        "_chunks",
        "_done",
        "_fields",
        "_head_done",
        "_headers",
        "_held",
        "_keep_alive",
        "_large_payload",
        "_length",
        "_parser",
        "_poll",
        "_status",
        "_until_eof",
        "call",
        "idle_since",
        "origin",
        "paused",
        "transport",
        "upstream",
    )

    def __init__(self, upstream: Upstream, origin: Origin) -> None:
        self.upstream = upstream
        self.origin = origin
        self.transport: asyncio.Transport | None = None
        self.call: Call | None = None
        self.idle_since = 0.0
        self.paused = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        # An answer with both framings is taken by its chunks and its Content-Length is dropped (RFC 9112, 6.3)
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True)
        self._poll: select.poll | None = None
        self._large_payload = False
        self._keep_alive = False
        self._reset()

    def _reset(self) -> None:
        self._fields = Headers()
        self._headers = self._fields
        self._chunks: list[bytes] = []
        self._status = 0
        self._length: int | None = None
        self._until_eof = False
        self._head_done = False
        self._announced = False
        self._done = False
        self._held = 0

    # use

    def send(self, call: Call) -> None:
        """Put `call` on the wire. Its bytes are written here and nowhere else, so never twice."""
        transport = self.transport
        assert transport is not None
        self.call = call
        call.connection = self
        self._reset()
        payload = call.payload
        call.payload = []
        if len(payload) == 1:
            self._large_payload = False
            transport.write(payload[0])
        else:
            self._large_payload = True
            transport.writelines(payload)

    def is_stale(self) -> bool:
        """Whether the idle connection has anything to read: an end of file, or bytes nobody asked for."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return True
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(self._poll.poll(0))

    def close(self) -> None:
        """Close at once; the call, if any, hears nothing."""
        self.call = None
        if self.transport is not None:
            self.transport.abort()

    # transport callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        # uvloop's transports have the interface but not the base class
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Parse one read and hand over what it completed."""
        call = self.call
        parser = self._parser
        if call is None or parser is None:
            # bytes that nobody asked for: whatever they are, this connection is not to be trusted
            self.close()
            return
        try:
            parser.feed_data(data)
        except (httptools.HttpParserUpgrade, httptools.HttpParserError) as error:
            cause = error.__context__ or error
            call.fail(UpstreamFailed(f"{self.origin}: the answer is not valid HTTP/1.1 ({cause})"))
            return
        if self._done:
            self._finish(call)
        elif self._head_done:
            if not self._announced:
                if self._length is not None and self._length <= _HOLD_BYTES:
                    return
                self._announced = True
                call.on_head(self._status, self._headers, self._length)
            if self._chunks and not call.ended:
                chunks, self._chunks = self._chunks, []
                call.on_data(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        else:
            self._held += len(data)
            if self._held > _MAX_HEAD_BYTES:
                call.fail(UpstreamFailed(f"{self.origin}: the answer's headers are over {_MAX_HEAD_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of an answer that has no other end, or a failure."""
        call = self.call
        self.transport = None
        self._parser = None
        self._poll = None
        if call is not None and self._head_done and self._until_eof and exc is None:
            self._keep_alive = False
            self._finish(call)
        elif call is not None:
            when = "in the middle of its answer" if self._head_done else "before it answered"
            reason = f" ({exc})" if exc is not None else ""
            call.fail(
                UpstreamFailed(f"{self.origin}: the connection closed {when}{reason}; the request was not repeated")
            )
        self.upstream.lost(self)

    def _finish(self, call: Call) -> None:
        """The answer is complete: give the connection back first, so that whoever runs next can have it."""
        chunks = self._chunks
        body = b"" if not chunks else chunks[0] if len(chunks) == 1 else b"".join(chunks)
        status, headers, announced = self._status, self._headers, self._announced
        call.ended = True
        call.connection = None
        self.call = None
        self.upstream.release(self, call, clean=self._keep_alive and self._flushed())
        if not announced:
            call.on_whole(status, headers, body)
            return
        if body:
            call.on_data(body)
        call.on_end()

    def _flushed(self) -> bool:
        """Whether the request was written completely (an answer may overtake a large body)."""
        if not self._large_payload:
            return True
        return self.transport is not None and self.transport.get_write_buffer_size() == 0

    # llhttp callbacks

    def on_message_begin(self) -> None:
        """The first byte of an answer. A second answer to one request spoils the connection."""
        if self._done:
            self._keep_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field; trailers are dropped."""
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Status and framing are known."""
        if self._done:
            return
        parser = self._parser
        assert parser is not None
        headers = self._headers = self._fields
        self._fields = Headers()  # trailers go here and are dropped
        status = parser.get_status_code()
        if status < 200:
            return
        self._status = status
        self._head_done = True
        names = headers.freeze()
        if b"transfer-encoding" in names:
            if names[b"transfer-encoding"].strip().lower() != b"chunked":
                raise ValueError("a transfer coding other than 'chunked'")
        elif b"content-length" in names:
            self._length = int(names[b"content-length"])
        else:
            self._until_eof = status not in (204, 304)
        self._keep_alive = parser.should_keep_alive()
        if b"transfer-encoding" in names and b"content-length" in names:
            self._keep_alive = False
        assert self.call is not None
        if self.call.head_only:
            # the parser would wait for a body that a HEAD does not have
            self._keep_alive = False
            self._done = True

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        if not self._done:
            self._chunks.append(piece)

    def on_message_complete(self) -> None:
        """The answer is complete, unless it was an interim one."""
        if self._head_done:
            self._done = True
