"""Many requests at once, each followed to its end: the answer, the refusal, or the cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

ENDS = frozenset({"answered", "refused", "cut"})


@dataclass(slots=True)
class Crowd:
    """Requests under way. `seen` counts how they ended; what has no right to happen is in `wrong`."""

    futures: list[Future[str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def ends(self, seconds: float = 60.0) -> Counter[str]:
        """How all of them ended, once they have."""
        return Counter(future.result(seconds) for future in self.futures)


def _ask(http: httpx.Client, path: str, body: dict[str, Any], wrong: list[str]) -> str:
    """One request: `answered` (whole, or with what it had when it was aborted), `refused`, or `cut`."""
    try:
        with http.stream("POST", path, json=body) as answer:
            content = answer.read()
    except httpx.TransportError:
        return "cut"
    if answer.status_code in {502, 503, 504}:
        return "refused"
    if answer.status_code != 200 or not content:
        wrong.append(f"{answer.status_code} {content[:200]!r}")
        return "wrong"
    if body.get("stream") and not content.endswith(b"data: [DONE]\n\n"):
        wrong.append(f"a stream without an end: {content[-100:]!r}")
        return "wrong"
    return "answered"


@contextmanager
def crowd(url: str, path: str, token: str, count: int, tokens: int) -> Iterator[Crowd]:
    """`count` requests of `tokens` tokens each, every second one a stream, all sent at once."""
    headers = {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    with (
        ThreadPoolExecutor(count) as pool,
        httpx.Client(base_url=url, headers=headers, timeout=90.0, trust_env=False, limits=limits) as http,
    ):
        many = Crowd()
        for number in range(count):
            params = {"max_new_tokens": tokens, "ignore_eos": True}
            body = {"text": f"{number} + 1 = ", "sampling_params": params, "stream": number % 2 == 0}
            many.futures.append(pool.submit(_ask, http, path, body, many.wrong))
        yield many
