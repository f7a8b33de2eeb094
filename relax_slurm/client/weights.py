"""New weights for a model of a running run, for trainers (docs/weights.md).

    async with WeightsClient.of_run(run_dir) as weights:
        await weights.update_weights_from_disk("policy", "/checkpoints/step-20", "20")

A call begins an operation at the coordinator and waits for its end. Asking again under the same operation id never does
it twice, so a client that was cut off may ask again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

from relax_slurm.client.blocking import Blocking
from relax_slurm.control.run_dir import RunDir
from relax_slurm.errors import DeadlineExceeded, EngineFailed, Unavailable
from relax_slurm.wire.client import ControlClient
from relax_slurm.wire.keys import Credentials, credentials
from relax_slurm.wire.messages import PeerKind

POLL_SECONDS = (0.02, 0.5)
"""First and longest pause between two questions how an operation stands."""
GRACE_SECONDS = 60.0
"""What an operation may need beyond its own time limit: to end a pause and to be published."""


class WeightUpdateFailed(EngineFailed):
    """Not every replica has the new weights. `detail` is the operation's document, replica by replica."""

    code = "weight_update_failed"


class WeightsClient:
    """Asynchronous client; belongs to the event loop it is used in."""

    def __init__(
        self,
        address: str,
        keys: Credentials,
        *,
        timeout_seconds: float = 180.0,
        new_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self._control = ControlClient(address, keys)
        self._timeout_seconds = timeout_seconds
        self._new_id = new_id

    @classmethod
    def of_run(cls, run_dir: str | Path, **options: Any) -> WeightsClient:
        """A client for the run in this folder (an attempt, or `latest`). `options` are those of the constructor."""
        folder = RunDir(Path(run_dir).resolve())
        endpoint = folder.read("endpoint.json")
        if endpoint is None:
            raise Unavailable(f"{folder.path / 'endpoint.json'} is missing; wait until the run is READY")
        return cls(endpoint["control"], credentials(folder.keys, PeerKind.CLIENT), **options)

    async def __aenter__(self) -> WeightsClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connections."""
        self._control.close()

    # --- whole updates --------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self, model: str, path: str, version: str, *, payload: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Load the checkpoint in `path`, which every node must be able to read, into every replica.

        `payload` holds further fields of SGLang's call, such as `load_format`. Answers the operation's document;
        `WeightUpdateFailed` when a replica does not have the new weights, `RemoteError` when it was not begun.
        """
        body = {**(payload or {}), "model_path": path}
        return await self.wait(await self.begin_update(model, "disk", version, body, **options))

    async def update_weights_from_tensor(
        self,
        model: str,
        tensors: Sequence[str],
        version: str,
        *,
        payload: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Hand over serialised tensors, one base64 text per tensor-parallel rank. Errors as from disk."""
        body = {**(payload or {}), "serialized_named_tensors": list(tensors)}
        return await self.wait(await self.begin_update(model, "tensor", version, body, **options))

    async def update_weights_from_distributed(
        self, model: str, payload: Mapping[str, Any], version: str, **options: Any
    ) -> dict[str, Any]:
        """Let every replica receive `names`, `dtypes`, `shapes` in a group; the trainer sends them at the same time.

        Errors as from disk. For a trainer that sends in the same thread: `begin_update`, send, `wait`.
        """
        return await self.wait(await self.begin_update(model, "distributed", version, payload, **options))

    async def init_weights_update_group(self, model: str, payload: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """Let every replica join a group; `per_replica` gives each its `rank_offset`. Errors as from disk."""
        return await self.wait(await self.begin_group(model, "init", payload, **options))

    async def destroy_weights_update_group(
        self, model: str, payload: Mapping[str, Any] | None = None, **options: Any
    ) -> dict[str, Any]:
        """Let every replica leave a group. Errors as from disk."""
        return await self.wait(await self.begin_group(model, "destroy", payload or {}, **options))

    # --- begin and wait -------------------------------------------------------------------------------------

    async def begin_update(
        self,
        model: str,
        source: str,
        version: str,
        payload: Mapping[str, Any],
        *,
        role: str = "rollout",
        per_replica: Mapping[str, Mapping[str, Any]] | None = None,
        final: bool = True,
        timeout_seconds: float | None = None,
        drain_seconds: float | None = None,
        operation_id: str | None = None,
    ) -> str:
        """Begin an update and answer its operation id. `RemoteError` when the coordinator refuses it."""
        seconds = float(timeout_seconds or self._timeout_seconds)
        fields = {"weight_version": version, "source": source, "final": final, "limit_seconds": seconds}
        if drain_seconds is not None:
            fields["drain_seconds"] = float(drain_seconds)
        return await self._begin("update_weights", role, model, payload, per_replica, operation_id, fields)

    async def begin_group(
        self,
        model: str,
        action: str,
        payload: Mapping[str, Any],
        *,
        role: str = "rollout",
        per_replica: Mapping[str, Mapping[str, Any]] | None = None,
        timeout_seconds: float | None = None,
        operation_id: str | None = None,
    ) -> str:
        """Begin to make (`init`) or end (`destroy`) a group and answer the operation id."""
        fields = {"action": action, "limit_seconds": float(timeout_seconds or self._timeout_seconds)}
        return await self._begin("weights_group", role, model, payload, per_replica, operation_id, fields)

    async def _begin(
        self,
        kind: str,
        role: str,
        model: str,
        payload: Mapping[str, Any],
        per_replica: Mapping[str, Mapping[str, Any]] | None,
        operation_id: str | None,
        fields: dict[str, Any],
    ) -> str:
        operation = operation_id or self._new_id()
        own = {name: dict(changes) for name, changes in (per_replica or {}).items()}
        await self._control.request(
            kind, operation_id=operation, role=role, model=model, payload=dict(payload), per_replica=own, **fields
        )
        return operation

    async def look(self, operation: str) -> dict[str, Any]:
        """The operation's document as it stands. `RemoteError` when the coordinator does not know it."""
        return await self._control.request("get_weights", operation=operation)

    async def wait(self, operation: str, timeout_seconds: float | None = None) -> dict[str, Any]:
        """The operation's document at its end; `WeightUpdateFailed` unless all replicas did it.

        `DeadlineExceeded` after `timeout_seconds` (default: the client's, and what it takes to publish); the operation
        goes on.
        """
        # Twice the time: once for the engines, once until every replica is shown again.
        seconds = timeout_seconds or 2 * self._timeout_seconds + GRACE_SECONDS
        deadline = time.monotonic() + seconds
        pause = POLL_SECONDS[0]
        while True:
            document = await self.look(operation)
            if document["state"] == "SUCCEEDED":
                return document
            if document["state"] != "RUNNING":
                raise WeightUpdateFailed(
                    f"{document['kind']} of {document['role']}/{document['model']} ended as {document['state']}: "
                    f"{document['reason'] or 'no reason given'}",
                    detail=document,
                )
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"operation {operation} was not over within {seconds:g} s; it goes on")
            await asyncio.sleep(pause)
            pause = min(pause * 1.5, POLL_SECONDS[1])


class SyncWeightsClient(Blocking[WeightsClient]):
    """The same for code without an event loop: blocking calls from any thread."""

    def __init__(self, run_dir: str | Path, **options: Any) -> None:
        super().__init__(lambda: WeightsClient.of_run(run_dir, **options), _closed)

    def update_weights_from_disk(self, model: str, path: str, version: str, **options: Any) -> dict[str, Any]:
        """`WeightsClient.update_weights_from_disk`, blocking."""
        return self._run(self._client.update_weights_from_disk(model, path, version, **options))

    def update_weights_from_tensor(
        self, model: str, tensors: Sequence[str], version: str, **options: Any
    ) -> dict[str, Any]:
        """`WeightsClient.update_weights_from_tensor`, blocking."""
        return self._run(self._client.update_weights_from_tensor(model, tensors, version, **options))

    def update_weights_from_distributed(
        self, model: str, payload: Mapping[str, Any], version: str, **options: Any
    ) -> dict[str, Any]:
        """`WeightsClient.update_weights_from_distributed`, blocking."""
        return self._run(self._client.update_weights_from_distributed(model, payload, version, **options))

    def init_weights_update_group(self, model: str, payload: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        """`WeightsClient.init_weights_update_group`, blocking."""
        return self._run(self._client.init_weights_update_group(model, payload, **options))

    def destroy_weights_update_group(self, model: str, **options: Any) -> dict[str, Any]:
        """`WeightsClient.destroy_weights_update_group`, blocking."""
        return self._run(self._client.destroy_weights_update_group(model, **options))

    def begin_update(self, model: str, source: str, version: str, payload: Mapping[str, Any], **options: Any) -> str:
        """`WeightsClient.begin_update`, blocking until it has begun."""
        return self._run(self._client.begin_update(model, source, version, payload, **options))

    def begin_group(self, model: str, action: str, payload: Mapping[str, Any], **options: Any) -> str:
        """`WeightsClient.begin_group`, blocking until it has begun."""
        return self._run(self._client.begin_group(model, action, payload, **options))

    def wait(self, operation: str, timeout_seconds: float | None = None) -> dict[str, Any]:
        """`WeightsClient.wait`, blocking."""
        return self._run(self._client.wait(operation, timeout_seconds))


async def _closed(client: WeightsClient) -> None:
    client.close()
