"""The HTTP server over real sockets: framing, order, limits, endings."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from itertools import pairwise

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.errors import RelaxError, Unauthorized, Unavailable
from relax_slurm.forward import ClientGone, Denied, Exchange, HttpServer, Limits
from relax_slurm.forward.reader import RequestReader

HEAD = b"Host: test\r\n"


async def echo(exchange: Exchange) -> None:
    request = exchange.request
    if request.path == "/stream":
        exchange.start(200, [(b"content-type", b"text/plain")])
        for piece in (b"one", b"", b"two", b"three"):
            await exchange.write(piece)
        exchange.end()
    else:
        exchange.respond_json(
            200, {"method": request.method, "path": request.path, "body": request.body.decode("latin-1")}
        )


def serve(scenario, handler=echo, limits=None, *, admit=None, loop="asyncio"):
    """Run `scenario(server, port)` against a server on a fresh loop."""

    async def main():
        server = HttpServer(handler, limits, admit)
        port = await server.start()
        try:
            return await asyncio.wait_for(scenario(server, port), 20)
        finally:
            await server.stop(0.2)

    return uvloop.run(main()) if loop == "uvloop" else asyncio.run(main())


async def talk(port: int, *pieces: bytes, half_close: bool = False, pause: float = 0.0) -> bytes:
    """Send the pieces, read until the server closes (or one second passes without a byte)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            if pause:
                await asyncio.sleep(pause)
        if half_close:
            writer.write_eof()
        received = b""
        while True:
            try:
                data = await asyncio.wait_for(reader.read(65536), 0.5)
            except TimeoutError:
                return received
            if not data:
                return received
            received += data
    finally:
        writer.close()


