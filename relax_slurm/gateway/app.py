"""One handler for three roles: check the token, find the row of the route table, answer or send on."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable
from hmac import compare_digest
from itertools import count
from time import monotonic, perf_counter

from relax_slurm.core.discovery import SnapshotSource
from relax_slurm.core.plan import Role
from relax_slurm.errors import NotBuilt, NotFound, RelaxError, Unauthorized
from relax_slurm.forward.exchange import Exchange
from relax_slurm.forward.http import Limits, Request, render
from relax_slurm.forward.reader import Denied
from relax_slurm.forward.server import HttpServer
from relax_slurm.forward.upstream import Upstream
from relax_slurm.gateway import views
from relax_slurm.gateway.generation import Asking, Generation
from relax_slurm.gateway.metrics import Metrics
from relax_slurm.gateway.routes import Kind, Route, find
from relax_slurm.gateway.settings import GatewaySettings

WATCH_SECONDS = 1.0
"""Time between two looks for requests at engines that are lost."""
_TEXT = ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),)
_CHALLENGE = (b"www-authenticate", b"Bearer")
_HTML = ((b"content-type", b"text/html; charset=utf-8"),)


class Gateway:
    """Answers HTTP for all roles of a run. Keeps no state but cursors, counters and connections.

    `snapshots` says what is known; while it has no view of a role, that role's requests are answered 503. `handle`
    is the handler of an `HttpServer`; `start` and `stop` run one as the settings say.
    """

    def __init__(self, snapshots: SnapshotSource, upstream: Upstream, settings: GatewaySettings) -> None:
        self.metrics = Metrics()
        self.settings = settings
        self._snapshots = snapshots
        self._upstream = upstream
        self._generation = Generation(snapshots, upstream, settings, self.metrics)
        self._token = None if settings.token is None else settings.token.encode()
        self._ids = count(1)
        self._id_prefix = secrets.token_hex(6).encode()
        self._watching: asyncio.Task[None] | None = None
        self._server = HttpServer(self.handle, Limits(max_body_bytes=settings.max_body_bytes), self._admit)

    async def start(self, sock: socket.socket | None = None) -> int:
        """Listen, on `sock` when it is given; the port. OSError when the address cannot be had."""
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return await self._server.start(self.settings.host, self.settings.port, sock)

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """Give running answers `grace_seconds`, then close every connection."""
        await self._server.stop(grace_seconds)
        if self._watching is not None:
            self._watching.cancel()
        await self._generation.close()
        await self._upstream.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._generation.give_up_lost(monotonic())

    def handle(self, exchange: Exchange) -> None:
        """Answer now, or arrange that the relay will."""
        request = exchange.request
        started = perf_counter()
        request_id = self._request_id(request.headers.get(b"x-request-id"))
        exchange.add_header(b"x-request-id", request_id)
        role, kind = "", "none"
        try:
            if request.path != "/health":
                self._authorize(request)
            route = find(request.method, request.path)
            role, kind = route.role or "", route.kind
            if route.role is not None and route.role not in self.settings.roles:
                raise NotFound(f"this run has no role {role}, only {', '.join(self.settings.roles)}")
            if route.role is not None and kind in (Kind.GENERATE, Kind.CHAT):
                errand = self._generation.prepare(route.role, kind, request.body, _affinity_key(exchange))
                if isinstance(errand, Asking):
                    self._generation.ask(exchange, kind, errand, request_id, started)
                else:
                    self._generation.send(exchange, kind, errand, request_id, started)
                return
            self._answer(exchange, route)
        except RelaxError as error:
            if isinstance(error, Unauthorized):
                exchange.add_header(*_CHALLENGE)
            exchange.respond_error(error)
        self.metrics.finished((role, kind), exchange.status, perf_counter() - started)

    def _admit(self, request: Request) -> None:
        """Who may not ask may not fill the memory with a body either, not even on the way to an open route."""
        started = perf_counter()
        try:
            self._authorize(request)
        except Unauthorized as error:
            request_id = self._request_id(request.headers.get(b"x-request-id"))
            self.metrics.finished(("", "none"), error.http_status, perf_counter() - started)
            raise Denied(error, render(((b"x-request-id", request_id), _CHALLENGE))) from error

    def _authorize(self, request: Request) -> None:
        if self._token is None:
            return
        scheme, _, given = (request.headers.get(b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not compare_digest(given.strip(), self._token):
            raise Unauthorized("no valid bearer token; send 'Authorization: Bearer' with the run's token")

    def _request_id(self, given: bytes | None) -> bytes:
        """The client's id when it is printable and short, else a new one."""
        if given and len(given) <= 200 and given.isascii() and given.decode("ascii").isprintable():
            return given
        return b"%b-%x" % (self._id_prefix, next(self._ids))

    def _answer(self, exchange: Exchange, route: Route) -> None:
        """Routes that need no engine."""
        query = exchange.request.query
        if route.role is None:
            self._answer_all(exchange, route.kind)
        elif route.kind is Kind.MODELS:
            exchange.respond_json(200, views.models(self._generation.snapshot(route.role)))
        elif route.kind is Kind.ENGINES:
            snapshot = self._generation.snapshot(route.role)
            exchange.respond_json(200, views.engines(snapshot, query.get("schema", "2")))
        elif route.kind is Kind.ROLE_HEALTH:
            status, body = views.role_health(route.role, self._snapshots.current(route.role), query.get("schema"))
            exchange.respond_json(status, body)
        elif route.kind is Kind.ROLE_METRICS:
            exchange.respond(200, self._metrics_text(route.role), _TEXT)
        else:
            raise NotBuilt(
                f"{route.method} {route.path}: elastic rollout (row R2) is not in this version; start the run"
                " with the number of replicas that it needs"
            )

    def _answer_all(self, exchange: Exchange, kind: Kind) -> None:
        if kind is Kind.HEALTH:
            known = {role: self._snapshots.current(role) for role in self.settings.roles}
            exchange.respond_json(200, views.health(known, self.settings.staleness_seconds))
        elif kind is Kind.METRICS:
            exchange.respond(200, self._metrics_text(None), _TEXT)
        else:
            exchange.respond(200, views.index(self.settings.roles), _HTML)

    def _metrics_text(self, role: Role | None) -> bytes:
        known = {each.value: self._snapshots.current(each) for each in self.settings.roles}
        gauges = {
            "relax_gateway_registry_available": {name: float(held is not None) for name, held in known.items()},
            "relax_gateway_ready": {name: float(held is not None and held.ready) for name, held in known.items()},
            "relax_gateway_topology_revision": {
                name: float(held.revision) for name, held in known.items() if held is not None
            },
        }
        return self.metrics.render(gauges, role).encode()


def _affinity_key(exchange: Exchange) -> str | None:
    key = exchange.request.headers.get(b"x-smg-routing-key")
    return None if key is None else key.decode("utf-8", "surrogateescape")


async def serve(
    settings: GatewaySettings, source: SnapshotSource, *, listening: Callable[[int], None] = lambda port: None
) -> None:
    """Run a gateway until the calling task is cancelled; `listening` gets the port once it is open."""
    gateway = Gateway(source, Upstream(), settings)
    listening(await gateway.start())
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        await gateway.stop()
