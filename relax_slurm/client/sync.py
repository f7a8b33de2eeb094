"""The same client for code without an event loop: one background thread runs one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from relax_slurm.core.plan import Role

if TYPE_CHECKING:
    from relax_slurm.client.inference import InferenceClient


T = TypeVar("T")


class SyncInferenceClient:
    """Blocking calls, from any thread; requests of several threads run side by side.

    `make` builds the client inside the background loop, so that a subscriber can be started there:
    `SyncInferenceClient(lambda: InferenceClient.polling(url, token))`.
    """

    def __init__(self, make: Callable[[], InferenceClient]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relax-inference", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._client = self._run(_call(make))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> SyncInferenceClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, payload: Mapping[str, Any], role: Role, **options: Any) -> Any:
        """`InferenceClient.generate`, blocking."""
        return self._run(self._client.generate(payload, role, **options))

    def chat(self, payload: Mapping[str, Any], role: Role, **options: Any) -> dict[str, Any]:
        """`InferenceClient.chat`, blocking."""
        return self._run(self._client.chat(payload, role, **options))

    def close(self) -> None:
        """Close connections and end the thread. Calls after it raise RuntimeError."""
        if not self._closed:
            self._run(self._client.close())
            self._end()

    def _end(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._closed:
            work.close()
            raise RuntimeError("this SyncInferenceClient is closed; make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            # An interrupt of the caller ends the request too; for a finished one this does nothing.
            future.cancel()
            raise


async def _call(make: Callable[[], InferenceClient]) -> InferenceClient:
    return make()
