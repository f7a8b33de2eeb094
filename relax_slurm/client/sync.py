"""The same client for code without an event loop: one background thread runs one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from relax_slurm.client.blocking import Blocking
from relax_slurm.core.plan import Role

if TYPE_CHECKING:
    from relax_slurm.client.inference import InferenceClient


class SyncInferenceClient(Blocking["InferenceClient"]):
    """Blocking calls, from any thread; requests of several threads run side by side.

    `make` builds the client inside the background loop, so that a subscriber can be started there:
    `SyncInferenceClient(lambda: InferenceClient.polling(url, token))`.
    """

    def __init__(self, make: Callable[[], InferenceClient]) -> None:
        super().__init__(make, lambda client: client.close())

    def generate(self, payload: Mapping[str, Any], role: Role, **options: Any) -> Any:
        """`InferenceClient.generate`, blocking."""
        return self._run(self._client.generate(payload, role, **options))

    def chat(self, payload: Mapping[str, Any], role: Role, **options: Any) -> dict[str, Any]:
        """`InferenceClient.chat`, blocking."""
        return self._run(self._client.chat(payload, role, **options))
