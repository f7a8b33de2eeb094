"""How a sidecar asks its engine: the right key, JSON both ways, and an error that says what came back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from relax_slurm.errors import DeadlineExceeded, EngineFailed
from relax_slurm.forward import Response
from sidecars.worker import WorkerSpec


class Requester(Protocol):
    """The part of `relax_slurm.forward.Upstream` that is used here."""

    async def request(
        self,
        method: str,
        url: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout_seconds: float = 10.0,
    ) -> Response:
        """One request with its whole answer; RelaxError when there is none."""


class EngineHttp:
    """HTTP to one engine. Nothing is repeated here: whoever calls knows what may be."""

    def __init__(self, worker: WorkerSpec, upstream: Requester) -> None:
        self._worker = worker
        self._upstream = upstream

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_seconds: float, *, admin: bool
    ) -> Response:
        """One request, whatever its status. `admin` chooses the key; DeadlineExceeded when no time is left for it."""
        key = (self._worker.admin_key if admin else None) or self._worker.api_key
        headers = [] if key is None else [(b"authorization", b"Bearer " + key.encode())]
        raw = b""
        if body is not None:
            headers.append((b"content-type", b"application/json"))
            raw = json.dumps(body).encode()
        if timeout_seconds <= 0:
            raise DeadlineExceeded(f"{self._worker.worker_id}: no time is left for {path}; nothing was sent")
        return await self._upstream.request(method, self._worker.base_url + path, headers, raw, timeout_seconds)

    async def control(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """An admin call that must be answered with 200; its JSON object, {} when the answer is none."""
        answer = await self.send("POST", path, body, timeout_seconds, admin=True)
        if answer.status != 200:
            raise self.unexpected(path, answer)
        return self.document(path, answer) if answer.body.startswith(b"{") else {}

    def document(self, path: str, answer: Response) -> dict[str, Any]:
        """The JSON object of a 200 answer; `EngineFailed` when it is anything else."""
        try:
            value = json.loads(answer.body) if answer.status == 200 else None
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise self.unexpected(path, answer)
        return value

    def unexpected(self, path: str, answer: Response) -> EngineFailed:
        """The error for an answer that does not belong to `path`."""
        return EngineFailed(
            f"{self._worker.worker_id}: {path} answered {answer.status} ({excerpt(answer)}), wanted 200; see "
            f"{self._worker.log_path}"
        )


def excerpt(answer: Response) -> str:
    """The beginning of a body, for an error message."""
    return answer.body[:200].decode("utf-8", "replace").strip() or "no body"
