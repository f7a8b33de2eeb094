"""Runs one coroutine function over many items, so many at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def at_once(items: Sequence[T], one: Callable[[T], Awaitable[None]], concurrency: int) -> None:
    """Await `one` for every item. The first failure is raised as it is, after all others were cancelled."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await one(item)

    workers = [asyncio.ensure_future(worker()) for _ in range(min(concurrency, len(items)))]
    try:
        for done in asyncio.as_completed(workers):
            await done
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
