"""The control calls of sglang-router 0.3.2: workers in, workers out, is it ready.

Adding and removing are accepted at once and done later; `look` says what has become of it. Every call may raise
`RelaxError` when the router does not answer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from relax_slurm.core.plan import WorkerType
from relax_slurm.errors import UpstreamFailed
from relax_slurm.forward import Response, Upstream

CALL_SECONDS = 5.0
_TYPES = frozenset(map(str, WorkerType))


@dataclass(frozen=True, slots=True)
class RouterWorker:
    """An engine that the router shall have: its head's guard. `bootstrap_port` only for prefill."""

    replica_id: str
    url: str
    generation: int
    worker_type: WorkerType = WorkerType.REGULAR
    bootstrap_port: int | None = None


class Presence(StrEnum):
    """What the router says of a worker id."""

    PENDING = "pending"
    """Being added."""
    PRESENT = "present"
    """Registered: requests may go there."""
    UNHEALTHY = "unhealthy"
    """Registered, but the router's own health check fails."""
    REFUSED = "refused"
    """The last job on it failed and it is not registered."""
    ABSENT = "absent"
    """Not known."""


@dataclass(frozen=True, slots=True)
class Sight:
    """Presence and the router's own words about a failure."""

    presence: Presence
    detail: str = ""


class RouterApi:
    """One router. `key` is asked for by the router and by the guards alike."""

    def __init__(self, base_url: str, key: str, upstream: Upstream) -> None:
        self.base_url = base_url
        self._key = key
        self._upstream = upstream

    async def alive(self) -> None:
        """Returns when it answers at all; with no engine registered there is nothing else to ask."""
        await self._send("GET", "/liveness")

    async def ready(self) -> bool:
        """Whether it would take requests: 503 while no engine is healthy (with prefill and decode, one of each)."""
        return (await self._send("GET", "/readiness")).status == 200

    async def add(self, worker: RouterWorker) -> str:
        """Ask for a registration; the worker id to look for."""
        body: dict[str, Any] = {"url": worker.url, "worker_type": str(worker.worker_type), "api_key": self._key}
        if worker.bootstrap_port is not None:
            body["bootstrap_port"] = worker.bootstrap_port
        answer = await self._send("POST", "/workers", body)
        worker_id = _document(answer).get("worker_id") if answer.status == 202 else None
        if not isinstance(worker_id, str) or not worker_id:
            raise self._unexpected("POST /workers", answer, "202 with a worker_id")
        return worker_id

    async def remove(self, worker_id: str) -> None:
        """Ask for a removal; an id that is not known is as good as removed."""
        answer = await self._send("DELETE", f"/workers/{worker_id}")
        if answer.status not in (200, 202, 204, 404):
            raise self._unexpected("DELETE /workers", answer, "202 or 404")

    async def look(self, worker_id: str) -> Sight:
        """What has become of a worker."""
        answer = await self._send("GET", f"/workers/{worker_id}")
        if answer.status == 404:
            return Sight(Presence.ABSENT)
        if answer.status != 200:
            raise self._unexpected("GET /workers", answer, "200 or 404")
        document = _document(answer)
        if document.get("worker_type") in _TYPES:
            return Sight(Presence.PRESENT if document.get("is_healthy") is True else Presence.UNHEALTHY)
        job = document.get("job_status")
        if isinstance(job, dict) and job.get("status") == "failed":
            return Sight(Presence.REFUSED, str(job.get("message"))[:500])
        return Sight(Presence.PENDING)

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Response:
        headers = [(b"authorization", b"Bearer " + self._key.encode())]
        raw = b""
        if body is not None:
            headers.append((b"content-type", b"application/json"))
            raw = json.dumps(body).encode()
        return await self._upstream.request(method, self.base_url + path, headers, raw, CALL_SECONDS)

    def _unexpected(self, what: str, answer: Response, wanted: str) -> UpstreamFailed:
        said = answer.body[:200].decode("utf-8", "replace")
        return UpstreamFailed(f"router {self.base_url}: {what} answered {answer.status} ({said}), wanted {wanted}")


def _document(answer: Response) -> dict[str, Any]:
    try:
        value = json.loads(answer.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
