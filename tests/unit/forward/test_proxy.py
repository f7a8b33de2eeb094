"""The relay over real sockets: bytes, headers, failures, disconnects, deadlines, backpressure."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.errors import BadRequest, UpstreamFailed
from relax_slurm.forward import Deadlines, End, HttpServer, Limits, Outcome, Upstream, UpstreamLimits, forward, relay

POST = b"POST /generate HTTP/1.1\r\nHost: gateway\r\n"
OK = b"HTTP/1.1 200 OK\r\n"
OK_CLOSE = OK + b"Content-Length: 2\r\n\r\nok"


@dataclass
class Raw:
    """A scripted upstream: `answers` are sent one per request, each a list of pieces with a pause between them."""

    answers: list[list[bytes | float | str]] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    connections: int = 0
    closed: int = 0
    port: int = 0
    open_handlers: set[asyncio.Task] = field(default_factory=set)

    async def start(self) -> Raw:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader, writer):
        self.connections += 1
        self.open_handlers.add(asyncio.current_task())
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                self.heads.append(head)
                self.bodies.append(body)
                for piece in self.answers.pop(0) if self.answers else [OK_CLOSE]:
                    if piece == "close":
                        return
                    if piece == "reset":
                        writer.transport.abort()
                        return
                    if piece == "wait":
                        await reader.read(1)
                        return
                    if isinstance(piece, float):
                        await asyncio.sleep(piece)
                    else:
                        writer.write(piece)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.closed += 1
            self.open_handlers.discard(asyncio.current_task())
            writer.close()

    async def stop(self):
        self.server.close()
        for task in list(self.open_handlers):
            task.cancel()
        await asyncio.gather(*self.open_handlers, return_exceptions=True)


class Front:
    """A gateway in small: everything goes to one upstream."""

    def __init__(self, raw, form, deadlines, limits, upstream_limits, **options):
        self.raw, self.deadlines, self.options = raw, deadlines, options
        self.outcomes: list[Outcome] = []
        self.errors: list[Exception] = []
        self.upstream = Upstream(upstream_limits)
        self.server = HttpServer(self.callback if form == "callback" else self.awaited, limits)

    def callback(self, exchange):
        request = exchange.request
        relay(
            exchange, self.upstream, self.raw.url, request.target.decode(), self.outcomes.append, **self.args(request)
        )

    async def awaited(self, exchange):
        request = exchange.request
        try:
            outcome = await forward(
                exchange, self.upstream, self.raw.url, request.target.decode(), **self.args(request)
            )
        except Exception as error:
            self.errors.append(error)
            raise
        self.outcomes.append(outcome)

    def args(self, request):
        return {
            "method": request.method,
            "headers": request.headers,
            "body": request.body,
            "deadlines": self.deadlines,
            **self.options,
        }


PATIENT = Deadlines(5.0, 5.0)


def through(
    scenario,
    answers=(),
    *,
    form="callback",
    loop="asyncio",
    deadlines=PATIENT,
    limits=None,
    upstream_limits=None,
    **options,
):
    """Run `scenario(front, port)` with a scripted upstream behind a relay."""

    async def main():
        raw = await Raw([list(answer) for answer in answers]).start()
        front = Front(raw, form, deadlines, limits, upstream_limits, **options)
        port = await front.server.start()
        try:
            return await asyncio.wait_for(scenario(front, port), 20)
        finally:
            await front.server.stop(0.2)
            await front.upstream.close()
            await raw.stop()

    return uvloop.run(main()) if loop == "uvloop" else asyncio.run(main())


async def talk(port, data, *, quiet=0.4):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    received = b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 16), quiet):
            received += piece
            if is_whole(received):
                break
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return received


def is_whole(answer):
    head, found, body = answer.partition(b"\r\n\r\n")
    if b"chunked" in head:
        return body.endswith(b"\r\n0\r\n\r\n") and b"connection: close" not in head
    length = re.search(rb"content-length: (\d+)", head)
    return bool(found and length and len(body) == int(length[1]) and b"connection: close" not in head)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


def post(body=b"{}", extra=b""):
    return POST + extra + b"Content-Length: %d\r\n\r\n" % len(body) + body


def dechunk(data: bytes) -> bytes:
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        if int(size, 16) == 0:
            assert data == b"\r\n"
            return body
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]


BOTH = pytest.mark.parametrize("form", ["callback", "await"])
LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@BOTH
@LOOPS
def test_request_and_answer_are_byte_exact(form, loop):
    body = bytes(range(256)) * 1000

    async def scenario(front, port):
        answer = await talk(port, post(body, b"Connection: X-Foo, close\r\nX-Foo: 1\r\nX-Bar: 2\r\nTE: trailers\r\n"))
        head, _, got = answer.partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0] == b"HTTP/1.1 418 "
        assert got == body[::-1]
        fields = dict(line.split(b": ") for line in head.split(b"\r\n")[1:])
        assert fields == {
            b"x-up": b"yes",
            b"content-length": b"256000",
            b"connection": b"close",
            b"content-encoding": b"br",
        }
        lines = front.raw.heads[0].split(b"\r\n")
        assert lines[0] == b"POST /generate HTTP/1.1"
        assert sorted(lines[1:-2]) == [b"content-length: 256000", b"host: 127.0.0.1:%d" % front.raw.port, b"x-bar: 2"]
        assert front.raw.bodies == [body]
        await until(lambda: front.outcomes)
        outcome = front.outcomes[0]
        assert (outcome.end, outcome.status, outcome.sent_bytes) == (End.COMPLETE, 418, len(body))
        assert 0 < outcome.first_byte_seconds <= outcome.seconds

    answer = b"HTTP/1.1 418 Teapot\r\nX-Up: yes\r\nConnection: x-down\r\nX-Down: 1\r\nContent-Encoding: br\r\n"
    answer += b"Keep-Alive: timeout=5\r\nContent-Length: %d\r\n\r\n" % len(body) + body[::-1]
    through(scenario, [[answer]], form=form, loop=loop)


@BOTH
def test_upstream_connections_are_reused(form):
    async def scenario(front, port):
        for _ in range(5):
            assert (await talk(port, post(extra=b"Connection: close\r\n"))).endswith(b"\r\n\r\nok")
        assert front.raw.connections == 1
        assert front.upstream.counts(front.raw.url) == {"open": 1, "idle": 1, "waiting": 0}

    through(scenario, form=form)


SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@BOTH
@LOOPS
def test_sse_is_passed_on_as_it_comes(form, loop):
    async def scenario(front, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post())
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"transfer-encoding: chunked" in head
        assert b"content-type: text/event-stream" in head
        for index in range(3):
            event = chunk(b"data: %d\n\n" % index)
            start = asyncio.get_running_loop().time()
            assert await reader.readexactly(len(event)) == event
            assert asyncio.get_running_loop().time() - start < 0.3, "no event waits for the next"
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        writer.close()
        await until(lambda: front.outcomes)
        assert front.outcomes[0].first_byte_seconds < front.outcomes[0].seconds

    pieces = [SSE]
    for index in range(3):
        pieces += [chunk(b"data: %d\n\n" % index), 0.05]
    through(scenario, [[*pieces, b"0\r\n\r\n"]], form=form, loop=loop)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=10),
    st.lists(st.integers(0, 5000), max_size=8),
    st.sampled_from([b"", b"X-Trailer: 1\r\n"]),
)
def test_odd_chunking_keeps_every_byte(events, cuts, trailer):
    """Whatever the upstream's chunks and reads are, the client gets the same bytes."""
    stream = SSE + b"".join(map(chunk, events)) + b"0\r\n" + trailer + b"\r\n"
    edges = [0, *sorted({cut % len(stream) for cut in cuts}), len(stream)]
    pieces = [piece for a, b in pairwise(edges) for piece in (stream[a:b], 0.001) if a < b]

    async def scenario(front, port):
        answer = await talk(port, post(extra=b"Connection: close\r\n"), quiet=5)
        head, _, rest = answer.partition(b"\r\n\r\n")
        assert (dechunk(rest) if b"chunked" in head else rest) == b"".join(events)

    through(scenario, [pieces])


