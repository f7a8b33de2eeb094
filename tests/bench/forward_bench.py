"""What forwarding costs: CPU-microseconds of the proxy's process tree per request and per SSE chunk, beside a peer's.

    python tests/bench/forward_bench.py [--router .../bin/sglang-router] [--seconds 4] [--rounds 3]

One static upstream, 32 connections, the proxy alone on one core, upstream and load on the other. Rounds of the
candidates alternate, so that a noisy machine disturbs all of them; medians are printed as one JSON document.
`relay` is this project's forwarder, `guarded` is the forwarder with an admission guard behind it (both counted),
`router` is sglang-router with retries and circuit breaker off.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import uvloop

from relax_slurm.forward import Exchange, HttpServer, Outcome, Upstream, relay
from sidecars.admission import AdmissionGuard

CONNECTIONS = 32
SSE_CHUNKS = 100
SSE_PERIOD_SECONDS = 0.004
TICKS = os.sysconf("SC_CLK_TCK")
BODY = json.dumps({"text": "x" * 200, "sampling_params": {"max_new_tokens": 16}}).encode()
ANSWER = json.dumps({"text": "y" * 200, "meta_info": {"id": "0" * 32, "finish_reason": {"type": "stop"}}}).encode()
INFO = {"model_path": "static", "served_model_name": "static", "tp_size": 1, "dp_size": 1, "version": "0"}


def announce(port: int) -> None:
    print(port, flush=True)


async def serve_upstream() -> None:
    """An engine that always answers the same."""

    async def stream(exchange: Exchange) -> None:
        exchange.start(200, [(b"content-type", b"text/event-stream")])
        for index in range(SSE_CHUNKS):
            await exchange.write(b'data: {"text": "token %d"}\n\n' % index)
            await asyncio.sleep(SSE_PERIOD_SECONDS)
        exchange.end()

    def handle(exchange: Exchange):
        request = exchange.request
        if request.path == "/generate":
            if b'"stream":true' in request.body.replace(b" ", b""):
                return stream(exchange)
            exchange.respond(200, ANSWER, [(b"content-type", b"application/json")])
        elif request.path in ("/server_info", "/model_info", "/get_server_info", "/get_model_info"):
            exchange.respond_json(200, INFO)
        else:
            exchange.respond_json(200, {"object": "list", "data": [{"id": "static", "object": "model"}]})
        return None

    announce(await HttpServer(handle).start())
    await asyncio.Event().wait()


async def serve_relay(target: str) -> None:
    upstream = Upstream()

    def done(outcome: Outcome) -> None:
        pass

    def handle(exchange: Exchange) -> None:
        request = exchange.request
        relay(exchange, upstream, target, "/generate", done, headers=request.headers, body=request.body)

    announce(await HttpServer(handle).start())
    await asyncio.Event().wait()


async def serve_guard(target: str) -> None:
    guard = AdmissionGuard(target, "engine-key", generation=1, is_alive=lambda: True)
    guard.open()
    announce(await guard.start("127.0.0.1"))
    await asyncio.Event().wait()


class Client(asyncio.Protocol):
    """One closed-loop connection: counts answers (or chunks) and sends the next request."""

    def __init__(self, request: bytes, chunked: bool, counts: dict[str, int]) -> None:
        self.request, self.chunked, self.counts = request, chunked, counts
        self.buffer = b""

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if self.chunked:
            self.counts["chunks"] += data.count(b"data: ")
            if not self.buffer.endswith(b"0\r\n\r\n"):
                self.buffer = self.buffer[-8:]
                return
        else:
            head, found, body = self.buffer.partition(b"\r\n\r\n")
            if not found or len(body) < len(ANSWER):
                return
            assert head.startswith(b"HTTP/1.1 200"), self.buffer
            assert body == ANSWER, self.buffer
        self.buffer = b""
        self.counts["requests"] += 1
        self.transport.write(self.request)

    def connection_lost(self, exc: Exception | None) -> None:
        self.counts["lost"] += 1


async def load(port: int, seconds: float, stream: bool, pids: list[int]) -> dict[str, float]:
    body = BODY[:-1] + b', "stream": true}' if stream else BODY
    request = (
        b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate\r\n"
        b"User-Agent: bench/1\r\nContent-Type: application/json\r\nX-Request-Id: 0123456789abcdef\r\n"
        b"X-SMG-Routing-Key: group-17\r\nContent-Length: %d\r\n\r\n%b" % (port, len(body), body)
    )
    counts = {"requests": 0, "chunks": 0, "lost": 0}
    loop = asyncio.get_running_loop()
    pairs = [
        await loop.create_connection(lambda: Client(request, stream, counts), "127.0.0.1", port)
        for _ in range(CONNECTIONS)
    ]
    await asyncio.sleep(min(1.0, seconds / 4))  # connections and caches are warm after this
    before, cpu, start = dict(counts), sum(map(cpu_seconds, pids)), time.perf_counter()
    await asyncio.sleep(seconds)
    spent, took = sum(map(cpu_seconds, pids)) - cpu, time.perf_counter() - start
    done = {key: counts[key] - before[key] for key in counts}
    for transport, _ in pairs:
        transport.abort()
    units = done["chunks" if stream else "requests"]
    if done["lost"] or not units:
        raise SystemExit(
            f"port {port}, stream {stream}: {done}; a lost connection or no answer makes the figures meaningless"
        )
    return {"cpu_us": 1e6 * spent / units, "per_second": units / took, "core_share": spent / took}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads and descendants."""
    total = 0
    pending = [pid]
    while pending:
        current = pending.pop()
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{current}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
            for task in Path(f"/proc/{current}/task").iterdir():
                pending += map(int, (task / "children").read_text().split())
    return total / TICKS


