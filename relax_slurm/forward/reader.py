"""Bytes in, requests out: the server's half of HTTP/1.1 on llhttp, without sockets or clocks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import httptools

from relax_slurm.errors import BodyTooLarge, RelaxError, Unavailable
from relax_slurm.forward.http import Headers, Limits, Request

log = logging.getLogger("relax_slurm.forward")

SLICE_BYTES = 64 * 1024
"""Largest piece to feed at once: bounds how many pipelined requests are parsed before the first is answered."""

_MAX_PIECES = 256
_CHUNK_OVERHEAD = 8

_METHODS = {name.encode(): name for name in ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH")}
_ONCE = (b"host", b"content-length", b"transfer-encoding", b"expect")


class Reading(IntEnum):
    """What the reader is in the middle of."""

    BETWEEN = 0
    """No request has begun."""
    HEAD = 1
    """Request line or headers."""
    BODY = 2
    """Headers were accepted, the body is incomplete."""
    ENDED = 3
    """No further byte is parsed: the connection ends after the answers that are due."""


# member access on an enum class costs more than the rest of a comparison
_BETWEEN, _HEAD, _BODY = Reading.BETWEEN, Reading.HEAD, Reading.BODY


class Refusal(RelaxError):
    """A request that cannot be parsed or accepted; the connection ends with this answer."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.refusal_code = code

    def as_json(self) -> dict[str, Any]:
        """The `error` object; the code is per refusal, not per class."""
        return {"message": self.message, "type": "invalid_request_error", "code": self.refusal_code}


class Denied(Exception):
    """What `Admit` may raise instead of a bare RelaxError: the same answer, with a block of header lines on it."""

    def __init__(self, error: RelaxError, block: bytes) -> None:
        super().__init__(error.message)
        self.error = error
        self.block = block


Admit = Callable[[Request], None]
"""Looks at the head of a request that announces a body, before a byte of the body is kept.

Raises a RelaxError (or Denied) to have the request answered with it at once and its connection closed, the body
unread. It is for sparing memory: requests without a body do not come by, so the handler has to judge as well.
"""


class Budget:
    """Bytes of request bodies that one server holds, on all its connections."""

    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = 0


