"""The relay: one request to one upstream, its answer to the client, byte for byte.

What is kept: the body in both directions, the status, every header that is not about one connection. What
is made anew: Host and the framing. An upstream's error is an answer like any other. After the first byte to
the client there is no second chance: a failure cuts the connection, so that half an answer never looks whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter

from relax_slurm.errors import RelaxError, UpstreamFailed
from relax_slurm.forward.call import Call, Response
from relax_slurm.forward.clock import NEVER
from relax_slurm.forward.exchange import Exchange
from relax_slurm.forward.http import Header, Headers, checked, forward_block
from relax_slurm.forward.origin import Origin, request_line
from relax_slurm.forward.upstream import Upstream, make_payload


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Bounds of one relayed request, in seconds."""

    first_byte_seconds: float = 1800.0
    """Until the first byte of the answer goes to the client: for a plain answer, until it is complete."""
    idle_seconds: float = 300.0
    """Between two pieces of a streamed answer, while the client keeps up."""


class End(StrEnum):
    """How a relay ended."""

    COMPLETE = "complete"
    """The whole answer was passed on (whatever its status) or collected."""
    FAILED = "failed"
    """No byte was passed on; `Outcome.error` says why and was answered."""
    CUT = "cut"
    """The upstream failed after the first byte; the client's connection was closed."""
    CLIENT_GONE = "client_gone"
    """The client left; the upstream connection was closed."""


@dataclass(slots=True)
class Outcome:
    """What a relay came to. Times in seconds since `relay` or `forward` was called."""

    end: End = End.FAILED
    status: int = 0
    """Status of the upstream's answer; 0 when there was none."""
    sent_bytes: int = 0
    """Body bytes passed on."""
    first_byte_seconds: float | None = None
    """When the upstream's answer began (for an answer that came whole: when it was complete)."""
    seconds: float = 0.0
    error: RelaxError | None = None
    response: Response | None = None
    """The answer, when it was asked for as a whole (`buffered`)."""


Done = Callable[[Outcome], None]
_COMPLETE = End.COMPLETE


class Relay(Call):
    """A call that writes its answer to an exchange. Made by `relay` and `forward`."""

    __slots__ = (
        "_answers",
        "_buffered",
        "_done",
        "_exchange",
        "_first_byte",
        "_headers",
        "_idle_seconds",
        "_pieces",
        "_size",
        "_started",
        "_status",
    )

    def __init__(
        self,
        exchange: Exchange,
        upstream: Upstream,
        origin: Origin,
        payload: list[bytes],
        idle_seconds: float,
        done: Done,
        *,
        answers: bool,
        buffered: bool,
        head_only: bool,
    ) -> None:
        super().__init__(upstream, origin, payload, head_only)
        self._exchange = exchange
        self._idle_seconds = idle_seconds
        self._done: Done | None = done
        self._answers = answers
        self._buffered = buffered
        self._status = 0
        self._started = perf_counter()
        self._first_byte: float | None = None
        self._headers: Headers | None = None
        self._pieces: list[bytes] | None = None
        self._size = 0

    def on_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Part of Call: the usual case, one write."""
        self._status = status
        self._first_byte = perf_counter()
        exchange = self._exchange
        if self._buffered:
            self._finish(_COMPLETE, response=Response(status, headers, body))
            return
        block = forward_block(headers, exchange.extra_names)
        if self.head_only:
            length = headers.get(b"content-length")
            exchange.start_block(status, block, length=None if length is None else int(length))
            exchange.end()
        else:
            exchange.respond_block(status, block, body)
        self._finish(_COMPLETE)

    def on_head(self, status: int, headers: Headers, length: int | None) -> None:
        """Part of Call."""
        self._status = status
        self._first_byte = perf_counter()
        if self._buffered:
            self._headers = headers
            if length is not None and length > self.upstream.limits.max_response_bytes:
                self._too_large()
            return
        self.deadline = self.upstream.loop.time() + self._idle_seconds
        self.upstream.clock.sooner(self)
        self._exchange.start_block(status, forward_block(headers, self._exchange.extra_names), length=length)

    def on_data(self, data: bytes) -> None:
        """Part of Call: passed on as it came; a client that reads slowly stops the reading here."""
        if self._buffered:
            self._collect(data)
        elif self._exchange.send(data):
            self.deadline = self.upstream.loop.time() + self._idle_seconds
        else:
            self._pause()

    def on_end(self) -> None:
        """Part of Call."""
        if self._buffered:
            assert self._headers is not None
            body = b"".join(self._pieces or ())
            self._finish(_COMPLETE, response=Response(self._status, self._headers, body))
        else:
            self._exchange.end()
            self._finish(_COMPLETE)

    def on_error(self, error: RelaxError) -> None:
        """Part of Call."""
        exchange = self._exchange
        if exchange.phase:
            exchange.cut()
            self._finish(End.CUT, error=error)
        else:
            if self._answers:
                exchange.fail(error)
            self._finish(End.FAILED, error=error)

    def client_left(self) -> None:
        """The exchange's word that nobody waits for the answer any more."""
        if self._done is not None:
            self.cancel()
            self._finish(End.CLIENT_GONE)
            if self._answers:
                self._exchange.cut()

    def _collect(self, data: bytes) -> None:
        self._size += len(data)
        if self._pieces is None:
            self._pieces = []
        self._pieces.append(data)
        if self._size > self.upstream.limits.max_response_bytes:
            self._too_large()

    def _pause(self) -> None:
        connection = self.connection
        if connection is not None and connection.transport is not None:
            self.deadline = NEVER  # now it is the client's turn; the server bounds how long it may take
            connection.paused = True
            connection.transport.pause_reading()
            self._exchange.on_drain(self._resume)

    def _resume(self) -> None:
        connection = self.connection
        if connection is not None and connection.paused and connection.transport is not None:
            connection.paused = False
            connection.transport.resume_reading()
            self.deadline = self.upstream.loop.time() + self._idle_seconds
            self.upstream.clock.sooner(self)

    def _too_large(self) -> None:
        limit = self.upstream.limits.max_response_bytes
        self.fail(
            UpstreamFailed(f"{self.origin}: the answer is over {limit} bytes, the limit for answers kept in memory")
        )

    def _finish(self, end: End, *, error: RelaxError | None = None, response: Response | None = None) -> None:
        done = self._done
        if done is None:
            return
        self._done = None
        first, started = self._first_byte, self._started
        outcome = Outcome(
            end,
            self._status,
            self._exchange.sent_bytes,
            None if first is None else first - started,
            perf_counter() - started,
            error,
            response,
        )
        try:
            done(outcome)
        except Exception as failure:  # the boundary between the owner's code and two connections
            self._exchange.fail(failure)