def test_framings_of_an_answer():
    """Both framings at once, none at all, HTTP/1.0, 202 with an empty body, 204, 304, interim answers."""
    cases = [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
            b"abc",
            200,
        ),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end", 200),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 3\r\n\r\nabc", b"abc", 200),
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", b"", 202),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", 204),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b"", 304),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK_CLOSE, b"ok", 200),
    ]

    async def scenario(front, port):
        for _, body, status in cases:
            answer = await talk(port, post(extra=b"Connection: close\r\n"))
            head, _, rest = answer.partition(b"\r\n\r\n")
            assert int(head.split()[1]) == status, answer
            assert not (b"content-length" in head and b"transfer-encoding" in head)
            assert b"link" not in head
            assert (dechunk(rest) if b"chunked" in head else rest) == body
        assert b"content-length: 0" in await talk(port, post())

    closing = (b"until the end", b"HTTP/1.0")
    script = [[a, "close"] if any(mark in a for mark in closing) else [a] for a, _, _ in cases]
    through(scenario, [*script, [cases[3][0]]])


@BOTH
def test_an_upstream_error_is_passed_on_also_for_a_stream(form):
    body = b'{"error":{"message":"bad"}}'

    async def scenario(front, port):
        answer = await talk(port, post(b'{"stream":true}'))
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert answer.endswith(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert b"event-stream" not in answer

    through(scenario, [[b"HTTP/1.1 400 Nope\r\nContent-Length: %d\r\n\r\n" % len(body) + body]], form=form)


def test_head_request():
    async def scenario(front, port):
        answer = await talk(port, b"HEAD /x HTTP/1.1\r\nHost: a\r\n\r\n")
        assert answer.endswith(b"content-length: 1234\r\n\r\n")

    through(scenario, [[b"HTTP/1.1 200 OK\r\nContent-Length: 1234\r\n\r\n", "close"]])


FAILURES = {
    "closes without a word": ["close"],
    "resets": ["reset"],
    "half a head": [b"HTTP/1.1 200 OK\r\nConte", "close"],
    "garbage": [b"I am not HTTP\r\n\r\n"],
    "half a small body": [b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf", "close"],
    "gzip transfer coding": [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"],
    "unasked upgrade": [b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"],
    "endless head": [b"HTTP/1.1 200 OK\r\n" + b"X-A: 1\r\n" * 50_000],
}


@BOTH
@pytest.mark.parametrize("name", FAILURES)
def test_failure_before_the_first_byte_is_502_and_nothing_is_repeated(form, name):
    async def scenario(front, port):
        answer = await talk(port, post(b'{"n":1}'))
        assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n"), answer
        assert b'"code":"upstream_failed"' in answer
        assert front.raw.bodies == [b'{"n":1}'], "sent once"
        assert (await talk(port, post())).endswith(b"\r\n\r\nok"), "the next request is served"
        if form == "await":
            assert isinstance(front.errors[0], UpstreamFailed)
        else:
            assert front.outcomes[0].end is End.FAILED

    through(scenario, [FAILURES[name]], form=form)


@BOTH
def test_nobody_listens(form):
    async def scenario(front, port):
        await front.raw.stop()
        answer = await talk(port, post())
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert b"cannot connect" in answer
        assert front.upstream.counts(front.raw.url)["open"] == 0

    through(scenario, form=form)


@BOTH
@LOOPS
@pytest.mark.parametrize("how", ["close", "reset", "garbage"])
def test_failure_after_the_first_byte_cuts_the_client(form, loop, how):
    async def scenario(front, port):
        answer = await talk(port, post(), quiet=5)
        assert b"data: 1" in answer
        assert not answer.endswith(b"0\r\n\r\n")
        await until(lambda: front.outcomes)
        outcome = front.outcomes[0]
        assert outcome.end is End.CUT
        assert isinstance(outcome.error, UpstreamFailed)
        assert outcome.sent_bytes == len(b"data: 1\n\n")
        assert front.server.counters.cut == 1

    last = b"zz\r\n" if how == "garbage" else how
    through(scenario, [[SSE + chunk(b"data: 1\n\n"), 0.05, last]], form=form, loop=loop)


@BOTH
def test_a_large_body_cut_short_cuts_the_client(form):
    async def scenario(front, port):
        answer = await talk(port, post(), quiet=5)
        assert answer.startswith(b"HTTP/1.1 200 OK")
        assert len(answer) < 1_000_000
        assert front.outcomes[0].end is End.CUT

    half = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 500_000
    through(scenario, [[half, 0.05, "close"]], form=form)


@BOTH
@LOOPS
def test_deadline_before_the_first_byte(form, loop):
    async def scenario(front, port):
        answer = await talk(port, post(), quiet=5)
        assert answer.startswith(b"HTTP/1.1 504 Gateway Timeout\r\n")
        assert b'"code":"deadline"' in answer
        await until(lambda: front.raw.closed == 1)
        assert front.upstream.counts(front.raw.url)["open"] == 0

    through(scenario, [["wait"]], form=form, loop=loop, deadlines=Deadlines(0.1, 5))


@BOTH
def test_deadline_between_pieces(form):
    async def scenario(front, port):
        answer = await talk(port, post(), quiet=5)
        assert b"data: 1" in answer
        assert not answer.endswith(b"0\r\n\r\n")
        await until(lambda: front.raw.closed == 1)
        assert front.outcomes[0].end is End.CUT

    through(scenario, [[SSE + chunk(b"data: 1\n\n"), "wait"]], form=form, deadlines=Deadlines(5, 0.1))


@BOTH
@LOOPS
@pytest.mark.parametrize("started", [False, True])
def test_a_leaving_client_closes_the_upstream_at_once(form, loop, started):
    async def scenario(front, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post())
        if started:
            await reader.readuntil(b"data: 1\n\n")
        await until(lambda: front.raw.heads)
        writer.close()
        await until(lambda: front.raw.closed == 1)
        await until(lambda: front.outcomes)
        assert front.outcomes[0].end is End.CLIENT_GONE
        await until(lambda: front.server.open_connections == 0)

    through(scenario, [[SSE + chunk(b"data: 1\n\n"), "wait"] if started else ["wait"]], form=form, loop=loop)


@BOTH
def test_a_client_that_left_before_sending_reaches_no_upstream(form):
    """The request and the client's end of file arrive together: nothing is sent on."""

    async def scenario(front, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post() * 2)
        writer.write_eof()
        await reader.read()
        writer.close()
        await until(lambda: front.server.open_connections == 0)
        assert len(front.raw.heads) <= 1
        assert front.outcomes[-1].end is End.CLIENT_GONE

    through(scenario, [["wait"]], form=form)


@BOTH
@LOOPS
def test_a_slow_client_stops_the_reading_of_the_upstream(form, loop):
    sent = 0
    piece = chunk(b"x" * 100_000)

    class Counting(Raw):
        async def serve(self, reader, writer):
            nonlocal sent
            await reader.readuntil(b"{}")
            writer.write(SSE)
            for _ in range(300):
                writer.write(piece)
                await writer.drain()
                sent += 1
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            writer.close()

    async def main():
        raw = await Counting().start()
        front = Front(raw, form, Deadlines(5, 0.5), None, None)
        port = await front.server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(post(extra=b"Connection: close\r\n"))
        before = -1
        while before != sent or not sent:
            before = sent
            await asyncio.sleep(0.05)
        assert sent < 300
        await asyncio.sleep(0.6)  # the upstream's idle deadline must not run while the client is the slow one
        received = 0
        while data := await reader.read(1 << 20):
            received += len(data)
        assert received > 30_000_000
        await until(lambda: front.outcomes)
        assert front.outcomes[0].end is End.COMPLETE
        assert front.outcomes[0].sent_bytes == 30_000_000
        writer.close()
        await front.server.stop(0.2)
        await front.upstream.close()
        await raw.stop()

    async def bounded():
        await asyncio.wait_for(main(), 20)

    uvloop.run(bounded()) if loop == "uvloop" else asyncio.run(bounded())


def test_a_client_that_stops_reading_for_good_ends_both_sides():
    async def scenario(front, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 12)
        writer.write(post())
        await until(lambda: front.raw.closed == 1)
        await until(lambda: front.outcomes)
        assert front.outcomes[0].end is End.CLIENT_GONE
        writer.transport.abort()

    endless = [SSE, *[chunk(b"x" * 100_000)] * 400]
    through(scenario, [endless], limits=Limits(stall_seconds=0.2))


@BOTH
def test_buffered_gives_the_answer_to_the_caller(form):
    big = b'{"model":"served"}' + b" " * 600_000

    async def scenario(front, port):
        front.options["buffered"] = True
        if form == "callback":
            front.server.handler = lambda exchange: (
                relay(
                    exchange,
                    front.upstream,
                    front.raw.url,
                    "/v1/x",
                    lambda outcome: rewrite(exchange, outcome),
                    body=exchange.request.body,
                    buffered=True,
                )
                and None
            )
        else:

            async def handler(exchange):
                rewrite(exchange, await forward(exchange, front.upstream, front.raw.url, "/v1/x", buffered=True))

            front.server.handler = handler
        for _ in range(2):
            answer = await talk(port, post(extra=b"Connection: close\r\n"), quiet=5)
            assert answer.startswith(b"HTTP/1.1 201 Created\r\n")
            assert b'{"model":"logical"}' in answer
        assert (await talk(port, post(), quiet=5)).startswith(b"HTTP/1.1 502 ")

    def rewrite(exchange, outcome):
        response = outcome.response
        if response is None:
            return
        if b"served" not in response.body:
            raise UpstreamFailed("not JSON")
        exchange.respond(response.status, response.body.replace(b"served", b"logical"))

    small = b'HTTP/1.1 201 Created\r\nContent-Length: 18\r\n\r\n{"model":"served"}'
    large = b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(big) + b"0\r\n\r\n"
    through(scenario, [[small], [large[:300_000], 0.01, large[300_000:]], [OK_CLOSE]], form=form)


def test_a_buffered_answer_is_bounded():
    async def scenario(front, port):
        for _ in range(2):
            answer = await talk(port, post(), quiet=5)
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert b"over 300000 bytes" in answer

    large = b"HTTP/1.1 200 OK\r\nContent-Length: 400000\r\n\r\n" + b"x" * 400_000
    chunked = SSE + chunk(b"x" * 400_000)
    limits = UpstreamLimits(max_response_bytes=300_000)
    through(scenario, [[large], [chunked]], upstream_limits=limits, buffered=True)


def test_headers_can_be_dropped_added_and_replaced():
    async def scenario(front, port):
        front.server.handler = handler(front)
        answer = await talk(port, post(extra=b"Authorization: Bearer client\r\nX-Keep: 1\r\n"))
        head = front.raw.heads[0]
        assert b"authorization: Bearer engine\r\n" in head
        assert b"client" not in head
        assert b"x-keep: 1\r\n" in head
        assert answer.count(b"x-request-id") == 1
        assert b"x-request-id: ours\r\n" in answer

    def handler(front):
        def handle(exchange):
            exchange.add_header(b"x-request-id", b"ours")
            relay(
                exchange,
                front.upstream,
                front.raw.url,
                "/generate",
                front.outcomes.append,
                headers=exchange.request.headers,
                body=exchange.request.body,
                drop=frozenset({b"authorization"}),
                extra=b"authorization: Bearer engine\r\n",
            )

        return handle

    through(scenario, [[b"HTTP/1.1 200 OK\r\nX-Request-Id: theirs\r\nContent-Length: 0\r\n\r\n"]])


def test_own_headers_cannot_break_the_request():
    async def scenario(front, port):
        async def handler(exchange):
            with pytest.raises(ValueError, match="line break"):
                await forward(exchange, front.upstream, front.raw.url, "/", headers=[(b"x", b"1\r\ny: 2")])
            for base, path in [("ftp://a", "/"), (front.raw.url, "/a b"), ("http://u:p@h", "/"), (front.raw.url, "x")]:
                with pytest.raises(BadRequest):
                    await forward(exchange, front.upstream, base, path)
            exchange.respond(200)

        front.server.handler = handler
        assert (await talk(port, post())).startswith(b"HTTP/1.1 200")
        assert not front.raw.heads

    through(scenario)


def test_giving_up_from_outside():
    async def scenario(front, port):
        calls = []

        def handle(exchange):
            calls.append(relay(exchange, front.upstream, front.raw.url, "/g", front.outcomes.append, body=b"{}"))

        front.server.handler = handle
        client = asyncio.create_task(talk(port, post(), quiet=5))
        await until(lambda: front.raw.heads)
        calls[0].fail(UpstreamFailed("given up"))
        calls[0].fail(UpstreamFailed("twice"))
        await until(lambda: front.raw.closed == 1)
        await front.server.stop(1)
        assert b"given up" in await client
        assert len(front.outcomes) == 1

    through(scenario, [["wait"]])


def test_stopping_the_server_closes_the_upstream_side():
    async def scenario(front, port):
        client = asyncio.create_task(talk(port, post(), quiet=5))
        await until(lambda: front.raw.heads)
        await front.server.stop(0.05)
        await client
        await until(lambda: front.raw.closed == 1)
        assert front.outcomes[0].end is End.CLIENT_GONE

    through(scenario, [["wait"]])