class RequestReader:
    """Parses one connection's requests into `ready`; the first bad one becomes `refusal` and ends the
    reading.

    Requests that were complete before the bad one stay in `ready`: they are answered first.
    """

    __slots__ = (
        "_admit",
        "_body_bytes",
        "_budget",
        "_fed",
        "_fed_bytes",
        "_headers",
        "_limits",
        "_parser",
        "_pieces",
        "_request",
        "_spill",
        "_target",
        "expects",
        "reading",
        "ready",
        "refusal",
        "refusal_block",
    )

    def __init__(self, limits: Limits, admit: Admit | None = None, budget: Budget | None = None) -> None:
        self.ready: deque[Request] = deque()
        """Complete requests in order; the owner takes them out."""
        self.refusal: RelaxError | None = None
        """Why reading ended, when it ended badly."""
        self.refusal_block = b""
        """Header lines that belong on the refusal's answer."""
        self.reading = Reading.BETWEEN
        self.expects = False
        """The client waits for `100 Continue` before it sends the body; the owner clears it."""
        self._limits = limits
        self._admit = admit
        self._budget = budget or Budget()
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers = Headers()
        self._fed_bytes = 0
        self._fed = 0
        self._request: Request | None = None
        self._pieces: list[bytes] = []
        self._spill: bytearray | None = None
        self._body_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse at most SLICE_BYTES more. Never raises for what the client sent."""
        parser = self._parser
        if parser is None:
            return
        self._fed = len(data)
        self._fed_bytes += self._fed
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # An upgrade is ignored, as RFC 9110 7.8 allows; the bytes behind it may be in the other protocol
            if self.ready:
                self.ready[-1].keep_alive = False
            self.close()
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if isinstance(cause, RelaxError):
                self.refuse(cause)
            elif isinstance(cause, Denied):
                self.refusal_block = cause.block
                self.refuse(cause.error)
            else:
                self.refuse(Refusal(400, "bad_request", f"request: {cause or error}"))
        except httptools.HttpParserError as error:
            if self.ready and not self.ready[-1].keep_alive:
                self.close()  # bytes after a request that said Connection: close
            else:
                self.refuse(Refusal(400, "bad_request", f"request: not valid HTTP/1.1 ({error})"))
        else:
            # What is not body is head, or the framing of chunks, which is six bytes for a chunk of one byte. The count
            # may include the end of the request before, hence the slack.
            if self._fed_bytes - _CHUNK_OVERHEAD * self._body_bytes > self._limits.max_header_bytes + SLICE_BYTES:
                self.refuse(_header_refusal(self._limits.max_header_bytes))

    def refuse(self, refusal: RelaxError) -> None:
        """End the reading with an answer that is due after those to `ready`."""
        self.refusal = refusal
        self.close()

    def close(self) -> None:
        """Parse nothing more; drop what is half read. Breaks the reference cycle with the parser."""
        self.reading = Reading.ENDED
        self._parser = None
        self._request = None
        self._pieces = []
        self._spill = None
        self._budget.held -= self._body_bytes
        self._body_bytes = 0

    def drop_ready(self) -> None:
        """Forget the complete requests that nobody will answer."""
        for request in self.ready:
            self._budget.held -= len(request.body)
        self.ready.clear()

    # llhttp callbacks

    def on_url(self, url: bytes) -> None:
        """A piece of the request target: the first thing that is seen of a request."""
        if self.reading is _BETWEEN:
            self.reading = _HEAD
            self._target = url
            self._headers = Headers()
        else:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header field (or a trailer, which lands in a list that is thrown away)."""
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Judge the head. Raising Refusal here stops the parser."""
        headers = self._headers
        self._headers = Headers()
        parser = self._parser
        assert parser is not None
        names = headers.freeze()
        if len(names) != len(headers):
            _refuse_duplicates(headers)
        if self._fed_bytes > self._limits.max_header_bytes:
            self._measure_head(headers)
        http10 = False
        keep_alive = parser.should_keep_alive()
        if not keep_alive or b"connection" in names:
            version = parser.get_http_version()
            http10 = version == "1.0"
            if version not in ("1.0", "1.1"):
                raise Refusal(505, "http_version", f"HTTP/{version} is not spoken here; use HTTP/1.1")
        if b"host" not in names and not http10:
            raise Refusal(400, "bad_request", "request: HTTP/1.1 without a Host header; add one")
        method = parser.get_method()
        try:
            name = _METHODS.get(method) or method.decode("ascii")
            request = Request(name, self._target, headers, http10=http10, keep_alive=keep_alive)
        except RelaxError as error:
            raise Refusal(400, "bad_request", error.message) from error
        self.reading = _BODY
        self._request = request
        if b"content-length" in names or b"transfer-encoding" in names:
            self._judge_body(names, http10=http10)
            if self._admit is not None and names.get(b"content-length") != b"0":
                self._ask_admission(request, self._admit)

    def on_body(self, piece: bytes) -> None:
        """A piece of the body; chunked bodies meet the limit here."""
        size = len(piece)
        self._body_bytes += size
        budget = self._budget
        budget.held += size
        if self._body_bytes > self._limits.max_body_bytes:
            raise _body_refusal(self._limits.max_body_bytes, self._body_bytes)
        if budget.held > self._limits.max_buffered_bytes:
            raise Unavailable(
                f"request bodies: {self._limits.max_buffered_bytes} bytes are held here, which is the limit; try again"
            )
        self._pieces.append(piece)
        if len(self._pieces) > _MAX_PIECES:
            # one-byte chunks must not cost an object each
            if self._spill is None:
                self._spill = bytearray()
            self._spill += b"".join(self._pieces)
            self._pieces.clear()

    def on_message_complete(self) -> None:
        """The request is whole."""
        request = self._request
        assert request is not None
        pieces = self._pieces
        if pieces or self._spill is not None:
            if self._spill is not None:
                request.body = bytes(self._spill) + b"".join(pieces)
                self._spill = None
            else:
                request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._pieces = []
            self._body_bytes = 0
        self._request = None
        self.expects = False
        self._fed_bytes = self._fed  # the next head may have begun in the same piece
        self.reading = _BETWEEN
        self.ready.append(request)

    def _ask_admission(self, request: Request, admit: Admit) -> None:
        try:
            admit(request)
        except (RelaxError, Denied):
            raise
        except Exception as error:  # the boundary between the owner's code and the connection
            log.exception("%s %s: its admission failed", request.method, request.path)
            raise Refusal(500, "internal", "internal error; the log of this process says more") from error

    def _measure_head(self, headers: Headers) -> None:
        limit = self._limits.max_header_bytes
        if len(self._target) + sum(len(name) + len(value) + 4 for name, value in headers) > limit:
            raise _header_refusal(limit)

    def _judge_body(self, names: dict[bytes, bytes], *, http10: bool) -> None:
        length = names.get(b"content-length")
        if length is not None:
            if int(length) > self._limits.max_body_bytes:
                raise _body_refusal(self._limits.max_body_bytes, int(length))
        elif http10:
            raise Refusal(400, "bad_request", "request: Transfer-Encoding in HTTP/1.0; use Content-Length")
        elif names[b"transfer-encoding"].strip().lower() != b"chunked":
            raise Refusal(501, "transfer_coding", "request: only the transfer coding 'chunked' is understood")
        assert self._parser is not None
        if b"upgrade" in names and length != b"0" and self._parser.should_upgrade():
            raise Refusal(501, "upgrade", "request: an Upgrade with a body is not understood; drop the header")
        if b"expect" in names and not http10:
            if names[b"expect"].strip().lower() != b"100-continue":
                raise Refusal(417, "expectation", "request: only 'Expect: 100-continue' is understood")
            self.expects = length != b"0"


def _header_refusal(limit: int) -> Refusal:
    return Refusal(431, "headers_too_large", f"request: the headers are over {limit} bytes; send fewer or shorter ones")


def _body_refusal(limit: int, size: int) -> BodyTooLarge:
    return BodyTooLarge(f"request body: {size} bytes or more, the limit is {limit}; split the request")


def _refuse_duplicates(headers: Headers) -> None:
    """Repeated framing headers are how requests are smuggled; other repeats are legal."""
    counts = dict.fromkeys(_ONCE, 0)
    for name, _ in headers:
        if name in counts:
            counts[name] += 1
            if counts[name] > 1:
                raise Refusal(400, "bad_request", f"request: the header {name.decode()} appears twice; send it once")
