"""Many deadlines, one timer.

A timer per request costs more than the request's parsing. Here every watched thing carries its own `deadline`
attribute, which may be moved freely; one loop timer is armed for the earliest of them. Moving a deadline
later costs nothing: when the timer fires too early it is armed again.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

NEVER = float("inf")
_MIN_STEP_SECONDS = 0.005


class Watched(Protocol):
    """Something with a deadline in `loop.time()` seconds; `expired` is called once the deadline has passed."""

    deadline: float

    def expired(self) -> None:
        """Act on the passed deadline: must forget the item or move its deadline."""


class DeadlineClock:
    """Calls `expired()` of watched items whose deadline has passed. Bound to one loop."""

    __slots__ = ("_armed_at", "_handle", "_items", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: set[Watched] = set()
        self._handle: asyncio.TimerHandle | None = None
        self._armed_at = NEVER

    def watch(self, item: Watched) -> None:
        """Start watching `item` (its deadline may be NEVER)."""
        self._items.add(item)
        if item.deadline < self._armed_at:
            self._arm(item.deadline)

    def sooner(self, item: Watched) -> None:
        """Tell the clock that a watched item's deadline may have become earlier."""
        if item.deadline < self._armed_at:
            self._arm(item.deadline)

    def forget(self, item: Watched) -> None:
        """Stop watching `item`; unknown items are ignored."""
        self._items.discard(item)

    def close(self) -> None:
        """Disarm and forget everything."""
        self._items.clear()
        self._disarm()

    def _arm(self, when: float) -> None:
        self._disarm()
        self._armed_at = when
        self._handle = self._loop.call_at(max(when, self._loop.time() + _MIN_STEP_SECONDS), self._fire)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._armed_at = NEVER

    def _fire(self) -> None:
        self._handle = None
        self._armed_at = NEVER
        now = self._loop.time()
        for item in [item for item in self._items if item.deadline <= now]:
            if item in self._items and item.deadline <= now:
                item.expired()
        earliest = min((item.deadline for item in self._items), default=NEVER)
        if earliest < self._armed_at:
            self._arm(earliest)
