"""How often a child may be started again, and how fast."""

from __future__ import annotations

import asyncio
import time

SETTLED_SECONDS = 600.0
"""A child that lived as long as this is not in a crash loop: its restarts are counted from zero again."""
PAUSE_SECONDS = (0.2, 5.0)


class Restarts:
    """How often something may be started again, and how long to wait before."""

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self._used = 0
        self._started = time.monotonic()

    @property
    def last(self) -> bool:
        """Whether the present start is the last one, if it ends now."""
        return self._used >= self._allowed and not self._settled

    @property
    def _settled(self) -> bool:
        return time.monotonic() - self._started >= SETTLED_SECONDS

    async def again(self) -> None:
        """Count one restart; the first is at once, and before each further one the pause is longer."""
        self._used = 1 if self._settled else self._used + 1
        first, longest = PAUSE_SECONDS
        if self._used > 1:
            await asyncio.sleep(min(first * 2 ** (self._used - 2), longest))
        self._started = time.monotonic()
