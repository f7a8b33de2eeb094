"""Where a request goes: parsed base URLs, and the rendered first lines of a request to them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from urllib.parse import urlsplit

from relax_slurm.errors import BadRequest


class Origin(NamedTuple):
    """Scheme, host and port of a server: the key of a connection pool."""

    secure: bool
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}"


@lru_cache(maxsize=4096)
def parse_url(url: str) -> tuple[Origin, str]:
    """(origin, path with query) of an http(s) URL. BadRequest for anything else or with credentials."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadRequest(f"upstream URL {url!r}: {error}; use http://host:port") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise BadRequest(f"upstream URL {url!r}: not http(s)://host[:port] without credentials")
    secure = parts.scheme == "https"
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return Origin(secure, parts.hostname, port or (443 if secure else 80)), path


def request_line(method: str, base_url: str, path: str = "") -> tuple[Origin, bytes]:
    """(origin, request line and Host line) for `path` below `base_url`; without `path`, for the URL itself.

    BadRequest when they do not make a request.
    """
    return _request_line_cached(method, base_url, path) if len(path) <= 256 else _request_line(method, base_url, path)


def _request_line(method: str, base_url: str, path: str) -> tuple[Origin, bytes]:
    origin, prefix = parse_url(base_url)
    if path and "?" in prefix:
        raise BadRequest(f"upstream URL {base_url!r}: a base URL cannot have a query; remove it")
    target = prefix.rstrip("/") + path if path else prefix or "/"
    if not (target.startswith("/") and target.isascii() and target.isprintable() and " " not in target):
        raise BadRequest(f"upstream path {target!r}: not printable ASCII after '/'; percent-encode it")
    if not (method.isascii() and method.isalpha() and origin.host.isascii()):
        raise BadRequest(f"upstream request {method!r} to {origin}: method and host must be ASCII names")
    host = f"[{origin.host}]" if ":" in origin.host else origin.host
    if origin.port != (443 if origin.secure else 80):
        host = f"{host}:{origin.port}"
    return origin, f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n".encode("ascii")


_request_line_cached = lru_cache(maxsize=1024)(_request_line)
