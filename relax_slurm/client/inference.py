"""Direct inference: resolve a target like the gateway does, and talk to its admission guard without a detour.

    async with InferenceClient.polling(gateway_url, token, engine_key=key) as client:
        answer = await client.generate({"text": "2+3="}, Role.ROLLOUT, affinity_key="session-7")

A POST is sent at most once. Whoever wants a repetition decides that above this client, knowing that the engine may
already have run the request.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from relax_slurm.client.discovery import Discovery, PolledDiscovery, SubscribedDiscovery
from relax_slurm.client.pools import LoopPools
from relax_slurm.client.sync import SyncInferenceClient
from relax_slurm.core.discovery import SnapshotSource
from relax_slurm.core.plan import Role
from relax_slurm.core.routing import RouteResolver, RouteTarget
from relax_slurm.errors import (
    BadRequest,
    BodyTooLarge,
    DeadlineExceeded,
    NotFound,
    RequestError,
    Unauthorized,
    Unavailable,
    UpstreamFailed,
)
from relax_slurm.forward.call import Response
from relax_slurm.forward.http import Header, checked
from relax_slurm.forward.upstream import UpstreamLimits

__all__ = ["Discovery", "InferenceClient", "PolledDiscovery", "SubscribedDiscovery", "SyncInferenceClient"]

_BY_STATUS: dict[int, type[RequestError]] = {
    400: BadRequest,
    401: Unauthorized,
    404: NotFound,
    413: BodyTooLarge,
    503: Unavailable,
    504: DeadlineExceeded,
}
ABORTS_AT_ONCE = 64
LOOK_SECONDS = 0.05
"""Pause between two looks at a view that is waited for."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode
_JSON = (b"content-type", b"application/json")
_PLAIN = checked([_JSON])


