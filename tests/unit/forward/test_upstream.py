"""The connection pool and small control calls, over real sockets."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess

import pytest
import uvloop

from relax_slurm.errors import BadRequest, DeadlineExceeded, Unavailable, UpstreamFailed
from relax_slurm.forward import HttpServer, Upstream, UpstreamLimits


async def until(condition):
    while not condition():
        await asyncio.sleep(0.005)


class Engine:
    """A real server whose answers wait for `release`."""

    def __init__(self):
        self.release = asyncio.Event()
        self.paths: list[str] = []
        self.left = 0
        self.server = HttpServer(self.handle)
        self.url = ""

    async def start(self):
        self.url = f"http://127.0.0.1:{await self.server.start()}"
        return self

    async def handle(self, exchange):
        request = exchange.request
        self.paths.append(request.path)
        if request.path.startswith("/wait"):
            exchange.on_gone(self.count_left)
            await self.release.wait()
        exchange.respond_json(
            200, {"path": request.path, "query": request.query, "body": request.body.decode(), "method": request.method}
        )

    def count_left(self):
        self.left += 1
        self.release.set()


def run(scenario, limits=None, *, loop="asyncio", **options):
    async def main():
        engine = await Engine().start()
        upstream = Upstream(limits, **options)
        try:
            return await asyncio.wait_for(scenario(engine, upstream), 20)
        finally:
            await upstream.close()
            await engine.server.stop(0.1)

    return uvloop.run(main()) if loop == "uvloop" else asyncio.run(main())


LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])


@LOOPS
def test_control_calls(loop, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")

    async def scenario(engine, upstream):
        answer = await upstream.request("GET", engine.url + "/health?x=1")
        assert (answer.status, answer.body) == (200, b'{"path":"/health","query":{"x":"1"},"body":"","method":"GET"}')
        assert answer.headers.get(b"content-type") == b"application/json"
        answer = await upstream.request("POST", engine.url + "/flush", [(b"x-a", b"1")], b"{}")
        assert b'"body":"{}"' in answer.body
        answer = await upstream.request("HEAD", engine.url)
        assert (answer.status, answer.body) == (200, b"")
        big = b"x" * 2_000_000
        assert len((await upstream.request("POST", engine.url + "/big", body=big)).body) > len(big)

    run(scenario, loop=loop)


@LOOPS
def test_deadline_closes_the_connection(loop):
    async def scenario(engine, upstream):
        with pytest.raises(DeadlineExceeded):
            await upstream.request("GET", engine.url + "/wait", timeout_seconds=0.05)
        await until(lambda: engine.left == 1)
        assert upstream.counts(engine.url) == {"open": 0, "idle": 0, "waiting": 0}

    run(scenario, loop=loop)


@LOOPS
def test_cancelling_the_caller_closes_the_connection(loop):
    async def scenario(engine, upstream):
        task = asyncio.create_task(upstream.request("GET", engine.url + "/wait"))
        await until(lambda: engine.paths)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: engine.left == 1)

    run(scenario, loop=loop)


@LOOPS
def test_bounded_connections_serve_everybody_in_order(loop):
    async def scenario(engine, upstream):
        calls = [asyncio.create_task(upstream.request("GET", f"{engine.url}/wait/{index}")) for index in range(10)]
        await until(lambda: len(engine.paths) == 2)
        assert upstream.counts(engine.url) == {"open": 2, "idle": 0, "waiting": 8}
        engine.release.set()
        assert all(answer.status == 200 for answer in await asyncio.gather(*calls))
        assert engine.paths[2:] == [f"/wait/{index}" for index in range(2, 10)]
        assert engine.server.counters.connections == 2

    run(scenario, UpstreamLimits(max_connections_per_origin=2), loop=loop)


def test_too_many_waiting_calls_are_refused_and_the_rest_can_time_out():
    async def scenario(engine, upstream):
        first = asyncio.create_task(upstream.request("GET", engine.url + "/wait"))
        await until(lambda: engine.paths)
        second = asyncio.create_task(upstream.request("GET", engine.url + "/2", timeout_seconds=0.1))
        await until(lambda: upstream.counts(engine.url)["waiting"] == 1)
        with pytest.raises(Unavailable, match="1 requests wait"):
            await upstream.request("GET", engine.url + "/3")
        with pytest.raises(DeadlineExceeded):
            await second
        assert upstream.counts(engine.url)["waiting"] == 0
        engine.release.set()
        await first
        assert engine.paths == ["/wait"], "nothing was sent for the others"

    run(scenario, UpstreamLimits(max_connections_per_origin=1, max_waiting_per_origin=1))


def test_a_waiting_call_gets_a_connection_when_another_is_lost():
    async def scenario(engine, upstream):
        first = asyncio.create_task(upstream.request("GET", engine.url + "/wait"))
        await until(lambda: engine.paths)
        second = asyncio.create_task(upstream.request("GET", engine.url + "/2"))
        await until(lambda: upstream.counts(engine.url)["waiting"] == 1)
        first.cancel()
        assert (await second).status == 200

    run(scenario, UpstreamLimits(max_connections_per_origin=1))


def test_calls_that_wait_for_a_dead_server_all_fail():
    async def scenario(engine, upstream):
        await engine.server.stop(0.1)
        calls = [asyncio.create_task(upstream.request("GET", engine.url)) for _ in range(5)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, UpstreamFailed) for result in results)
        assert upstream.counts(engine.url) == {"open": 0, "idle": 0, "waiting": 0}

    run(scenario, UpstreamLimits(max_connections_per_origin=2))


@LOOPS
def test_connection_set_up_is_bounded(loop):
    """A listener whose backlog is full does not answer; the call fails long before its own deadline."""
    import socket

    async def scenario(engine, upstream):
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            port = listener.getsockname()[1]
            fillers = []
            for _ in range(4):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            with pytest.raises(UpstreamFailed, match="no connection within"):
                await upstream.request("GET", f"http://127.0.0.1:{port}/")
            for filler in fillers:
                filler.close()

    run(scenario, UpstreamLimits(connect_seconds=0.2), loop=loop)


@LOOPS
def test_idle_connections_are_closed(loop):
    async def scenario(engine, upstream):
        await upstream.request("GET", engine.url)
        assert upstream.counts(engine.url) == {"open": 1, "idle": 1, "waiting": 0}
        await until(lambda: engine.server.open_connections == 0)
        assert upstream.counts(engine.url) == {"open": 0, "idle": 0, "waiting": 0}

    run(scenario, UpstreamLimits(idle_seconds=0.05), loop=loop)


@LOOPS
def test_a_stale_connection_is_noticed_before_it_is_used(loop):
    """The server closes the idle connection while our loop is busy: the POST goes out once, on a new one."""
    import socket
    import threading

    bodies = []
    closed = threading.Event()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def serve():
        for _ in range(2):
            connection, _ = listener.accept()
            data = b""
            while not data.endswith(b"{}"):
                data += connection.recv(1000)
            bodies.append(data)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            if len(bodies) == 1:
                go.wait()
            connection.close()
            closed.set()

    go = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()

    async def scenario(engine, upstream):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert (await upstream.request("POST", url, body=b"{}")).status == 200
        await asyncio.sleep(0.02)
        go.set()
        closed.wait()  # blocks the loop on purpose: it cannot see the end of file before the next request
        assert (await upstream.request("POST", url, body=b"{}")).status == 200
        assert len(bodies) == 2

    try:
        run(scenario, loop=loop)
    finally:
        thread.join()
        listener.close()


@LOOPS
def test_bytes_nobody_asked_for_spoil_a_connection(loop):
    connections = 0

    async def serve(reader, writer):
        nonlocal connections
        connections += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
                writer.write(answer + (answer if connections == 1 else b""))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def scenario(engine, upstream):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(4):
            assert (await upstream.request("GET", url)).body == b"ok"
        assert connections == 2
        await upstream.close()
        server.close()

    run(scenario, loop=loop)


def test_an_answer_that_overtakes_a_large_request_ends_its_connection():
    async def serve(reader, writer):
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
            await reader.read()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def scenario(engine, upstream):
        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 10)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        answer = await upstream.request("POST", url, body=b"x" * 20_000_000)
        assert answer.status == 413
        await until(lambda: upstream.counts(url)["open"] == 0)
        server.close()

    run(scenario)


def test_closing_the_pool_fails_what_runs():
    async def scenario(engine, upstream):
        first = asyncio.create_task(upstream.request("GET", engine.url + "/wait"))
        await until(lambda: engine.paths)
        second = asyncio.create_task(upstream.request("GET", engine.url + "/2"))
        await until(lambda: upstream.counts(engine.url)["waiting"] == 1)
        await upstream.close()
        for task in (first, second):
            with pytest.raises(UpstreamFailed, match="closed"):
                await task
        with pytest.raises(Unavailable, match="closed"):
            await upstream.request("GET", engine.url)

    run(scenario, UpstreamLimits(max_connections_per_origin=1))


@pytest.mark.parametrize(
    "url",
    ["ftp://a/", "http://", "//a", "http://a:99999/", "http://u:p@a/", "http://ä/", "http://a/ b", "http://a/é", "a"],
)
def test_urls_that_are_refused(url):
    async def scenario(engine, upstream):
        with pytest.raises(BadRequest):
            await upstream.request("GET", url)

    run(scenario)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command to make a certificate")
@LOOPS
def test_https(loop, tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(certificate, key)
    client_side = ssl.create_default_context(cafile=str(certificate))

    async def serve(reader, writer):
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def scenario(engine, upstream):
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_side)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        for _ in range(2):
            assert (await upstream.request("GET", url)).body == b"ok"
            await asyncio.sleep(0.02)  # long enough for the connection to be looked at before it is used again
        assert upstream.counts(url)["open"] == 1
        stranger = Upstream()
        with pytest.raises(UpstreamFailed, match="cannot connect"):
            await stranger.request("GET", url)
        await stranger.close()
        await upstream.close()
        server.close()

    run(scenario, loop=loop, ssl_context=client_side)
