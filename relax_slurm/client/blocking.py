"""What blocking clients share: one background thread with an event loop in which their asynchronous client lives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
C = TypeVar("C")


class Blocking(Generic[C]):
    """Blocking calls, from any thread. `make` builds the client inside the loop, `end` closes it there."""

    def __init__(self, make: Callable[[], C], end: Callable[[C], Coroutine[Any, Any, None]]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=type(self).__name__, daemon=True)
        self._thread.start()
        self._closed = False
        self._end_client = end
        try:
            self._client = self._run(_call(make))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections and end the thread. Calls after it raise RuntimeError."""
        if not self._closed:
            self._run(self._end_client(self._client))
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise RuntimeError(f"this {type(self).__name__} is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of the caller ends the waiting too; for a finished call this does nothing.
            future.cancel()
            raise


async def _call(make: Callable[[], C]) -> C:
    return make()