class InferenceClient:
    """Asynchronous client of all roles. Each event loop that uses it has its own connections.

    A subscribed discovery belongs to the loop that its subscriber runs in; a polling one works from any loop.
    """

    def __init__(
        self,
        discovery: Discovery,
        *,
        engine_key: str | None = None,
        external_keys: Mapping[tuple[Role, str], str] | None = None,
        timeout_seconds: float = 1800.0,
        limits: UpstreamLimits | None = None,
    ) -> None:
        """`engine_key` is for engines of the run; those that somebody else runs get theirs out of `external_keys`, by
        role and engine id, or none."""
        self._discovery = discovery
        self._timeout_seconds = timeout_seconds
        self._resolver = RouteResolver()
        self._turn = threading.Lock()
        self._pools = LoopPools(limits)
        auth: list[Header] = [] if engine_key is None else [(b"authorization", b"Bearer " + engine_key.encode())]
        self._headers = checked([_JSON, *auth])
        self._external_headers = {
            engine: checked([_JSON, (b"authorization", b"Bearer " + key.encode())])
            for engine, key in (external_keys or {}).items()
        }

    @classmethod
    def polling(cls, gateway_url: str, token: str | None, **options: Any) -> InferenceClient:
        """Discovery over the gateway's HTTP. `options` are those of the constructor."""
        return cls(PolledDiscovery(gateway_url, token), **options)

    @classmethod
    def subscribed(cls, source: SnapshotSource, **options: Any) -> InferenceClient:
        """Discovery by a started subscriber; waits for its first view if it can tell of changes."""
        return cls(SubscribedDiscovery(source, getattr(source, "changed", None)), **options)

    async def __aenter__(self) -> InferenceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close this loop's connections, and the discovery if it was polling."""
        await self._pools.close()
        if isinstance(self._discovery, PolledDiscovery):
            await self._discovery.close()

    async def resolve(
        self, role: Role, *, model: str | None = None, route_key: str | None = None, affinity_key: str | None = None
    ) -> RouteTarget:
        """Where a request would go now; takes a turn of the round robin."""
        snapshot = await self._discovery.view(role)
        try:
            with self._turn:
                return self._resolver.resolve(snapshot, model, route_key, affinity_key)
        except Unavailable:
            # The view may be behind: look once more before the caller is told to come back later.
            newer = await self._discovery.view(role, newer=True)
            if newer is snapshot:
                raise
            with self._turn:
                return self._resolver.resolve(newer, model, route_key, affinity_key)

    async def generate(
        self,
        payload: Mapping[str, Any],
        role: Role,
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
        timeout_seconds: float | None = None,
    ) -> Any:
        """SGLang's `/generate`: its payload in, its answer out (a list for a batch of prompts; no streaming).

        Raises BadRequest, Unavailable, UpstreamFailed or DeadlineExceeded; an engine's own refusal becomes the one
        of its status, with `detail["status"]` and `detail["body"]`.
        """
        fields = dict(payload)
        model, route_key = fields.pop("model", model), fields.pop("route_key", route_key)
        target = await self.resolve(role, model=model, route_key=route_key, affinity_key=affinity_key)
        return await self._post(target, "/generate", fields, affinity_key, timeout_seconds)

    async def chat(
        self,
        payload: Mapping[str, Any],
        role: Role,
        *,
        model: str | None = None,
        route_key: str | None = None,
        affinity_key: str | None = None,
        timeout_seconds: float | None = None,
    ) -> dict[str, Any]:
        """OpenAI chat completion (no streaming); `model` in request and answer is the logical name."""
        fields = dict(payload)
        model, route_key = fields.pop("model", model), fields.pop("route_key", route_key)
        target = await self.resolve(role, model=model, route_key=route_key, affinity_key=affinity_key)
        fields["model"] = target.served_model_name
        answer = await self._post(target, "/v1/chat/completions", fields, affinity_key, timeout_seconds)
        if not isinstance(answer, dict):
            raise UpstreamFailed(f"{target.url}: the chat answer is not a JSON object; see the engine's log")
        if "model" in answer:
            answer["model"] = target.model
        return answer

    async def wait_ready(self, role: Role, *, timeout_seconds: float = 30.0) -> None:
        """Return when the client's own view says that every model of the role can be asked; Unavailable.

        The coordinator's word that a role was woken may be ahead of what discovery has told.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                if (await self._discovery.view(role, newer=True)).ready:
                    return
                seen = f"{role} is not READY"
            except Unavailable as error:
                seen = error.message
            if time.monotonic() > deadline:
                raise Unavailable(f"{seen} in this client's view after {timeout_seconds:g} s; see `relax-slurm status`")
            await asyncio.sleep(LOOK_SECONDS)

    async def abort(self, rids: Sequence[str], role: Role, *, timeout_seconds: float = 10.0) -> int:
        """End requests by their ids; the number of times that an engine took the word.

        Every engine of the role is told of every id. An id also ends those that begin with it, so give all requests ids
        of one length. An aborted request is answered with what there is of it. Nothing is sent to engines that admit
        nothing; one that cannot be reached is left out.
        """
        if not all(rids):
            raise BadRequest("abort: a rid is empty, wanted the id of a request")
        snapshot = await self._discovery.view(role)
        models = snapshot.models.values()
        urls = sorted({each.base_url for model in models for each in model.engines if each.base_url and each.routable})
        gate, pool = asyncio.Semaphore(ABORTS_AT_ONCE), self._pools.here()

        async def tell(url: str, rid: str) -> bool:
            async with gate:
                body = _encode({"rid": rid})
                answer = await pool.request("POST", f"{url}/abort_request", self._headers, body, timeout_seconds)
                return answer.status == 200

        told = await asyncio.gather(*(tell(url, rid) for url in urls for rid in rids), return_exceptions=True)
        return sum(one is True for one in told)

    async def _post(
        self,
        target: RouteTarget,
        path: str,
        fields: dict[str, Any],
        affinity_key: str | None,
        timeout_seconds: float | None,
    ) -> Any:
        if fields.get("stream"):
            raise BadRequest("stream is true, but this client returns whole answers; stream through the gateway")
        try:
            body = _encode(fields)
            headers = self._headers
            if target.external:
                headers = self._external_headers.get((target.role, target.engine_id or ""), _PLAIN)
            if affinity_key is not None:
                key = affinity_key.encode("utf-8", "surrogateescape")
                headers = checked([*headers, (b"x-smg-routing-key", key)])
        except (TypeError, ValueError) as error:
            raise BadRequest(f"{target.role} request: {error}; send JSON values and a one-line affinity key") from error
        wait = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            answer = await self._pools.here().request("POST", target.url.rstrip("/") + path, headers, body, wait)
        except (asyncio.CancelledError, DeadlineExceeded, UpstreamFailed):
            # What the engine did with the request is unknown, and so is whether it is still the right one.
            self._discovery.invalidate(target.role)
            raise
        if answer.status != 200:
            if answer.status == 503:
                self._discovery.invalidate(target.role)
            raise _refusal(target, path, answer)
        try:
            return _decode(answer.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            where = f"{target.url}{path}"
            raise UpstreamFailed(f"{where}: the answer is not JSON ({error}); see the engine's log") from None


def _refusal(target: RouteTarget, path: str, answer: Response) -> RequestError:
    text = answer.body[:2000].decode("utf-8", "replace")
    kind = _BY_STATUS.get(answer.status, UpstreamFailed)
    who = target.engine_id or target.url
    return kind(f"{who}{path} answered {answer.status}: {text[:300]}", detail={"status": answer.status, "body": text})
