"""A router that a test directs: the control calls of sglang-router 0.3.2, as seen on the real one."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from relax_slurm.config.models import RouterConfig
from relax_slurm.control.router_program import RouterProgram
from relax_slurm.forward import Exchange, HttpServer

KEY = "engine-key"


@dataclass
class FakeRouter:
    """Workers by id, and what was asked for. `slow`, `refuse` and `mute` make it misbehave."""

    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    """URLs whose registration stays under way."""
    refuse: set[str] = field(default_factory=set)
    """URLs whose registration fails."""
    mute: bool = False
    """Answers nothing at all."""
    unhealthy: bool = False
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def handle(self, exchange: Exchange) -> None:
        """One call."""
        request = exchange.request
        if self.mute:
            return
        self.calls.append((request.method, request.path))
        if request.path == "/readiness":
            exchange.respond_json(200 if self.serves else 503, {})
            return
        if request.path == "/liveness":
            exchange.respond_json(200, {})
            return
        assert request.headers.get(b"authorization") == b"Bearer " + KEY.encode()
        worker_id = request.path.removeprefix("/workers").removeprefix("/")
        if request.method == "POST":
            body = json.loads(request.body)
            assert body["api_key"] == KEY
            worker_id = f"id-{next(self.numbers)}"
            self.workers[worker_id] = body
            exchange.respond_json(202, {"status": "accepted", "worker_id": worker_id})
        elif worker_id not in self.workers:
            exchange.respond_json(404, {"code": "WORKER_NOT_FOUND"})
        elif request.method == "DELETE":
            del self.workers[worker_id]
            exchange.respond_json(202, {"status": "accepted"})
        else:
            exchange.respond_json(200, self._shown(self.workers[worker_id]))

    @property
    def serves(self) -> bool:
        """Whether a registered worker is healthy."""
        return not self.unhealthy and any(self.registered(worker) for worker in self.workers.values())

    def registered(self, worker: dict[str, Any]) -> bool:
        """Whether its registration is through."""
        return worker["url"] not in self.slow | self.refuse

    def urls(self) -> list[str]:
        """URLs of all workers that are registered."""
        return sorted(worker["url"] for worker in self.workers.values() if self.registered(worker))

    def _shown(self, worker: dict[str, Any]) -> dict[str, Any]:
        if self.registered(worker):
            return {"worker_type": worker["worker_type"], "is_healthy": not self.unhealthy}
        status = "failed" if worker["url"] in self.refuse else "processing"
        return {"worker_type": "unknown", "is_healthy": False, "job_status": {"status": status, "message": "no"}}


class FakeProcess:
    """The process of a router: a shell that ends as told; what it would serve is served by `FakeRouter`."""

    def __init__(self, process: asyncio.subprocess.Process, server: HttpServer) -> None:
        self.pid = process.pid
        self._process, self._server = process, server

    @property
    def returncode(self) -> int | None:
        """Part of a process."""
        return self._process.returncode

    async def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = await self._process.wait()
        await self._server.stop(0.0)
        return code

    def end(self, code: int) -> None:
        """End it by itself."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"%d\n" % code)


class FakeProgram:
    """Stands for `RouterProgram`: every start is a fresh `FakeRouter` on a port of its own."""

    def __init__(self, *, disaggregated: bool = False, code: int | None = None) -> None:
        self.model, self.key, self.host, self.log = "m", KEY, "127.0.0.1", Path("head_router_m.log")
        self.disaggregated = disaggregated
        self.routers: list[FakeRouter] = []
        self.processes: list[FakeProcess] = []
        self.asked: list[set[int]] = []
        """Ports that were not to be chosen, start by start."""
        self._code = code
        self._server: HttpServer | None = None

    def choose_ports(self, taken: set[int]) -> tuple[int, int]:
        """Part of RouterProgram; the port is known once the server listens."""
        self.asked.append(set(taken))
        return 0, 0

    async def start(self, port: int, metrics_port: int) -> FakeProcess:
        """Part of RouterProgram."""
        self.routers.append(FakeRouter())
        server = HttpServer(self.routers[-1].handle)
        self.port = await server.start()
        shell = await asyncio.create_subprocess_exec("sh", "-c", "read code; exit $code", stdin=asyncio.subprocess.PIPE)
        self.processes.append(FakeProcess(shell, server))
        if self._code is not None:
            self.processes[-1].end(self._code)
            await shell.wait()
        return self.processes[-1]

    def missing(self, why: str) -> Exception:
        """Part of RouterProgram."""
        return program(Path(".")).missing(why)

    def as_program(self) -> RouterProgram:
        """Itself, under the name that the keeper wants."""
        return cast(RouterProgram, self)


def program(logs: Path, **changes: Any) -> RouterProgram:
    """A real program with the defaults."""
    values: dict[str, Any] = {
        "model": "m",
        "python": "/no/such/python",
        "host": "127.0.0.1",
        "ports": (23_999, 23_998, 23_997),
        "log": logs / "head_router_m.log",
        "key": KEY,
        "settings": RouterConfig(),
        "disaggregated": False,
        "request_seconds": 12.5,
        "max_body_mb": 1.0,
    }
    return RouterProgram(**values | changes)