class Children:
    """Processes of one run, stopped by their ids."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def spawn(self, argv: list[str], core: int, *, quiet: bool = False) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            ["taskset", "-c", str(core), *argv],
            stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )
        self.processes.append(process)
        return process

    def serve(self, core: int, *args: str) -> tuple[int, int]:
        """(pid, port) of one of this file's servers."""
        process = self.spawn([sys.executable, __file__, *args], core)
        assert process.stdout is not None
        return process.pid, int(process.stdout.readline())

    def stop(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def start_router(children: Children, binary: str, target: str, core: int) -> tuple[int, int]:
    def free_port() -> int:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])

    port = free_port()
    command = [binary, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", target]
    command += ["--policy", "round_robin", "--disable-retries", "--disable-circuit-breaker"]
    command += ["--prometheus-port", str(free_port()), "--log-level", "error"]
    process = children.spawn(command, core, quiet=True)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/generate", BODY, {"content-type": "application/json"}
        )
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=2) as answer:
                if answer.status == 200:
                    return process.pid, port
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"{binary}: did not forward a request within 30 s")


def run(router: str | None, seconds: float, rounds: int) -> dict[str, object]:
    proxy_core, other_core = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {other_core})
    children = Children()
    try:
        _, upstream_port = children.serve(other_core, "upstream")
        target = f"http://127.0.0.1:{upstream_port}"
        relay_pid, relay_port = children.serve(proxy_core, "relay", target)
        guard_pid, guard_port = children.serve(proxy_core, "guard", target)
        front_pid, front_port = children.serve(proxy_core, "relay", f"http://127.0.0.1:{guard_port}")
        candidates = {"relay": ([relay_pid], relay_port), "guarded": ([front_pid, guard_pid], front_port)}
        if router:
            router_pid, router_port = start_router(children, router, target, proxy_core)
            candidates["router"] = ([router_pid], router_port)
        samples: dict[str, dict[str, list[dict[str, float]]]] = {
            name: {"request": [], "sse_chunk": []} for name in candidates
        }
        for _ in range(rounds):
            for name, (pids, port) in candidates.items():
                for kind in ("request", "sse_chunk"):
                    samples[name][kind].append(uvloop.run(load(port, seconds, kind == "sse_chunk", pids)))
    finally:
        children.stop()
    result: dict[str, object] = {"connections": CONNECTIONS, "seconds": seconds, "rounds": rounds}
    medians: dict[tuple[str, str], float] = {}
    for name, kinds in samples.items():
        result[name] = {}
        for kind, runs in kinds.items():
            figures = {key: round(statistics.median(one[key] for one in runs), 2) for key in runs[0]}
            medians[name, kind] = figures["cpu_us"]
            result[name][kind] = figures
    if router:
        result["ratio_to_router"] = {
            f"{name}_{kind}": round(medians[name, kind] / medians["router", kind], 3)
            for name, kind in medians
            if name != "router"
        }
    return result


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] in ("upstream", "relay", "guard"):
        server = {"upstream": serve_upstream, "relay": serve_relay, "guard": serve_guard}[sys.argv[1]]
        uvloop.run(server(*sys.argv[2:]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", help="sglang-router executable to compare with")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(run(options.router, options.seconds, options.rounds), indent=2))


if __name__ == "__main__":
    main()
