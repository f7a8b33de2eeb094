"""Engines that somebody else runs (row E8): looked at from the head node, published, and never touched.

There is no budget, process, guard or command here. A look is `GET /health`, then `GET /model_info` for the version of
the weights and to see that the key is accepted.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from relax_slurm.core.external import Look, Sight, model_entry
from relax_slurm.core.plan import ExternalPlan, InferencePlacementPlan, ModelPlan, Role
from relax_slurm.core.snapshot import ModelEntry, ReplicaState
from relax_slurm.errors import RelaxError, StartupFailed
from relax_slurm.forward import Response, Upstream
from relax_slurm.forward.http import Header

LOOK_SECONDS = 10.0
"""For one answer: /health of an engine that generates for it takes a second, and 20 when it is paused."""
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


def external_models(plan: InferencePlacementPlan) -> list[ModelPlan]:
    """The models of a plan whose engines are somebody else's."""
    return [model for role in plan.roles for model in role.models if model.external]


def external_keys(plan: InferencePlacementPlan, environ: Mapping[str, str] = os.environ) -> dict[tuple[Role, str], str]:
    """The token for every external engine that wants one, by role and engine id; `StartupFailed` when it is missing."""
    keys: dict[tuple[Role, str], str] = {}
    for model in external_models(plan):
        for engine in model.external:
            found = _key(engine, f"{model.role} engine {engine.engine_id}", environ)
            if found is not None:
                keys[model.role, engine.engine_id] = found
    return keys


def _key(engine: ExternalPlan, who: str, environ: Mapping[str, str]) -> str | None:
    if engine.key_env is not None:
        place, value = f"variable {engine.key_env}", environ.get(engine.key_env, "")
    elif engine.key_file is not None:
        place = f"file {engine.key_file}"
        try:
            value = Path(engine.key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupFailed(f"{who}: its api_key_file {engine.key_file} cannot be read ({error})") from None
    else:
        return None
    if not _TOKEN.fullmatch(value):
        seen = "a text with blanks or other signs" if value else "nothing"
        raise StartupFailed(f"{who}: {place} on the head node holds {seen}, wanted its bearer token; set it there")
    return value


class ExternalEngines:
    """All of a run, and what was seen of them. Belongs to the coordinator's loop."""

    def __init__(
        self,
        plan: InferencePlacementPlan,
        *,
        seconds: float,
        publish: Callable[[Role], None],
        record: Callable[..., None],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._models = {(model.role, model.name): model for model in external_models(plan)}
        self._sights = {key: {e.engine_id: Sight() for e in model.external} for key, model in self._models.items()}
        self._plan, self._seconds = plan, seconds
        self._publish, self._record, self._spawn = publish, record, spawn
        self._looked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._upstream: Upstream | None = None

    def entry(self, role: Role, model: str) -> ModelEntry:
        """The model as discovery shows it."""
        return model_entry(self._models[role, model], self._sights[role, model])

    @property
    def complete(self) -> bool:
        """Whether every one of them is READY."""
        return all(sight.state is ReplicaState.READY for sights in self._sights.values() for sight in sights.values())

    def rows(self) -> list[dict[str, Any]]:
        """What the state document says of them."""
        return [
            {
                "engine": engine.engine_id,
                "role": str(role),
                "model": name,
                "url": engine.url,
                "state": str(self._sights[role, name][engine.engine_id].state),
                "generation": self._sights[role, name][engine.engine_id].generation,
                "reason": self._sights[role, name][engine.engine_id].reason,
            }
            for (role, name), model in self._models.items()
            for engine in model.external
        ]

    async def start(self) -> None:
        """Begin to look, and return when each was looked at once. `StartupFailed` when a key is missing."""
        if not self._models:
            return
        keys = external_keys(self._plan)
        self._upstream = Upstream()
        for key, model in self._models.items():
            for engine in model.external:
                token = keys.get((model.role, engine.engine_id))
                self._tasks.append(self._spawn(self._watch(key, engine, token)))
        while any(s.state is ReplicaState.STARTING for sights in self._sights.values() for s in sights.values()):
            self._looked.clear()
            await self._looked.wait()

    async def stop(self) -> None:
        """Look no more. The engines do not notice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._upstream is not None:
            await self._upstream.close()

    async def _watch(self, key: tuple[Role, str], engine: ExternalPlan, token: str | None) -> None:
        headers: list[Header] = [] if token is None else [(b"authorization", b"Bearer " + token.encode())]
        role, name = key
        while True:
            before = self._sights[key][engine.engine_id]
            after = before.after(await self._look(engine, headers))
            self._sights[key][engine.engine_id] = after
            if after.state is not before.state:
                self._record(
                    "external",
                    role=role,
                    model=name,
                    engine=engine.engine_id,
                    before=before.state,
                    after=after.state,
                    reason=after.reason,
                )
            if (after.state, after.weight_version) != (before.state, before.weight_version):
                self._publish(role)
            self._looked.set()
            await asyncio.sleep(self._seconds)

    async def _look(self, engine: ExternalPlan, headers: list[Header]) -> Look:
        try:
            health = await self._get(engine, "/health", headers)
            if health.status != 200:
                return Look(False, reason=f"{engine.url}/health answered {health.status}, wanted 200")
            info = await self._get(engine, "/model_info", headers)
            if info.status == 404:  # the older spelling
                info = await self._get(engine, "/get_model_info", headers)
        except RelaxError as error:
            return Look(False, reason=error.message)
        if info.status in (401, 403):
            return Look(False, reason=f"{engine.url} does not accept its api key; correct api_key_env or api_key_file")
        return Look(True, _version(info))

    async def _get(self, engine: ExternalPlan, path: str, headers: list[Header]) -> Response:
        assert self._upstream is not None
        return await self._upstream.request("GET", engine.url + path, headers, b"", LOOK_SECONDS)


def _version(answer: Response) -> str | None:
    """The version in a /model_info answer, None when it says none."""
    try:
        body = json.loads(answer.body) if answer.status == 200 else None
    except (ValueError, RecursionError):
        return None
    version = body.get("weight_version") if isinstance(body, dict) else None
    return version if isinstance(version, str) and 0 < len(version) <= 255 and version.isprintable() else None
