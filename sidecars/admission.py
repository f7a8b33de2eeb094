"""The admission guard: the only published port of an engine head.

What may pass is a table; whether it passes now is a state. The guard runs in the sidecar's own loop, so a
sidecar that hangs admits nothing. The engine listens on loopback with a key that only the guard and the
sidecar know.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import msgspec

from relax_slurm.errors import (
    Forbidden,
    MethodNotAllowed,
    NotFound,
    RecoveryRequired,
    RelaxError,
    Unauthorized,
    Unavailable,
    UpstreamFailed,
)
from relax_slurm.forward.exchange import Exchange
from relax_slurm.forward.http import Limits, Request, render
from relax_slurm.forward.proxy import Deadlines, End, Outcome, Relay, relay
from relax_slurm.forward.server import HttpServer
from relax_slurm.forward.upstream import Upstream, UpstreamLimits
from sidecars.info_answers import INFO_FIELDS, harmless


class Kind(StrEnum):
    """What the guard does with a path that is on the list."""

    GENERATE = "generate"
    """Work for the engine: passes while open."""
    RELIEVE = "relieve"
    """Takes work away from the engine: passes while there may be any, so that aborts help a drain."""
    INFO = "info"
    """Read from the engine while open, and filtered."""
    LIVENESS = "liveness"
    """Answered here from the engine's process state."""
    READINESS = "readiness"
    """Answered here from the guard's state."""


class Admission(StrEnum):
    """What the guard lets through now."""

    CLOSED = "closed"
    """Nothing, and nothing of ours is left at the engine."""
    OPEN = "open"
    """Everything on the list."""
    HELD = "held"
    """Nothing new; what runs goes on. Nothing was released, so the guard may open again without a drain."""
    DRAINING = "draining"
    """Nothing new; what runs must end before the deadline."""


@dataclass(frozen=True, slots=True)
class Route:
    """One entry of the allow list. `checked` bodies go through the payload check before they are forwarded."""

    method: str
    kind: Kind
    checked: bool = False


ALLOWED: Final = MappingProxyType(
    {
        "/generate": Route("POST", Kind.GENERATE, checked=True),
        "/v1/chat/completions": Route("POST", Kind.GENERATE, checked=True),
        "/chat/completions": Route("POST", Kind.GENERATE, checked=True),
        "/v1/completions": Route("POST", Kind.GENERATE, checked=True),
        "/abort_request": Route("POST", Kind.RELIEVE),
        "/close_session": Route("POST", Kind.RELIEVE),
        "/v1/models": Route("GET", Kind.INFO),
        "/server_info": Route("GET", Kind.INFO),
        "/get_server_info": Route("GET", Kind.INFO),
        "/model_info": Route("GET", Kind.INFO),
        "/get_model_info": Route("GET", Kind.INFO),
        "/health": Route("GET", Kind.LIVENESS),
        "/health_generate": Route("GET", Kind.READINESS),
    }
)
"""The allow list of the contract. Matching is exact; the engine is asked for the listed path, never for the
client's.
"""

PRIVILEGED: Final = (
    "/release_memory",
    "/resume_memory",
    "/flush_cache",
    "/pause_generation",
    "/continue_generation",
    "/update_weight",
    "/init_weight",
    "/destroy_weight",
    "/get_weight",
    "/weights_",
    "/load_lora",
    "/unload_lora",
    "/start_profile",
    "/stop_profile",
    "/configure_logging",
    "/set_internal_state",
    "/open_session",
    "/start_expert",
    "/stop_expert",
    "/dump_expert",
    "/shutdown",
)
"""Beginnings of engine paths that exist and are for the owner only: 403 instead of 404."""

PASSES: Final = MappingProxyType(
    {
        Kind.GENERATE: frozenset({Admission.OPEN}),
        Kind.INFO: frozenset({Admission.OPEN}),
        Kind.RELIEVE: frozenset({Admission.OPEN, Admission.HELD, Admission.DRAINING}),
        Kind.LIVENESS: frozenset(Admission),
        Kind.READINESS: frozenset({Admission.OPEN}),
    }
)
"""In which states each kind passes; otherwise 503."""

_WORK: Final = frozenset({Kind.GENERATE, Kind.READINESS})
"""Kinds that a suspect engine does not get; what relieves it still passes."""

GENERATION_HEADER: Final = b"x-relax-generation"
_OWN_HEADERS: Final = frozenset({b"authorization", b"x-api-key", GENERATION_HEADER})

