"""A gateway in front of engines that do as they are told, all on real sockets of the loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx

from relax_slurm.core.discovery import EngineEntry, ModelEntry, ReplicaState, RoleSnapshot, RoutingSpec
from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.forward import Exchange, HttpServer, Request, Upstream
from relax_slurm.gateway import Gateway, GatewaySettings

TOKEN = "secret-token"
SERVED = "org/served-model"
READY = ReplicaState.READY
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": SERVED,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Paris"}}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
Script = Callable[[Exchange], Awaitable[None] | None]


def echo(exchange: Exchange) -> None:
    """Answers with what it got."""
    request = exchange.request
    exchange.respond_json(
        200,
        {
            "path": request.path,
            "body": request.body.decode(),
            "headers": [[name.decode(), value.decode("latin-1")] for name, value in request.headers],
        },
    )


def complete(exchange: Exchange) -> None:
    """Answers every chat request alike."""
    exchange.respond_json(200, COMPLETION)


def answers(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> Script:
    """A script that always gives the same answer."""
    return lambda exchange: exchange.respond(status, body, headers)


class Engine:
    """A server whose `script` may be exchanged at any time; keeps the requests that it saw."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.server = HttpServer(self._handle)
        self.url = ""

    def _handle(self, exchange: Exchange) -> Awaitable[None] | None:
        self.requests.append(exchange.request)
        return self.script(exchange)

    @property
    def body(self) -> Any:
        """The last request's body, decoded."""
        return json.loads(self.requests[-1].body)


@dataclass
class Source:
    """A snapshot source that is set by hand."""

    views: dict[Role, RoleSnapshot | None] = field(default_factory=dict)
    invalidated: list[Role] = field(default_factory=list)
    looks: int = 0
    before_look: Callable[[int], None] = lambda look: None

    def current(self, role: Role) -> RoleSnapshot | None:
        self.looks += 1
        self.before_look(self.looks)
        return self.views.get(role)

    def invalidate(self, role: Role) -> None:
        self.invalidated.append(role)


def view(role: Role, urls: list[str], **changes: Any) -> RoleSnapshot:
    """A READY role with the model `math` (alias `maths`, route key `math-data`) on the given URLs."""
    engines = tuple(EngineEntry(f"math/replica-{i}", url, READY, True, 1) for i, url in enumerate(urls))
    model = ModelEntry("math", READY, RouteMode.DIRECT, None, WeightSource.STATIC, None, SERVED, engines)
    routing = RoutingSpec("math", {"math-data": "math"}, {"maths": "math"})
    return RoleSnapshot(role, "000001-abcdef", 1, routing, {"math": replace(model, **changes)})


@dataclass
class Stage:
    """Everything that a test needs."""

    engine: Engine
    source: Source
    gateway: Gateway
    url: str
    client: httpx.AsyncClient
    """Sends the token."""
    stranger: httpx.AsyncClient
    """Does not."""

    def show(self, **changes: Any) -> None:
        """Publish all roles again with the model changed."""
        for role in Role:
            self.source.views[role] = view(role, [self.engine.url], **changes)


@asynccontextmanager
async def stage(script: Script = echo, **settings: Any) -> AsyncIterator[Stage]:
    """One engine, one gateway, two clients."""
    engine = Engine(script)
    engine.url = f"http://127.0.0.1:{await engine.server.start()}"
    source = Source()
    gateway = Gateway(source, Upstream(), GatewaySettings(**{"token": TOKEN, "engine_key": "engine-key", **settings}))
    url = f"http://127.0.0.1:{await gateway.start()}"
    auth = {"authorization": f"Bearer {TOKEN}"}
    async with (
        httpx.AsyncClient(base_url=url, headers=auth, trust_env=False, timeout=20) as client,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=20) as stranger,
    ):
        held = Stage(engine, source, gateway, url, client, stranger)
        held.show()
        try:
            yield held
        finally:
            await gateway.stop(0.2)
            await engine.server.stop(0.2)


def run(test: Callable[[Stage], Coroutine[Any, Any, None]], script: Script = echo, **settings: Any) -> None:
    """Run one asynchronous test on a fresh stage."""

    async def on_stage() -> None:
        async with stage(script, **settings) as held:
            await test(held)

    asyncio.run(on_stage())
