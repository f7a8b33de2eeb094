"""One request on its way to an upstream, as a callback machine; and the form that collects the whole answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_slurm.errors import DeadlineExceeded, RelaxError, UpstreamFailed
from relax_slurm.forward.clock import NEVER
from relax_slurm.forward.http import Headers

if TYPE_CHECKING:
    from relax_slurm.forward.origin import Origin
    from relax_slurm.forward.pooled import UpstreamConnection
    from relax_slurm.forward.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Response:
    """A complete answer of an upstream."""

    status: int
    headers: Headers
    body: bytes


class Call:
    """A request that is sent at most once. Exactly one of `on_whole`, (`on_head` … `on_end`) or `on_error`
    ends it.

    Subclasses override the callbacks; they run inside the connection's read callback and must not raise.
    """

    __slots__ = ("connection", "deadline", "ended", "head_only", "origin", "payload", "upstream")

    def __init__(self, upstream: Upstream, origin: Origin, payload: list[bytes], head_only: bool = False) -> None:
        self.upstream = upstream
        self.origin = origin
        self.payload = payload
        """Head and body as they go out; emptied once written."""
        self.head_only = head_only
        self.connection: UpstreamConnection | None = None
        self.deadline = NEVER
        self.ended = False

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """The complete answer, when it came before `on_head` was due."""

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        """Status and headers of an answer that goes on; `length` is its Content-Length if it has one."""

    def on_data(self, data: bytes) -> None:
        """What one read brought of the body."""

    def on_end(self) -> None:
        """The body is complete."""

    def on_error(self, error: RelaxError) -> None:
        """The answer will not come, or not completely."""

    def cancel(self) -> None:
        """Close the connection at once; no callback follows."""
        if not self.ended:
            self.ended = True
            self.upstream.drop(self)

    def fail(self, error: RelaxError) -> None:
        """`cancel`, then tell the owner why."""
        if not self.ended:
            self.cancel()
            self.on_error(error)

    def expired(self) -> None:
        """The deadline passed."""
        self.deadline = NEVER
        self.fail(DeadlineExceeded(f"{self.origin}: no complete answer within the deadline; the request was given up"))


class Collect(Call):
    """A call whose whole answer goes into a future; bounded by `max_bytes`."""

    __slots__ = ("_headers", "_max_bytes", "_pieces", "_size", "_status", "future")

    def __init__(
        self, upstream: Upstream, origin: Origin, payload: list[bytes], *, head_only: bool, max_bytes: int
    ) -> None:
        super().__init__(upstream, origin, payload, head_only)
        self.future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._max_bytes = max_bytes
        self._status = 0
        self._headers = Headers()
        self._pieces: list[bytes] = []
        self._size = 0

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Part of Call."""
        if not self.future.done():
            self.future.set_result(Response(status, headers, body))

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        """Part of Call."""
        self._status, self._headers = status, headers
        if length is not None and length > self._max_bytes:
            self._too_large()

    def on_data(self, data: bytes) -> None:
        """Part of Call."""
        self._size += len(data)
        self._pieces.append(data)
        if self._size > self._max_bytes:
            self._too_large()

    def on_end(self) -> None:
        """Part of Call."""
        self.on_whole(self._status, self._headers, b"".join(self._pieces))

    def on_error(self, error: RelaxError) -> None:
        """Part of Call."""
        if not self.future.done():
            self.future.set_exception(error)

    def _too_large(self) -> None:
        self.fail(UpstreamFailed(f"{self.origin}: the answer is over {self._max_bytes} bytes, which is the limit"))
