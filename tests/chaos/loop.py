"""An event loop without a clock of its own: when nothing is ready, time jumps to the next timer.

No sockets, no threads, no signals. What runs on it is deterministic as long as nobody asks the real clock or the
order of a set of objects.
"""

from __future__ import annotations

import asyncio
from asyncio.base_events import BaseEventLoop
from collections.abc import Coroutine
from typing import Any


class Stuck(AssertionError):
    """Nothing is ready and no timer is set: somebody waits for ever."""


class OutOfTime(AssertionError):
    """The schedule went past its end: somebody goes round in circles."""


class VirtualLoop(BaseEventLoop):
    """asyncio with a clock that a schedule drives."""

    def __init__(self, limit_seconds: float) -> None:
        super().__init__()
        self.now = 0.0
        self._limit = limit_seconds
        self._selector = self  # what BaseEventLoop asks for events; there are none, only time passes
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Seconds since the schedule began."""
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        """As a selector without files."""
        if timeout is None:
            raise Stuck(f"at {self.now:.3f} s nothing is ready and no timer is set: somebody waits for ever")
        if timeout > 0:
            # The timer's own time, not `now + timeout`: that sum may be a rounding short of it.
            scheduled = self._scheduled
            self.now = scheduled[0].when() if scheduled else self.now + timeout
            if self.now > self._limit:
                raise OutOfTime(f"the schedule is not over after {self._limit:g} s")
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody calls from another thread."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """A thread would make time real again."""
        raise AssertionError(f"{func} wants a thread; the simulation has none")


def run(main: Coroutine[Any, Any, None], limit_seconds: float) -> None:
    """Run to the end, then drop whatever is still under way."""
    loop = VirtualLoop(limit_seconds)
    try:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main)
    finally:
        loop.set_exception_handler(lambda _loop, _context: None)
        for task in asyncio.all_tasks(loop):
            task.cancel()
        _let_go(loop)
        asyncio.set_event_loop(None)
        loop.close()


def _let_go(loop: VirtualLoop) -> None:
    """Let cancelled tasks end; timers are dropped first, so that nothing new happens."""
    loop._scheduled.clear()
    for _ in range(50):
        if not asyncio.all_tasks(loop):
            return
        loop.call_soon(loop.stop)
        loop.run_forever()
        for task in asyncio.all_tasks(loop):
            task.cancel()