def relay(
    exchange: Exchange,
    upstream: Upstream,
    base_url: str,
    path: str,
    done: Done,
    *,
    method: str = "POST",
    headers: Iterable[Header] = (),
    body: bytes = b"",
    deadlines: Deadlines = Deadlines(),
    buffered: bool = False,
    drop: frozenset[bytes] = frozenset(),
    extra: bytes = b"",
) -> Relay:
    """Forward in callback form, without a task: returns at once, `done(outcome)` comes when it is over.

    A failure before the first byte is answered here (502, 503, 504). With `buffered` the answer is not written but
    given to `done` as `outcome.response`; answering is then up to `done` (when `response` is None, that has happened).
    What `done` raises is answered as if the handler had raised it.

    `headers` may be the client's own: what must not be forwarded is dropped, and so are the names in `drop`; `extra`
    is added as it is (header lines made by `http.render`). Raises BadRequest or Unavailable when nothing could be sent.
    The result's `fail(error)` gives the request up from outside.
    """
    return _start(
        exchange,
        upstream,
        base_url,
        path,
        done,
        method,
        headers,
        body,
        deadlines,
        drop,
        extra,
        answers=True,
        buffered=buffered,
    )


async def forward(
    exchange: Exchange,
    upstream: Upstream,
    base_url: str,
    path: str,
    *,
    method: str = "POST",
    headers: Iterable[Header] = (),
    body: bytes = b"",
    deadlines: Deadlines = Deadlines(),
    buffered: bool = False,
    drop: frozenset[bytes] = frozenset(),
    extra: bytes = b"",
) -> Outcome:
    """Forward and wait for the end. With `buffered` the answer is returned in `outcome.response`, not
    written.

    Before the first byte raises UpstreamFailed (502), DeadlineExceeded (504) or Unavailable (503, nothing
    sent). Later failures cut the client and are told in the outcome. Cancelling the caller closes the
    upstream connection.
    """
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    def done(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    call = _start(
        exchange,
        upstream,
        base_url,
        path,
        done,
        method,
        headers,
        body,
        deadlines,
        drop,
        extra,
        answers=False,
        buffered=buffered,
    )
    try:
        outcome = await future
    finally:
        call.cancel()
    if outcome.end is End.FAILED and outcome.error is not None:
        raise outcome.error
    return outcome


def _start(
    exchange: Exchange,
    upstream: Upstream,
    base_url: str,
    path: str,
    done: Done,
    method: str,
    headers: Headers | Iterable[Header],
    body: bytes,
    deadlines: Deadlines,
    drop: frozenset[bytes],
    extra: bytes,
    *,
    answers: bool,
    buffered: bool,
) -> Relay:
    origin, first = request_line(method, base_url, path)
    block = forward_block(headers if type(headers) is Headers else checked(headers), drop) + extra
    call = Relay(
        exchange,
        upstream,
        origin,
        make_payload(method, first, block, body),
        deadlines.idle_seconds,
        done,
        answers=answers,
        buffered=buffered,
        head_only=method == "HEAD",
    )
    if exchange.gone:
        call.client_left()
    else:
        upstream.submit(call, deadlines.first_byte_seconds)
        exchange.on_gone(call.client_left)
    return call