PayloadCheck = Callable[[str, bytes], None]
"""(path, body) of a checked route; raises BadRequest for what the engine must not see."""


def find(method: str, path: str) -> Route:
    """The list entry for a request. Forbidden (403), NotFound (404) or MethodNotAllowed (405)."""
    route = ALLOWED.get(path)
    if route is None:
        if path.startswith(PRIVILEGED):
            raise Forbidden(f"{path}: only the engine's owner may call it; use the control protocol")
        raise NotFound(f"{path}: no such route on this engine; see the list of published routes")
    if method != route.method and not (method == "HEAD" and route.method == "GET"):
        raise MethodNotAllowed(f"{path}: {method} is not offered; use {route.method}")
    return route


@dataclass(frozen=True, slots=True)
class DrainResult:
    """How a close ended: requests that finished by themselves, and those that were cut at the deadline."""

    drained: int
    cancelled: int


class AdmissionGuard:
    """HTTP guard in front of one engine head. Starts closed.

    `engine_url` is the engine's own port, `engine_api_key` is added towards it. `is_alive` is asked for /health and
    must return at once. Info answers name the model `served_name`, whatever a weight update made of it. With
    `require_key` callers need it as a bearer token (health routes stay open). A request that names another `generation`
    than the guard's is meant for a predecessor and gets 503.
    """

    def __init__(
        self,
        engine_url: str,
        engine_api_key: str | None,
        *,
        generation: int,
        is_alive: Callable[[], bool],
        require_key: str | None = None,
        limits: Limits | None = None,
        upstream_limits: UpstreamLimits | None = None,
        deadlines: Deadlines | None = None,
        info_fields: frozenset[str] = INFO_FIELDS,
        payload_check: PayloadCheck | None = None,
        served_name: str | None = None,
    ) -> None:
        self.generation = generation
        self.state = Admission.CLOSED
        self.admitted = 0
        """Requests handed to the engine since the start."""
        self.suspect = ""
        """Why the engine gets nothing new, whatever the state; empty while nothing is in doubt."""
        self._answered = 0
        self._seen: tuple[int, dict[Exchange, int]] = (0, {})
        self._engine_url = engine_url
        self._injected = b""
        if engine_api_key is not None:
            self._injected = render([(b"authorization", b"Bearer " + engine_api_key.encode())])
        self._required = None if require_key is None else b"Bearer " + require_key.encode()
        self._is_alive = is_alive
        self._deadlines = deadlines or Deadlines()
        self._info_fields = info_fields
        self._payload_check = payload_check
        self._served_name = served_name
        self._running: dict[Exchange, Relay | None] = {}
        self._opened_before = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._upstream = Upstream(upstream_limits)
        self.server = HttpServer(self._handle, limits, self._admit_head)

    @property
    def in_flight(self) -> int:
        """Requests that are at the engine now."""
        return len(self._running)

    def moved(self) -> bool:
        """Whether any answer has come or grown since the last time this was asked."""
        answered, before = self._seen
        now = {exchange: exchange.sent_bytes for exchange in self._running}
        self._seen = self._answered, now
        return answered != self._answered or any(size > before.get(exchange, 0) for exchange, size in now.items())

    async def start(self, host: str, port: int = 0) -> int:
        """Listen; the port. OSError when it cannot be had."""
        return await self.server.start(host, port)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Stop listening; what still runs after the grace is cut."""
        self.state = Admission.CLOSED if not self._running else Admission.DRAINING
        await self.server.stop(grace_seconds)
        await self._upstream.close()

    # state

    def open(self, *, backend_drained: bool = False) -> None:
        """Let requests in. Again no-op.

        After a close this needs proof that nothing of the time before is left: no request in the guard, and
        the owner's word (`backend_drained`) that none is in the engine. RecoveryRequired otherwise; the
        state does not change.
        """
        if self.state is Admission.OPEN:
            return
        if self.state is not Admission.HELD and self._opened_before:
            if self.state is Admission.DRAINING or self._running:
                raise RecoveryRequired(
                    f"{self._engine_url}: admission is {self.state} with {self.in_flight} requests in flight; "
                    "finish close() before opening again"
                )
            if not backend_drained:
                raise RecoveryRequired(
                    f"{self._engine_url}: the engine was not confirmed to be drained; confirm it, then open again"
                )
        self._opened_before = True
        self.state = Admission.OPEN

    def hold(self) -> None:
        """Stop admitting at once, leave what runs alone: for when the head node falls silent. Only from OPEN."""
        if self.state is Admission.OPEN:
            self.state = Admission.HELD

    async def close(self, drain_deadline_seconds: float) -> DrainResult:
        """Stop admitting at once, wait for what runs, then cut what is left. CLOSED when it returns."""
        if self.state is not Admission.CLOSED:
            self.state = Admission.DRAINING
        before = self.in_flight
        cancelled = 0
        if self._running:
            try:
                async with asyncio.timeout(drain_deadline_seconds):
                    await self._idle.wait()
            except TimeoutError:
                cancelled = self.cut(Unavailable("the engine is closing and its drain deadline has passed; ask again"))
        if not self._running:
            self.state = Admission.CLOSED
        return DrainResult(drained=max(before - cancelled, 0), cancelled=cancelled)

    def cut(self, error: RelaxError) -> int:
        """Answer everything that runs with `error`, or cut it where an answer has begun; how many there were."""
        running = [call for call in self._running.values() if call is not None]
        for call in running:
            call.fail(error)
        return len(running)

    # requests

    def _admit_head(self, request: Request) -> None:
        """A body is read only for who has the key, on a listed route, while the route passes."""
        route = find(request.method, request.path)
        self._check_key(request)
        self._check_state(route.kind)

    def _check_key(self, request: Request) -> None:
        if self._required is not None and not hmac.compare_digest(
            request.headers.get(b"authorization", b"") or b"", self._required
        ):
            raise Unauthorized("bearer token: missing or not this engine's; send 'Authorization: Bearer <token>'")

    def _check_state(self, kind: Kind) -> None:
        if self.suspect and kind in _WORK:
            raise Unavailable(
                f"the engine is suspect: {self.suspect}; ask discovery for another engine, or again later"
            )
        if self.state not in PASSES[kind]:
            raise Unavailable(f"admission is {self.state}; ask discovery for another engine, or again later")

    def _handle(self, exchange: Exchange) -> None:
        """One request, without a task: either answered here or handed to a relay."""
        request = exchange.request
        route = find(request.method, request.path)
        kind = route.kind
        if kind is Kind.LIVENESS:
            exchange.respond(200 if self._is_alive() else 503)
            return
        if kind is Kind.READINESS:
            ready = self.state in PASSES[kind] and not self.suspect and self._is_alive()
            exchange.respond(200 if ready else 503)
            return
        self._check_key(request)
        self._check_state(kind)  # again: it may have changed while the body came
        wanted = request.headers.get(GENERATION_HEADER)
        if wanted is not None and wanted != b"%d" % self.generation:
            raise Unavailable(
                f"generation {wanted.decode('latin-1')} was asked for, this engine is {self.generation}; "
                "refresh discovery"
            )
        if route.checked and self._payload_check is not None:
            self._payload_check(request.path, request.body)
        self._admit(exchange, kind)

    def _admit(self, exchange: Exchange, kind: Kind) -> None:
        request = exchange.request
        running = self._running
        running[exchange] = None
        self._idle.clear()
        self.admitted += 1

        def done(outcome: Outcome) -> None:
            running.pop(exchange, None)
            if outcome.end is End.COMPLETE:
                self._answered += 1
            if not running:
                self._idle.set()
            if kind is Kind.INFO and outcome.response is not None:
                self._answer_info(exchange, outcome)

        try:
            call = relay(
                exchange,
                self._upstream,
                self._engine_url,
                request.path,
                done,
                method="GET" if request.method == "HEAD" else request.method,
                headers=request.headers,
                body=request.body,
                deadlines=self._deadlines,
                buffered=kind is Kind.INFO,
                drop=_OWN_HEADERS,
                extra=self._injected,
            )
        except RelaxError:
            done(Outcome(End.FAILED))
            raise
        if exchange in running:
            running[exchange] = call

    def _answer_info(self, exchange: Exchange, outcome: Outcome) -> None:
        response = outcome.response
        assert response is not None
        try:
            answer = msgspec.json.decode(response.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            exchange.fail(UpstreamFailed(f"{exchange.request.path}: the engine's answer is not JSON ({error})"))
            return
        if response.status == 200:
            exchange.respond_json(200, harmless(answer, self._info_fields, self._served_name))
        else:
            failed = UpstreamFailed(f"the engine answered {response.status}; see its log")
            exchange.respond_json(response.status, {"error": failed.as_json()})
