"""POSTs that may be repeated: judges and reward services have no state that a second call could spoil.

3 attempts, 0.5 s apart and then twice that, after a 5xx or a failure of the connection. 4xx is raised at once, and so
is a deadline: who did not answer in half an hour is not asked again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from relax_slurm.client.pools import LoopPools
from relax_slurm.errors import BadRequest, RelaxError, Unauthorized, Unavailable, UpstreamFailed
from relax_slurm.forward.http import Header, checked

TIMEOUT_SECONDS = 1800.0
ATTEMPTS = 3
PAUSE_SECONDS = 0.5


class Poster:
    """JSON in, JSON out. Each event loop has connections of its own."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.url = url
        self._timeout_seconds = timeout_seconds
        self._sleep = sleep
        self._pools = LoopPools()
        auth: list[Header] = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        self._headers = checked([(b"content-type", b"application/json"), *auth])

    async def post(self, body: Any, affinity_key: str | None = None) -> dict[str, Any]:
        """The answer's object. BadRequest or Unauthorized for 4xx, UpstreamFailed or Unavailable after three tries."""
        data = msgspec.json.encode(body)
        headers = self._headers
        if affinity_key is not None:
            headers = checked([*self._headers, (b"x-smg-routing-key", affinity_key.encode())])
        pause, failure = PAUSE_SECONDS, RelaxError(self.url)
        for attempt in range(ATTEMPTS):
            if attempt:
                await self._sleep(pause)
                pause *= 2
            try:
                answer = await self._pools.here().request("POST", self.url, headers, data, self._timeout_seconds)
            except (UpstreamFailed, Unavailable) as error:
                failure = error
                continue
            text = answer.body[:300].decode("utf-8", "replace")
            if answer.status == 200:
                return self._object(answer.body)
            said = f"{self.url} answered {answer.status}: {text}"
            if answer.status < 500:
                raise (Unauthorized if answer.status == 401 else BadRequest)(said)
            failure = Unavailable(said) if answer.status == 503 else UpstreamFailed(said)
        raise type(failure)(f"{failure.message} (the last of {ATTEMPTS} attempts)")

    async def close(self) -> None:
        """Close this loop's connections."""
        await self._pools.close()

    def _object(self, body: bytes) -> dict[str, Any]:
        try:
            value = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamFailed(f"{self.url}: the answer is not JSON ({error})") from None
        if not isinstance(value, dict):
            raise UpstreamFailed(f"{self.url}: the answer is {type(value).__name__}, wanted an object")
        return value