def statuses(answer: bytes) -> list[int]:
    return [int(code) for code in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def bodies(answer: bytes) -> list[dict]:
    """JSON bodies of consecutive answers with Content-Length."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        found.append(json.loads(rest[:length]) if length else None)
        answer = rest[length:]
    return found


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_answers_and_keeps_the_connection(loop):
    async def scenario(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for index in range(3):
            writer.write(b"POST /p%d HTTP/1.1\r\n" % index + HEAD + b"Content-Length: 2\r\n\r\nhi")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert b"connection:" not in head
            assert b"date: " in head
            body = json.loads(await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1])))
            assert body == {"method": "POST", "path": f"/p{index}", "body": "hi"}
        writer.close()
        assert server.counters.connections == 1
        assert server.counters.requests == 3

    serve(scenario, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_pipelined_requests_are_answered_in_order(loop):
    delays = {"/0": 0.03, "/1": 0.0, "/2": 0.01, "/3": 0.0}
    running = 0

    def handler(exchange):
        if exchange.request.path == "/3":
            exchange.respond_json(200, {"path": "/3"})
            return None
        return slow(exchange)

    async def slow(exchange):
        nonlocal running
        running += 1
        assert running == 1
        await asyncio.sleep(delays[exchange.request.path])
        running -= 1
        exchange.respond_json(200, {"path": exchange.request.path})

    async def scenario(server, port):
        stream = b"".join(b"GET /%d HTTP/1.1\r\n" % index + HEAD + b"\r\n" for index in range(4))
        answer = await talk(port, stream)
        assert [body["path"] for body in bodies(answer)] == ["/0", "/1", "/2", "/3"]
        answer = await talk(port, stream[:50], stream[50:], pause=0.01)
        assert [body["path"] for body in bodies(answer)] == ["/0", "/1", "/2", "/3"]

    serve(scenario, handler, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_thousands_of_pipelined_requests(loop):
    async def scenario(server, port):
        answer = await talk(port, (b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n") * 5000)
        assert len(statuses(answer)) == 5000

    serve(scenario, loop=loop)


def test_head_has_the_headers_of_get_and_no_body():
    async def scenario(server, port):
        answer = await talk(port, b"HEAD /a HTTP/1.1\r\n" + HEAD + b"\r\nGET /b HTTP/1.1\r\n" + HEAD + b"\r\n")
        first, second = answer.split(b"HTTP/1.1 200 OK\r\n")[1:]
        assert b"content-length: %d" % len(b'{"method":"HEAD","path":"/a","body":""}') in first
        assert first.endswith(b"\r\n\r\n")
        assert b'"/b"' in second
        answer = await talk(port, b"HEAD /stream HTTP/1.1\r\n" + HEAD + b"\r\nGET /b HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert b"one" not in answer
        assert statuses(answer) == [200, 200]

    serve(scenario)


@pytest.mark.parametrize("status", [204, 304])
def test_statuses_without_a_body(status):
    async def scenario(server, port):
        answer = await talk(port, (b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n") * 2)
        assert statuses(answer) == [status, status]
        assert b"content-length" not in answer
        assert b"body" not in answer

    serve(scenario, lambda exchange: exchange.respond(status, b"body"))


def test_http_1_0_closes_unless_asked_to_keep():
    async def scenario(server, port):
        answer = await talk(port, b"GET /a HTTP/1.0\r\n\r\n")
        assert b"connection: close" in answer
        answer = await talk(port, b"GET /stream HTTP/1.0\r\n\r\n")
        assert answer.endswith(b"\r\n\r\nonetwothree")
        assert b"transfer-encoding" not in answer
        kept = b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
        answer = await talk(port, kept + kept)
        assert statuses(answer) == [200, 200]
        assert answer.count(b"connection: keep-alive") == 2

    serve(scenario)


def test_connection_close_ends_after_the_answer_and_ignores_what_follows():
    async def scenario(server, port):
        request = b"GET /a HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n"
        answer = await talk(port, request + b"GET /b HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert statuses(answer) == [200]
        assert b"connection: close" in answer

    serve(scenario)


def test_chunked_answer_is_framed_per_write():
    async def scenario(server, port):
        answer = await talk(port, b"GET /stream HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert answer.endswith(b"\r\n\r\n3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n")

    serve(scenario)


def test_chunked_request_with_extensions_and_trailers():
    async def scenario(server, port):
        request = b"POST /c HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
        body = b"3;name=value\r\nabc\r\n1\r\nd\r\n0\r\nX-Trailer: 1\r\n\r\n"
        answer = await talk(port, (request + body) * 2)
        assert [answer["body"] for answer in bodies(answer)] == ["abcd", "abcd"]

    serve(scenario)


def test_one_byte_chunks():
    async def scenario(server, port):
        head = b"POST /c HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        answer = await talk(port, head + b"1\r\nx\r\n" * 3000 + b"0\r\n\r\n")
        assert bodies(answer)[0]["body"] == "x" * 3000

    serve(scenario)


def test_expect_continue():
    async def scenario(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /c HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        for _ in range(2):
            writer.write(head)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"ok")
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 OK")
            await reader.readuntil(b"}")
        writer.write(head + b"ok")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        writer.close()
        answer = await talk(port, head.replace(b"Length: 2", b"Length: 99999"))
        assert statuses(answer) == [413]
        assert statuses(await talk(port, head.replace(b"100-continue", b"miracles"))) == [417]

    serve(scenario, limits=Limits(max_body_bytes=1000))


def test_expect_continue_of_a_pipelined_request_comes_after_the_answer_before_it():
    async def slow(exchange):
        await asyncio.sleep(0.05)
        exchange.respond(200, exchange.request.body)

    async def scenario(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n" + HEAD + b"\r\n")
        writer.write(b"POST /c HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200 OK")
        writer.close()

    serve(scenario, slow)


GET = b"GET / HTTP/1.1\r\n"
POST = b"POST / HTTP/1.1\r\n"
REFUSED = {
    "both framings": (POST + HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "both framings, other order": (
        POST + HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        400,
    ),
    "two lengths": (POST + HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "the same length twice": (POST + HEAD + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
    "signed length": (POST + HEAD + b"Content-Length: +3\r\n\r\nabc", 400),
    "length list": (POST + HEAD + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "hex length": (POST + HEAD + b"Content-Length: 0x3\r\n\r\nabc", 400),
    "huge length": (POST + HEAD + b"Content-Length: 99999999999999999999999\r\n\r\nabc", 400),
    "bad chunk size": (POST + HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", 400),
    "chunked not last": (POST + HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n", 400),
    "gzip and chunked": (POST + HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "two transfer encodings": (POST + HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
    "chunked in HTTP/1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "space before the colon": (POST + HEAD + b"Content-Length : 3\r\n\r\nabc", 400),
    "no host": (GET + b"\r\n", 400),
    "two hosts": (GET + HEAD + b"Host: other\r\n\r\n", 400),
    "bare line feeds": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "folded header": (GET + HEAD + b"X-A: 1\r\n Content-Length: 5\r\n\r\n", 400),
    "NUL in a header": (GET + HEAD + b"X-A: a\0b\r\n\r\n", 400),
    "garbage": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "version 2.0": (b"GET / HTTP/2.0\r\n" + HEAD + b"\r\n", 505),
    "version 3.7": (b"GET / HTTP/3.7\r\n" + HEAD + b"\r\n", 400),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\n" + HEAD + b"\r\n", 400),
    "relative target": (b"GET index.html HTTP/1.1\r\n" + HEAD + b"\r\n", 400),
    "target is not UTF-8": (b"GET /%ff HTTP/1.1\r\n" + HEAD + b"\r\n", 400),
    "upgrade with a body": (POST + HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\nx", 501),
    "headers too large": (GET + HEAD + b"X-A: " + b"a" * 5000 + b"\r\n\r\n", 431),
    "target too large": (b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\n" + HEAD + b"\r\n", 431),
    "endless headers": (GET + HEAD + b"X-A: 12345\r\n" * 20000, 431),
    "endless header": (GET + HEAD + b"X-A: " + b"a" * 200_000, 431),
    "endless trailers": (
        POST + HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n" + b"X-T: 1\r\n" * 30_000,
        431,
    ),
    "endless chunk extension": (
        POST + HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1;" + b"a" * 200_000 + b"\r\nx\r\n",
        431,
    ),
    "body too large": (POST + HEAD + b"Content-Length: 1001\r\n\r\n", 413),
    "chunked body too large": (POST + HEAD + b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n" + b"a" * 1001, 413),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_an_answer_and_a_close(name):
    """Each bad request is answered once, the connection ends, and the server goes on."""
    stream, status = REFUSED[name]

    async def scenario(server, port):
        good = POST.replace(b"/", b"/good", 1) + HEAD + b"Content-Length: 2\r\n\r\nok"
        answer = await talk(port, stream)
        assert statuses(answer) == [status], answer
        assert b"connection: close" in answer
        error = bodies(answer)[0]["error"]
        assert set(error) >= {"message", "type", "code"}
        answer = await talk(port, good + stream)
        assert statuses(answer) == [200, status], "the good request before it is answered first"
        assert statuses(await talk(port, good)) == [200]
        assert server.counters.bad_requests == 2

    serve(scenario, limits=Limits(max_body_bytes=1000, max_header_bytes=4096, linger_seconds=0.1))


def test_a_large_upload_gets_its_413_without_being_read():
    """The client keeps sending for a while; it still sees the answer, not a reset."""

    async def scenario(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST + HEAD + b"Content-Length: 50000000\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert statuses(answer) == [413]
        for _ in range(50):
            writer.write(b"x" * 100_000)
            await writer.drain()
        writer.close()

    serve(scenario, limits=Limits(max_body_bytes=1000))


def test_body_up_to_the_limit_in_many_reads():
    async def scenario(server, port):
        size = 3_000_000
        answer = await talk(port, POST + HEAD + b"Content-Length: %d\r\n\r\n" % size + b"x" * size)
        assert answer.endswith(b"\r\n\r\n%d" % size)

    serve(
        scenario,
        lambda exchange: exchange.respond(200, b"%d" % len(exchange.request.body)),
        Limits(max_body_bytes=3_000_000),
    )


def test_slow_headers_and_slow_bodies_get_408_and_idle_ones_are_closed_silently():
    limits = Limits(head_seconds=0.15, body_seconds=0.2, keep_alive_seconds=0.25, linger_seconds=0.1)

    async def trickle(port, data):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def drip():
            for byte in data:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        task = asyncio.create_task(drip())
        answer = await asyncio.wait_for(reader.read(), 5)
        task.cancel()
        writer.close()
        return answer

    async def scenario(server, port):
        slow_head, slow_body, silent, idle = await asyncio.gather(
            trickle(port, GET + HEAD + b"X-A: " + b"a" * 100),
            trickle(port, POST + HEAD.replace(b"test", b"t") + b"Content-Length: 100\r\n\r\n" + b"a" * 100),
            trickle(port, b""),
            talk(port, GET + HEAD + b"\r\n"),
        )
        assert statuses(slow_head) == [408]
        assert statuses(slow_body) == [408]
        assert silent == b""
        assert statuses(idle) == [200]
        await asyncio.wait_for(until(lambda: server.open_connections == 0), 5)

    fast_head = Limits(head_seconds=1.5, body_seconds=0.2, keep_alive_seconds=0.25, linger_seconds=0.1)

    async def body_scenario(server, port):
        answer = await talk(port, POST + HEAD + b"Content-Length: 100\r\n\r\n" + b"a", b"a", b"a", pause=0.08)
        assert statuses(answer) == [408]
        assert b"its body" in answer

    serve(scenario, limits=limits)
    serve(body_scenario, limits=fast_head)


async def until(condition):
    """Wait for a condition that another callback makes true."""
    while not condition():
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_half_closed_client_still_gets_its_answers(loop):
    async def scenario(server, port):
        answer = await talk(port, (GET + HEAD + b"\r\n") * 2, half_close=True)
        assert statuses(answer) == [200, 200]
        assert await talk(port, b"GET / HT", half_close=True) == b""

    serve(scenario, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_leaving_client_is_noticed_while_the_handler_works(loop):
    seen = []

    async def handler(exchange):
        gone = asyncio.Event()
        exchange.on_gone(gone.set)
        await gone.wait()
        seen.append(exchange.gone)
        exchange.on_gone(lambda: seen.append("late"))
        exchange.start(200)
        with pytest.raises(ClientGone):
            await exchange.write(b"x")
        raise ClientGone

    async def scenario(server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + HEAD + b"\r\n")
        await until(lambda: server.counters.requests == 1)
        writer.close()
        await until(lambda: server.open_connections == 0)
        assert seen == [True, "late"]

    serve(scenario, handler, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_backpressure_holds_the_producer_until_the_client_reads(loop):
    produced = 0

    async def handler(exchange):
        nonlocal produced
        exchange.start(200)
        for _ in range(400):
            await exchange.write(b"x" * 100_000)
            produced += 1
        exchange.end()

    async def scenario(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        writer.write(GET + HEAD + b"Connection: close\r\n\r\n")
        await until(lambda: produced > 0)
        before = -1
        while before != produced:
            before = produced
            await asyncio.sleep(0.05)
        assert produced < 400
        received = len(await reader.read())
        assert received > 40_000_000
        assert produced == 400
        writer.close()

    serve(scenario, handler, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_never_reads_is_cut(loop):
    ended = []

    async def handler(exchange):
        exchange.start(200)
        try:
            while True:
                await exchange.write(b"x" * 100_000)
        except ClientGone:
            ended.append(exchange)
            raise

    async def scenario(server, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(GET + HEAD + b"\r\n")
            await until(lambda: ended)
            await until(lambda: server.open_connections == 0)
        assert server.counters.aborted + server.counters.cut == 1

    serve(scenario, handler, Limits(stall_seconds=0.2), loop=loop)


def test_handler_errors():
    class Odd(RelaxError):
        http_status = 503
        retry_after = 7
        code = "odd"

    async def handler(exchange):
        match exchange.request.path:
            case "/relax":
                raise Odd("no engine is ready; ask later")
            case "/bug":
                raise KeyError("x")
            case "/forgot":
                return
            case "/late":
                exchange.start(200)
                exchange.send(b"half")
                raise KeyError("x")
            case "/unfinished":
                exchange.start(200)
                exchange.send(b"half")
            case "/short":
                exchange.start(200, length=10)
                exchange.send(b"half")
                exchange.end()
            case "/long":
                exchange.start(200, length=2)
                exchange.send(b"half")
            case "/twice":
                exchange.respond(200)
                exchange.respond(200)
            case "/injection":
                exchange.respond(200, b"", [(b"x-a", b"1\r\nx-b: 2")])

    def plain(exchange):
        if exchange.request.path == "/sync":
            raise Unavailable("not now")
        exchange.add_header(b"x-request-id", b"id-1")
        return handler(exchange)

    async def scenario(server, port):
        async def get(path):
            return await talk(port, b"GET %b HTTP/1.1\r\n" % path + HEAD + b"\r\n")

        answer = await get(b"/relax")
        assert statuses(answer) == [503]
        assert b"retry-after: 7\r\n" in answer
        assert b"x-request-id: id-1\r\n" in answer
        assert bodies(answer) == [
            {"error": {"message": "no engine is ready; ask later", "type": "server_error", "code": "odd"}}
        ]
        assert b"connection: close" not in answer
        assert statuses(await get(b"/sync")) == [503]
        for path in (b"/bug", b"/forgot", b"/injection"):
            answer = await get(path)
            assert statuses(answer) == [500]
            assert b"connection: close" in answer
            assert b"KeyError" not in answer
        assert statuses(await get(b"/twice")) == [200]
        for path in (b"/late", b"/unfinished", b"/short", b"/long"):
            answer = await get(path)
            assert not answer.endswith(b"0\r\n\r\n"), "a cut answer never looks complete"

    serve(scenario, plain)


def test_full_server_refuses_politely_and_recovers():
    async def scenario(server, port):
        first = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: server.open_connections == 1)
        answer = await talk(port, GET + HEAD + b"\r\n")
        assert statuses(answer) == [503]
        assert b"retry-after: 1" in answer
        first[1].close()
        await until(lambda: server.open_connections == 0)
        assert statuses(await talk(port, GET + HEAD + b"\r\n")) == [200]
        assert server.counters.refused == 1

    serve(scenario, limits=Limits(max_connections=1, linger_seconds=0.1))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_stop_lets_running_answers_finish_and_cuts_the_rest(loop):
    release = []

    async def handler(exchange):
        event = asyncio.Event()
        release.append(event)
        await event.wait()
        exchange.respond(200, b"done")

    async def scenario(server, port):
        idle = await asyncio.open_connection("127.0.0.1", port)
        quick = asyncio.create_task(talk_long(port))
        await until(lambda: len(release) == 1)
        stuck = asyncio.create_task(talk_long(port))
        await until(lambda: len(release) == 2)
        stop = asyncio.create_task(server.stop(0.3))
        assert await idle[0].read() == b""
        idle[1].close()
        release[0].set()
        answer = await quick
        assert b"connection: close" in answer
        assert answer.endswith(b"done")
        await stop
        assert await stuck == b""
        assert server.open_connections == 0
        with pytest.raises(OSError, match=r"refused|Connect"):
            await asyncio.open_connection("127.0.0.1", port)

    async def talk_long(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET + HEAD + b"\r\n")
        try:
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    serve(scenario, handler, loop=loop)


def test_serves_on_a_given_socket():
    async def main():
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            server = HttpServer(echo)
            assert await server.start(sock=sock) == sock.getsockname()[1]
            assert statuses(await talk(sock.getsockname()[1], GET + HEAD + b"\r\n")) == [200]
            await server.stop()

    asyncio.run(main())


def test_request_view():
    seen = []

    def handler(exchange):
        seen.append(exchange.request)
        exchange.respond(200)

    async def scenario(server, port):
        target = b"/a%20b/%C3%A9?x=1&y=&x=2&z=%2F"
        await talk(port, b"GET %b HTTP/1.1\r\nhOsT: h\r\nX-A: 1\r\nx-a: 2\r\n\r\n" % target)
        await talk(port, b"GET http://other:1/p?q=1 HTTP/1.1\r\n" + HEAD + b"\r\n")
        await talk(port, b"OPTIONS * HTTP/1.1\r\n" + HEAD + b"\r\n")
        await talk(port, b"GET /u HTTP/1.1\r\n" + HEAD + b"Connection: upgrade\r\nUpgrade: h2c\r\n\r\nmore")
        first, second, third, fourth = seen
        assert first.path == "/a b/é"
        assert first.target == target
        assert first.query == {"x": "2", "y": "", "z": "/"}
        assert first.headers.get(b"host") == b"h"
        assert first.headers.get(b"x-a") == b"1"
        assert first.headers.get(b"missing") is None
        assert [value for name, value in first.headers if name == b"x-a"] == [b"1", b"2"]
        assert (second.path, second.query) == ("/p", {"q": "1"})
        assert third.path == "*"
        assert (fourth.path, fourth.keep_alive) == ("/u", False)

    serve(scenario, handler)


REQUEST = st.tuples(
    st.sampled_from(["GET", "POST", "PUT"]),
    st.text("abcz09-", min_size=1, max_size=12),
    st.binary(max_size=60),
    st.sampled_from(["length", "chunked", "tiny chunks"]),
)


def encode(method: str, path: str, body: bytes, framing: str) -> bytes:
    head = f"{method} /{path} HTTP/1.1\r\nHost: h\r\n".encode()
    if method == "GET":
        return head + b"\r\n"
    if framing == "length":
        return head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    step = 1 if framing == "tiny chunks" else max(len(body), 1)
    chunks = b"".join(
        b"%x\r\n%b\r\n" % (len(body[i : i + step]), body[i : i + step]) for i in range(0, len(body), step)
    )
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


@settings(max_examples=25, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=8), st.lists(st.integers(0, 2000), max_size=12))
def test_any_split_of_a_pipelined_stream_gives_the_same_requests(requests, cuts):
    stream = b"".join(encode(*request) for request in requests)
    edges = [0, *sorted({cut % (len(stream) + 1) for cut in cuts}), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(edges) if a < b]
    seen = []

    def handler(exchange):
        request = exchange.request
        seen.append((request.method, request.path, request.body))
        exchange.respond_json(200, {"n": len(seen)})

    async def scenario(server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        assert [body["n"] for body in bodies(answer)] == list(range(1, len(requests) + 1))

    serve(scenario, handler)
    expected = [(method, "/" + path, b"" if method == "GET" else body) for method, path, body, _ in requests]
    assert seen == expected


GARBAGE = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.lists(
        st.sampled_from(
            [
                b"GET / HTTP/1.1\r\n",
                b"Host: a\r\n",
                b"\r\n",
                b"Content-Length: 5\r\n",
                b"Transfer-Encoding: chunked\r\n",
                b"5\r\nabcde\r\n",
                b"0\r\n\r\n",
                b"\x00",
                b"POST /x HTTP/1.1\r\n",
                b"X:\xff\r\n",
                b":\r\n",
                b"Expect: 1\r\n",
                b"Connection: close\r\n",
                b"Upgrade: h2c\r\n",
                b"Connection: upgrade\r\n",
                b"HTTP/1.1 200 OK\r\n",
            ]
        ),
        min_size=1,
        max_size=15,
    ).map(b"".join),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(GARBAGE, min_size=1, max_size=4))
def test_garbage_never_stops_the_server(streams):
    async def scenario(server, port):
        for stream in streams:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(stream)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)
            writer.close()
        answer = await talk(port, POST + HEAD + b"Content-Length: 2\r\nConnection: close\r\n\r\nok")
        assert bodies(answer) == [{"method": "POST", "path": "/", "body": "ok"}]
        await until(lambda: server.open_connections == 0)

    serve(scenario)


# admission: who may send a body


def only_with_a_key(request):
    if request.headers.get(b"x-key") != b"right":
        raise Unauthorized("no key; send one")


def announce(path: str, *lines: bytes) -> bytes:
    return f"POST {path} HTTP/1.1\r\n".encode() + HEAD + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("framing", [b"Content-Length: 60000000", b"Transfer-Encoding: chunked"])
def test_a_refused_head_is_answered_before_its_body(framing, loop):
    async def scenario(server, port):
        # the body never comes: the answer does
        for lines in ((framing,), (framing, b"Expect: 100-continue"), (framing, b"x-key: wrong")):
            answer = await talk(port, announce("/", *lines))
            assert statuses(answer) == [401]
            assert b"connection: close\r\n" in answer
            assert bodies(answer)[0]["error"]["code"] == "unauthorized"
        assert server.counters.requests == 0
        assert server.counters.bad_requests == 3

    serve(scenario, lambda exchange: pytest.fail("reached the handler"), admit=only_with_a_key, loop=loop)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_refused_bodies_are_never_held(loop):
    async def flood(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(announce("/", b"Content-Length: 60000000"))
            for _ in range(8):
                writer.write(bytes(256 * 1024))
                await writer.drain()
            return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        finally:
            writer.close()

    async def scenario(server, port):
        answers = await asyncio.gather(*(flood(port) for _ in range(10)))
        assert all(answer.startswith(b"HTTP/1.1 401 ") for answer in answers)
        assert peak == [0]
        assert server.buffered_bytes == 0

    peak = [0]
    feed = RequestReader.on_body

    def on_body(reader, piece):
        peak[0] += len(piece)
        feed(reader, piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RequestReader, "on_body", on_body)
        serve(scenario, admit=only_with_a_key, loop=loop)


def test_admitted_bodies_and_requests_without_one_reach_the_handler():
    async def scenario(server, port):
        first = announce("/a", b"x-key: right", b"Content-Length: 2") + b"hi"
        chunked = announce("/b", b"x-key: right", b"Transfer-Encoding: chunked") + b"2\r\nhi\r\n0\r\n\r\n"
        empty = announce("/c", b"Content-Length: 0")
        refused = announce("/d", b"Content-Length: 5") + b"GET /e HTTP/1.1\r\n" + HEAD + b"\r\n"
        answer = await talk(port, first + chunked + empty + b"GET /x HTTP/1.1\r\n" + HEAD + b"\r\n" + refused)
        assert statuses(answer) == [200, 200, 200, 200, 401]
        assert [body.get("body") for body in bodies(answer)[:3]] == ["hi", "hi", ""]
        assert server.buffered_bytes == 0

    serve(scenario, admit=only_with_a_key)


def test_an_admission_can_put_headers_on_its_refusal_and_may_be_broken(caplog):
    def admit(request):
        if request.path == "/broken":
            raise ValueError("secret detail")
        raise Denied(Unavailable("full; try again"), b"x-why: full\r\n")

    async def scenario(server, port):
        answer = await talk(port, announce("/", b"Content-Length: 5"))
        assert statuses(answer) == [503]
        assert b"\r\nx-why: full\r\n" in answer
        assert b"\r\nretry-after: " in answer
        answer = await talk(port, announce("/broken", b"Content-Length: 5"))
        assert statuses(answer) == [500]
        assert b"secret" not in answer

    serve(scenario, admit=admit)
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_all_bodies_together_have_a_limit(loop):
    release = asyncio.Event()

    async def hold(exchange):
        await release.wait()
        exchange.respond_json(200, {"size": len(exchange.request.body)})

    async def scenario(server, port):
        readers = []
        for sent in (4000, 3000, 2000):  # one complete and being answered, two half way
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(announce("/", b"Content-Length: 4000") + bytes(sent))
            readers.append((reader, writer))
        while server.buffered_bytes != 9000:
            await asyncio.sleep(0.002)
        answer = await talk(port, announce("/", b"Content-Length: 1001") + bytes(1001))
        assert statuses(answer) == [503]
        assert b"\r\nretry-after: " in answer
        assert b"\r\nconnection: close\r\n" in answer
        assert server.buffered_bytes == 9000  # what was refused is given back
        readers[2][1].close()  # and what leaves
        while server.buffered_bytes != 7000:
            await asyncio.sleep(0.002)
        readers[1][1].write(bytes(1000))
        while server.counters.requests != 2:
            await asyncio.sleep(0.002)
        release.set()
        for reader, writer in readers[:2]:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert b"4000" in await reader.readuntil(b"}")
            assert server.buffered_bytes in (0, 4000)
            writer.close()
        assert server.buffered_bytes == 0
        # a client that resets its connection while it is being answered, and one that only closes its side
        for count, reset in ((3, True), (4, False)):
            release.clear()
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(announce("/", b"Content-Length: 10000") + bytes(10000))
            while server.counters.requests != count:
                await asyncio.sleep(0.002)
            assert server.buffered_bytes == 10000
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                release.set()
            writer.transport.abort()
            while server.buffered_bytes:
                await asyncio.sleep(0.002)
        release.set()

    serve(scenario, hold, Limits(max_buffered_bytes=10_000), loop=loop)
