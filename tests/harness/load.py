"""Clients that ask sums without pause, and remember what became of every single one."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

from tests.harness.wait import until

REFUSALS = frozenset({502, 503, 504})
"""What a client may get while something is broken: an answer that says so."""


@dataclass(slots=True)
class Load:
    """What the clients have seen so far. Every sum is asked once."""

    right: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    cut: int = 0
    """Requests whose connection ended without an answer."""
    wrong: list[str] = field(default_factory=list)
    """Answers to another question, and statuses that nobody may send here."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def failed(self) -> int:
        """Requests that were not answered, and said so."""
        return sum(self.refused.values()) + self.cut

    def more(self, count: int, seconds: float = 20.0) -> None:
        """Wait for this many further right answers."""
        wanted = self.right + count
        until(lambda: self.right >= wanted, seconds, lambda: f"{wanted} right answers, there are {self}")


def _ask(url: str, path: str, token: str, numbers: Iterator[int], stop: threading.Event, load: Load) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=30.0, trust_env=False) as http:
        while not stop.is_set():
            number = next(numbers)
            body = {"text": f"{number} + 1 = ", "sampling_params": {"max_new_tokens": 16}}
            try:
                answer = http.post(path, json=body)
            except httpx.TransportError:
                with load.lock:
                    load.cut += 1
                continue
            with load.lock:
                if answer.status_code in REFUSALS:
                    load.refused[answer.status_code] += 1
                elif answer.status_code != 200:
                    load.wrong.append(f"{answer.status_code} {answer.text}")
                elif answer.json()["text"] != str(number + 1):
                    load.wrong.append(f"{number} + 1 = {answer.text}")
                else:
                    load.right += 1
            if answer.status_code != 200:
                stop.wait(0.02)  # a refusal costs nothing, so do not ask as fast as they come


@contextmanager
def load_on(url: str, path: str, token: str, clients: int = 4) -> Iterator[Load]:
    """Ask `path` (a generate route of the rollout role, which can add) from several clients until the block ends."""
    load, stop, numbers = Load(), threading.Event(), itertools.count(1000)
    threads = [
        threading.Thread(target=_ask, args=(url, path, token, numbers, stop, load), name=f"load-{number}")
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        stop.set()
        for thread in threads:
            thread.join(40.0)
