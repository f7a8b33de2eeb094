"""HTTP vocabulary of the forwarding room: limits, requests, header blocks, status lines. No sockets here.

Header names are lowercase bytes everywhere; a *block* is rendered header lines, each ending in CRLF.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from typing import Final
from urllib.parse import parse_qsl, unquote_to_bytes

from relax_slurm.errors import BadRequest

Header = tuple[bytes, bytes]

REASONS: Final[dict[int, str]] = {
    100: "Continue",
    101: "Switching Protocols",
    200: "OK",
    201: "Created",
    202: "Accepted",
    203: "Non-Authoritative Information",
    204: "No Content",
    205: "Reset Content",
    206: "Partial Content",
    300: "Multiple Choices",
    301: "Moved Permanently",
    302: "Found",
    303: "See Other",
    304: "Not Modified",
    307: "Temporary Redirect",
    308: "Permanent Redirect",
    400: "Bad Request",
    401: "Unauthorized",
    402: "Payment Required",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    406: "Not Acceptable",
    407: "Proxy Authentication Required",
    408: "Request Timeout",
    409: "Conflict",
    410: "Gone",
    411: "Length Required",
    412: "Precondition Failed",
    413: "Content Too Large",
    414: "URI Too Long",
    415: "Unsupported Media Type",
    416: "Range Not Satisfiable",
    417: "Expectation Failed",
    421: "Misdirected Request",
    422: "Unprocessable Content",
    423: "Locked",
    424: "Failed Dependency",
    425: "Too Early",
    426: "Upgrade Required",
    428: "Precondition Required",
    429: "Too Many Requests",
    431: "Request Header Fields Too Large",
    451: "Unavailable For Legal Reasons",
    500: "Internal Server Error",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
    507: "Insufficient Storage",
    511: "Network Authentication Required",
}
"""Reason phrases of RFC 9110 and RFC 6585; an unknown code is sent with an empty phrase."""

HOP_BY_HOP: Final[frozenset[bytes]] = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Headers that speak about one connection only (RFC 9110, 7.6.1)."""

NOT_FORWARDED: Final[frozenset[bytes]] = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
"""What a forwarder drops in both directions: hop-by-hop, Host and framing, which are computed again."""

