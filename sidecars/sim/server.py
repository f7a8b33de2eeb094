"""The HTTP surface of a simulated engine: routing, keys, generation routes, information routes."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import msgspec

from relax_slurm.forward import Exchange
from sidecars.sim import openai
from sidecars.sim.access import allowed
from sidecars.sim.control import Control
from sidecars.sim.engine import SimEngine, log
from sidecars.sim.options import FaultKind
from sidecars.sim.protocol import Broken, Deadly, Invalid, parse_generate
from sidecars.sim.scheduler import Flight

Route = Callable[[Exchange], Awaitable[None]]
_SSE = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_ONE_MODEL = "/v1/models/"
_dumps = msgspec.json.Encoder().encode
_GET, _POST = frozenset({"GET", "HEAD"}), frozenset({"POST"})
_POST_PUT, _ANY = frozenset({"POST", "PUT"}), frozenset({"GET", "POST"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the route table."""

    methods: frozenset[str]
    route: Route
    admin: bool = False


class SimServer:
    """Answers every exchange of one engine. `handle` is the handler of an `HttpServer`."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        control = Control(engine)
        self._routes: dict[str, Entry] = {
            "/generate": Entry(_POST_PUT, self._generate),
            "/v1/chat/completions": Entry(_POST, self._chat),
            "/v1/completions": Entry(_POST, self._completions),
            "/v1/models": Entry(_GET, self._models),
            "/v1/loads": Entry(_GET, self._loads),
            "/ready": Entry(_GET, self._ready),
            "/health": Entry(_GET, self._health),
            "/health_generate": Entry(_GET, self._health),
            "/ping": Entry(_GET, self._ping),
            "/model_info": Entry(_GET, self._model_info),
            "/get_model_info": Entry(_GET, self._model_info),
            "/server_info": Entry(_GET, self._server_info),
            "/get_server_info": Entry(_GET, self._server_info),
            **{
                path: Entry(_POST if only_post else _ANY, route, admin=True)
                for path, (only_post, route) in control.routes().items()
            },
        }
        if engine.args.enable_metrics:
            self._routes["/metrics"] = Entry(_GET, self._metrics)

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request."""
        request = exchange.request
        entry = self._routes.get(request.path)
        if entry is None and request.path.startswith(_ONE_MODEL):
            entry = Entry(_GET, self._one_model)
        authorization = request.headers.get(b"authorization")
        passes = allowed(
            request.method,
            request.path,
            None if authorization is None else authorization.decode("latin-1"),
            api_key=self._engine.args.api_key,
            admin_key=self._engine.args.admin_api_key,
            admin_route=entry is not None and entry.admin,
        )
        if not passes:
            exchange.respond_json(401, {"error": "Unauthorized"})
        elif entry is None:
            exchange.respond_json(404, {"detail": "Not Found"})
        elif request.method not in entry.methods:
            exchange.respond_json(405, {"detail": "Method Not Allowed"})
        else:
            try:
                await entry.route(exchange)
            except Broken as error:
                log(f"Exception in ASGI application: {error}")
                exchange.respond(500, b"Internal Server Error", ((b"content-type", b"text/plain; charset=utf-8"),))
            except Deadly as error:
                self._engine.crash(str(error))
                await asyncio.Event().wait()

    # ---- generation
    # --------------------------------------------------------------------------------------------

    async def _generate(self, exchange: Exchange) -> None:
        body: Any = None
        try:
            body = read_json(exchange)
            request = parse_generate(body, self._engine.limits, uuid.uuid4().hex)
            flights = self._engine.scheduler.admit(request.sequences)
        except Invalid as error:
            if not error.validation and isinstance(body, Mapping) and body.get("stream"):
                exchange.start(200, _SSE)
                exchange.send(b"data: " + _dumps(error.stream_event()) + b"\n\n")
                _done(exchange)
            else:
                exchange.respond_json(400, error.native_body())
            return
        scheduler = self._engine.scheduler
        if not request.stream:
            await self._play_all(exchange, flights)
            if exchange.gone:
                exchange.cut()
                return
            results = [scheduler.result(flight) for flight in flights]
            self._answer(exchange, results if request.batch else results[0])
            return
        exchange.start(200, _SSE)

        def show(index: int, flight: Flight) -> None:
            event = scheduler.result(flight)
            if request.batch:
                event["index"] = index
            exchange.send(b"data: " + _dumps(event) + b"\n\n")

        await self._play_all(exchange, flights, show)
        _done(exchange)

    async def _chat(self, exchange: Exchange) -> None:
        await self._openai(exchange, chat=True)

    async def _completions(self, exchange: Exchange) -> None:
        await self._openai(exchange, chat=False)

    async def _openai(self, exchange: Exchange, *, chat: bool) -> None:
        engine = self._engine
        try:
            media = exchange.request.headers.get(b"content-type") or b""
            if media.split(b";")[0].strip().lower() != b"application/json":
                raise Invalid("Unsupported Media Type: Only 'application/json' is allowed", validation=True)
            body = read_json(exchange)
            request = openai.parse(body, engine.limits, uuid.uuid4().hex, chat=chat)
            flights = engine.scheduler.admit(request.items)
        except Invalid as error:
            exchange.respond_json(400, error.openai_body())
            return
        created = int(time.time())
        if not request.stream:
            await self._play_all(exchange, flights)
            if exchange.gone:
                exchange.cut()
                return
            results = [engine.scheduler.result(flight) for flight in flights]
            self._answer(exchange, openai.whole(request, results, created))
            return
        exchange.start(200, _SSE)
        writers = [openai.ChunkWriter(request, index, created) for index in range(len(flights))]

        def show(index: int, flight: Flight) -> None:
            for chunk in writers[index].chunks(engine.scheduler.result(flight)):
                exchange.send(b"data: " + _dumps(chunk) + b"\n\n")

        await self._play_all(exchange, flights, show)
        if request.include_usage:
            total = openai.usage([engine.scheduler.result(flight) for flight in flights], request.copies)
            last = openai.chunk_frame(request, flights[0].item.rid, created, [], total)
            exchange.send(b"data: " + _dumps(last) + b"\n\n")
        _done(exchange)

    async def _play_all(
        self, exchange: Exchange, flights: Sequence[Flight], show: Callable[[int, Flight], None] | None = None
    ) -> None:
        """Run all sequences; a client that leaves aborts them."""
        scheduler = self._engine.scheduler
        exchange.on_gone(lambda: scheduler.drop(*flights))

        async def one(index: int, flight: Flight) -> None:
            try:
                async for _ in scheduler.play(flight, stepwise=show is not None):
                    if show is not None and not exchange.gone:
                        show(index, flight)
            finally:
                scheduler.leave(flight)

        if len(flights) == 1:
            await one(0, flights[0])
        else:
            await asyncio.gather(*itertools.starmap(one, enumerate(flights)))

    def _answer(self, exchange: Exchange, document: Any) -> None:
        bad = self._engine.options.fault(FaultKind.BAD_JSON)
        if bad is not None and self._engine.scheduler.accepted >= bad.value:
            exchange.respond(200, b'{"text": "cut', ((b"content-type", b"application/json"),))
        else:
            exchange.respond_json(200, document)

    # ---- information
    # -------------------------------------------------------------------------------------------

    async def _ready(self, exchange: Exchange) -> None:
        engine = self._engine
        ready = engine.serving and not engine.stopping and engine.scheduler.paused is None
        exchange.respond(200 if ready else 503)

    async def _health(self, exchange: Exchange) -> None:
        await self._engine.maybe_hang_health()
        engine = self._engine
        if not engine.serving or engine.stopping:
            exchange.respond(503)
        elif exchange.request.path == "/health" and not engine.health_generates:
            exchange.respond(200)
        else:
            exchange.respond(200 if await engine.generates_a_token() else 503)

    async def _ping(self, exchange: Exchange) -> None:
        exchange.respond(200)

    def _card(self) -> dict[str, Any]:
        name = self._engine.served_model_name
        return {
            "id": name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": name,
            "parent": None,
            "max_model_len": self._engine.limits.context_length,
        }

    async def _models(self, exchange: Exchange) -> None:
        exchange.respond_json(200, {"object": "list", "data": [self._card()]})

    async def _one_model(self, exchange: Exchange) -> None:
        name = unquote(exchange.request.path.removeprefix(_ONE_MODEL))
        if name == self._engine.served_model_name:
            exchange.respond_json(200, self._card())
            return
        error = {
            "message": f"The model '{name}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        exchange.respond_json(404, {"error": error})

    async def _model_info(self, exchange: Exchange) -> None:
        exchange.respond_json(200, self._engine.model_info())

    async def _server_info(self, exchange: Exchange) -> None:
        exchange.respond_json(200, self._engine.server_info())

    async def _loads(self, exchange: Exchange) -> None:
        exchange.respond_json(200, self._engine.loads())

    async def _metrics(self, exchange: Exchange) -> None:
        text = self._engine.metrics().encode()
        exchange.respond(200, text, ((b"content-type", b"text/plain; version=0.0.4; charset=utf-8"),))


def read_json(exchange: Exchange) -> Any:
    """The body as JSON; `Invalid` in the validation shape when it is not, or does not say that it is."""
    kind = exchange.request.headers.get(b"content-type")
    if kind is not None and kind.split(b";")[0].strip().lower() != b"application/json":
        raise Invalid("body: Input should be a dictionary", validation=True)
    try:
        return msgspec.json.decode(exchange.request.body)
    except msgspec.DecodeError as error:
        raise Invalid(f"JSON decode error: {error}", validation=True) from error


def _done(exchange: Exchange) -> None:
    exchange.send(b"data: [DONE]\n\n")
    exchange.end()
