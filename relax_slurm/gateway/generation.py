"""From a generation request to a relayed one: where it goes, what its body becomes, what is done with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic, perf_counter

import msgspec

from relax_slurm.core.discovery import RoleSnapshot, SnapshotSource
from relax_slurm.core.lost_engines import Placed, doubts, overdue
from relax_slurm.core.payload import Rules, check
from relax_slurm.core.plan import Role
from relax_slurm.core.routing import RouteResolver, RouteTarget
from relax_slurm.errors import BadRequest, RelaxError, Unavailable, UpstreamFailed
from relax_slurm.forward.call import Response
from relax_slurm.forward.exchange import JSON_LINE, Exchange
from relax_slurm.forward.http import forward_block, render
from relax_slurm.forward.proxy import Deadlines, End, Outcome, Relay, relay
from relax_slurm.forward.upstream import Upstream
from relax_slurm.gateway import judge, payload
from relax_slurm.gateway.judges import Judges
from relax_slurm.gateway.metrics import Metrics
from relax_slurm.gateway.payload import Address
from relax_slurm.gateway.routes import Kind
from relax_slurm.gateway.settings import GatewaySettings
from relax_slurm.gateway.sources import RenderSource

GENERATE_PATH = "/generate"
CHAT_PATH = "/v1/chat/completions"
_NOT_FOR_ENGINES = frozenset({b"authorization", b"x-request-id", b"x-relax-key", b"cookie"})
_DROPPED = {
    # (own body, collected answer): what of the client's headers stays here
    (False, False): _NOT_FOR_ENGINES,
    (False, True): _NOT_FOR_ENGINES | {b"accept-encoding"},
    (True, False): _NOT_FOR_ENGINES | {b"content-type"},
    (True, True): _NOT_FOR_ENGINES | {b"accept-encoding", b"content-type"},
}
_REWRITTEN = frozenset({b"content-type", b"content-encoding", b"etag", b"digest", b"content-md5"})


@dataclass(frozen=True, slots=True)
class Errand:
    """One request, ready to go out. `rewrite` turns the engine's JSON answer into ours; None = bytes untouched.

    A body that was written here is JSON, whatever the client called its own.
    """

    target: RouteTarget
    path: str
    body: bytes
    rewrite: Callable[[bytes], bytes] | None = None
    own_body: bool = False


@dataclass(frozen=True, slots=True)
class Asking:
    """A question to a judge. With a `source` it is rendered before it is known where it goes."""

    role: Role
    model: str
    question: judge.Question
    affinity_key: str | None
    source: RenderSource | None


class Generation:
    """Sends generation requests of all roles. One per gateway."""

    def __init__(
        self, snapshots: SnapshotSource, upstream: Upstream, settings: GatewaySettings, metrics: Metrics
    ) -> None:
        self._snapshots = snapshots
        self._upstream = upstream
        self._settings = settings
        self._metrics = metrics
        self._resolver = RouteResolver()
        self._deadlines = Deadlines(settings.deadline_seconds, settings.idle_seconds)
        key = settings.engine_key
        self._engine_auth = _bearer(key)
        self._external_auth = {engine: _bearer(token) for engine, token in settings.external_keys.items()}
        self._judges = Judges(settings.judges, settings.rendering)
        self._tasks: set[asyncio.Task[None]] = set()
        self._placed: dict[Relay, RouteTarget] = {}
        self._doubts: dict[Role, dict[Placed, float]] = {}
        self._invalidated: dict[Role, float] = {}

    def snapshot(self, role: Role) -> RoleSnapshot:
        """The role's view; Unavailable when there is none."""
        snapshot = self._snapshots.current(role)
        if snapshot is None:
            raise Unavailable(
                f"{role}: no view of the registry younger than {self._settings.staleness_seconds:g} s;"
                " the coordinator is silent or has not published the role yet, try again"
            )
        return snapshot

    def prepare(self, role: Role, kind: Kind, body: bytes, affinity_key: str | None) -> Errand | Asking:
        """Read the body as far as routing needs it and resolve the target. BadRequest or Unavailable.

        Messages that are rendered here come back as `Asking`, for `ask`.
        """
        if kind is Kind.CHAT:
            address, fields, stream = payload.chat_request(body)
            target = self._resolve(role, address, affinity_key)
            out = payload.with_model(fields, target.served_model_name)
            return Errand(target, CHAT_PATH, out, None if stream else _restore_model(target), own_body=True)
        if role is Role.GENRM:
            address, raw = payload.judge_request(body)
            if raw is None:
                return self._judged(role, address, body, affinity_key)
        else:
            address, raw = payload.raw_request(body)
        return Errand(self._resolve(role, address, affinity_key), GENERATE_PATH, raw)

    def _judged(self, role: Role, address: Address, body: bytes, affinity_key: str | None) -> Errand | Asking:
        # The model must be known before the messages can be rendered for it, and may have left READY meanwhile:
        # the look before only names it, the one after decides and takes the turn.
        model = self._resolver.ready_model(self.snapshot(role), address.model, address.route_key)
        question = judge.read_question(body)
        source = self._judges.source(model.name)
        asking = Asking(role, model.name, question, affinity_key, source)
        return self._by_chat(asking) if source is None else asking

    def _by_chat(self, asking: Asking) -> Errand:
        """The question for an engine that renders it."""
        target = self._resolve(asking.role, Address(asking.model, None), asking.affinity_key)
        out = judge.chat_body(asking.question, target.served_model_name)
        return Errand(target, CHAT_PATH, out, lambda answer: judge.chat_answer(answer, target.url), own_body=True)

    async def _by_ids(self, asking: Asking, source: RenderSource) -> Errand:
        """The question as token ids that were rendered here."""
        ids = await self._judges.ids(asking.model, source, asking.question)
        if ids is None:
            return self._by_chat(asking)
        target = self._resolve(asking.role, Address(asking.model, None), asking.affinity_key)
        out = judge.generate_body(asking.question, ids)
        return Errand(
            target, GENERATE_PATH, out, lambda answer: judge.generated_answer(answer, target.url), own_body=True
        )

    def ask(self, exchange: Exchange, kind: Kind, asking: Asking, request_id: bytes, started: float) -> None:
        """Render, then `send`. The only requests with a task of their own; it ends when the client leaves."""
        task = asyncio.get_running_loop().create_task(self._ask(exchange, kind, asking, request_id, started))
        self._tasks.add(task)

        def over(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if task.cancelled():  # before it had begun
                exchange.cut()

        def left() -> None:
            task.cancel()

        task.add_done_callback(over)
        exchange.on_gone(left)

    async def _ask(self, exchange: Exchange, kind: Kind, asking: Asking, request_id: bytes, started: float) -> None:
        assert asking.source is not None
        try:
            errand = await self._by_ids(asking, asking.source)
            self.send(exchange, kind, errand, request_id, started)
            return
        except asyncio.CancelledError:
            if exchange.gone:
                exchange.cut()
            else:
                exchange.fail(Unavailable("the gateway is stopping; nothing was sent to an engine"))
        except Exception as error:  # the boundary between a task of ours and its connection
            exchange.fail(error)
        self._metrics.finished((asking.role, kind), exchange.status, perf_counter() - started)

    async def close(self) -> None:
        """Answer what is still being rendered, and end the renderers."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._judges.close()

    def _resolve(self, role: Role, address: Address, affinity_key: str | None) -> RouteTarget:
        return self._resolver.resolve(self.snapshot(role), address.model, address.route_key, affinity_key)

    def send(self, exchange: Exchange, kind: Kind, errand: Errand, request_id: bytes, started: float) -> None:
        """Relay the request, once. The answer (or the error) reaches the client later."""
        target = errand.target
        role = target.role
        auth = self._outside(errand) if target.external else self._engine_auth
        placed = self._placed
        call: Relay | None = None
        over = False
        buffered = errand.rewrite is not None
        # Ours are apart from the client's, whose Connection header may name any of them. The id has no line break:
        # it is printable or was made here.
        own = b"%bx-request-id: %b\r\n%b" % (auth, request_id, JSON_LINE if errand.own_body else b"")
        in_flight = self._metrics.in_flight
        in_flight[role] = in_flight.get(role, 0) + 1

        def done(outcome: Outcome) -> None:
            nonlocal over
            over = True
            if call is not None:
                placed.pop(call, None)
            in_flight[role] -= 1
            if outcome.response is not None and errand.rewrite is not None:
                _answer(exchange, outcome.response, errand.rewrite)
            if outcome.end is not End.COMPLETE:
                # A deadline, a cancelled client or a broken transport: the view may be behind the facts.
                self._invalidate(role)
            self._metrics.finished((role, kind), exchange.status, perf_counter() - started)

        try:
            call = relay(
                exchange,
                self._upstream,
                target.url,
                errand.path,
                done,
                headers=exchange.request.headers,
                body=errand.body,
                deadlines=self._deadlines,
                buffered=buffered,
                drop=_DROPPED[errand.own_body, buffered],
                extra=own,
            )
        except RelaxError:
            in_flight[role] -= 1
            raise
        if target.engine_id is not None and not over:
            placed[call] = target

    def give_up_lost(self, now: float) -> None:
        """Answer requests at engines that have been in doubt for too long; call about once a second.

        Nobody says that they were not run, so they are never sent elsewhere. Behind a router it is not known which
        engine has a request, so there the deadline decides.
        """
        by_role: dict[Role, dict[Placed, list[Relay]]] = {}
        for call, target in self._placed.items():
            key = (str(target.engine_id), int(target.generation or 0))
            by_role.setdefault(target.role, {}).setdefault(key, []).append(call)
        for role in tuple(self._doubts):
            if role not in by_role:
                del self._doubts[role]
        for role, calls in by_role.items():
            snapshot = self._snapshots.current(role)
            if snapshot is None:
                continue  # without a view nothing is known, not even a loss
            engines = {engine.engine_id: engine for model in snapshot.models.values() for engine in model.engines}
            since = self._doubts[role] = doubts(calls, engines, self._doubts.get(role, {}), now)
            for key in overdue(since, now, self._settings.doubt_seconds):
                for call in calls[key]:
                    call.fail(
                        UpstreamFailed(
                            f"{key[0]}: nothing is known of this engine any more (generation {key[1]}); it may have "
                            "run the request, so it was not sent elsewhere"
                        )
                    )

    def _outside(self, errand: Errand) -> bytes:
        """The key for somebody else's engine. No guard stands in front of it, so the payload is checked here."""
        try:
            body = msgspec.json.decode(errand.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"{errand.path}: the body is not JSON ({error}); send one JSON object in UTF-8") from None
        check(errand.path, body, Rules())
        return self._external_auth.get((errand.target.role, errand.target.engine_id or ""), b"")

    def _invalidate(self, role: Role) -> None:
        """Have the view confirmed, but not once per client of a crowd that gave up."""
        now = monotonic()
        if now - self._invalidated.get(role, float("-inf")) >= self._settings.invalidate_seconds:
            self._invalidated[role] = now
            self._metrics.invalidations[role] = self._metrics.invalidations.get(role, 0) + 1
            self._snapshots.invalidate(role)


def _bearer(key: str | None) -> bytes:
    return render([] if key is None else [(b"authorization", b"Bearer " + key.encode())])


def _restore_model(target: RouteTarget) -> Callable[[bytes], bytes]:
    return lambda body: payload.answer_with_model(body, target.model, target.url)


def _answer(exchange: Exchange, response: Response, rewrite: Callable[[bytes], bytes]) -> None:
    """Write a collected answer: rewritten when it is a success, as it came when it is an error."""
    if not 200 <= response.status < 300:
        exchange.respond_block(response.status, forward_block(response.headers, exchange.extra_names), response.body)
        return
    try:
        if response.headers.get(b"content-encoding", b"identity") != b"identity":
            raise UpstreamFailed("the engine compressed an answer although it was not asked to")
        body = rewrite(response.body)
    except UpstreamFailed as error:
        exchange.respond_error(error)
        return
    block = forward_block(response.headers, exchange.extra_names | _REWRITTEN)
    exchange.respond_block(response.status, block + JSON_LINE, body)