_STATUS_LINES: dict[int, bytes] = {
    status: f"HTTP/1.1 {status} {phrase}\r\n".encode() for status, phrase in REASONS.items()
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one HTTP server. Sizes in bytes, times in seconds."""

    max_body_bytes: int = 64 * 1024 * 1024
    """Largest request body; a larger one is answered 413 and not read."""
    max_buffered_bytes: int = 1024 * 1024 * 1024
    """Request bodies of all connections together, from their first byte to the end of their answer; the request that
    goes over it is answered 503 and its connection closed."""
    max_header_bytes: int = 64 * 1024
    """Request line plus header fields; more is answered 431."""
    max_connections: int = 8192
    """Open client connections; one more is answered 503 and closed."""
    keep_alive_seconds: float = 75.0
    """How long a connection may sit between two requests."""
    head_seconds: float = 10.0
    """From the first byte of a request (or from connecting) to the end of its headers."""
    body_seconds: float = 120.0
    """From the end of the headers to the end of the body."""
    stall_seconds: float = 120.0
    """How long a client may refuse to read an answer before it is cut off."""
    linger_seconds: float = 2.0
    """After a refusal, how long what the client still sends is thrown away so that it can read the answer."""
    write_high_water: int = 256 * 1024
    """Unsent answer bytes above which producers are paused."""
    backlog: int = 1024
    """Listen queue."""


class Headers(list[Header]):
    """Header fields in order of arrival, names in lowercase."""

    __slots__ = ("_index",)
    _index: dict[bytes, bytes]

    def freeze(self) -> dict[bytes, bytes]:
        """Name to first value; made once, when the fields are complete."""
        self._index = index = dict(reversed(self))
        return index

    def as_dict(self) -> dict[bytes, bytes]:
        """Name to first value."""
        try:
            return self._index
        except AttributeError:
            return self.freeze()

    def get(self, name: bytes, default: bytes | None = None) -> bytes | None:
        """First value of `name` (lowercase), or `default`."""
        return self.as_dict().get(name, default)


class Request:
    """One request, fully read. `path` is percent-decoded text; `target` is what the client sent."""

    __slots__ = (
        "body",
        "headers",
        "http10",
        "keep_alive",
        "method",
        "path",
        "raw_path",
        "raw_query",
        "target",
    )

    def __init__(self, method: str, target: bytes, headers: Headers, *, http10: bool, keep_alive: bool) -> None:
        self.method = method
        self.target = target
        self.path, self.raw_path, self.raw_query = split_target(target)
        self.headers = headers
        self.body = b""
        self.http10 = http10
        self.keep_alive = keep_alive

    @property
    def query(self) -> dict[str, str]:
        """Query parameters; the last value of a repeated name. BadRequest when there are more than 100."""
        if not self.raw_query:
            return {}
        try:
            pairs = parse_qsl(self.raw_query.decode("ascii", "replace"), keep_blank_values=True, max_num_fields=100)
        except ValueError as error:
            raise BadRequest(f"query string of {self.path}: {error}; send at most 100 fields") from error
        return dict(pairs)


def split_target(target: bytes) -> tuple[str, bytes, bytes]:
    """(decoded path, raw path, raw query) of a request target; BadRequest when it is none of the HTTP forms."""
    return _split_cached(target) if len(target) <= 256 else _split(target)


def _split(target: bytes) -> tuple[str, bytes, bytes]:
    local = target
    if not local.startswith(b"/"):
        scheme, found, rest = local.partition(b"://")
        if found and scheme.lower() in (b"http", b"https"):
            _, slash, tail = rest.partition(b"/")
            local = slash + tail or b"/"
        elif local != b"*":
            raise BadRequest("request target: not a path; send an absolute path such as /health")
    raw_path, _, raw_query = local.partition(b"?")
    try:
        path = (unquote_to_bytes(raw_path) if b"%" in raw_path else raw_path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadRequest("request target: the path is not UTF-8 after percent-decoding; encode it as UTF-8") from error
    return path, raw_path, raw_query


_split_cached = lru_cache(maxsize=1024)(_split)


def status_line(status: int) -> bytes:
    """`HTTP/1.1 200 OK\\r\\n`. ValueError outside 100 to 999."""
    line = _STATUS_LINES.get(status)
    if line is None:
        if not 100 <= status <= 999:
            raise ValueError(f"HTTP status {status} is not a three-digit code")
        line = b"HTTP/1.1 %d \r\n" % status
    return line


def render(headers: Iterable[Header]) -> bytes:
    """Header lines as a block. ValueError when a name or value would break out of its line."""
    lines = [name + b": " + value + b"\r\n" for name, value in headers]
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines) or b"\0" in block:
        raise ValueError("a header contains a line break or NUL")
    return block


def checked(headers: Iterable[Header]) -> Headers:
    """Header fields that did not come from a parser. ValueError when one would break out of its line."""
    fields = Headers(headers)
    render(fields)
    return fields


def forward_block(headers: Headers, also: frozenset[bytes] = frozenset()) -> bytes:
    """`headers` as a block, without hop-by-hop, Host and framing fields, those named by Connection, those in `also`.

    The fields must come from a parser, which has refused line breaks in them.
    """
    dropped = _dropped(also) if also else NOT_FORWARDED
    connection = headers.get(b"connection")
    if connection is not None:
        dropped |= connection_tokens(headers)
    lines = [b": ".join(header) for header in headers if header[0] not in dropped]
    lines.append(b"")
    return b"\r\n".join(lines)


@lru_cache(maxsize=64)
def _dropped(also: frozenset[bytes]) -> frozenset[bytes]:
    return NOT_FORWARDED | also


def connection_tokens(headers: Iterable[Header]) -> frozenset[bytes]:
    """Field names that the Connection headers declare hop-by-hop."""
    tokens: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            tokens.update(token.strip().lower() for token in value.split(b","))
    return frozenset(tokens)


class _Date:
    """The Date line, rendered once a second."""

    __slots__ = ("line", "second")

    def __init__(self) -> None:
        self.second = 0
        self.line = b""


_date = _Date()


def date_line() -> bytes:
    """`date: …\\r\\n` for the current second."""
    now = int(time.time())
    if now != _date.second:
        _date.second = now
        _date.line = b"date: " + formatdate(now, usegmt=True).encode() + b"\r\n"
    return _date.line
