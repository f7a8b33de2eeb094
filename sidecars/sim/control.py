"""The admin routes of a simulated engine: abort, pause, flush, memory, weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from relax_slurm.forward import Exchange
from sidecars.sim.engine import SimEngine, log
from sidecars.sim.model import Weights, fingerprint
from sidecars.sim.options import FaultKind
from sidecars.sim.protocol import Deadly, Invalid
from sidecars.sim.scheduler import PauseMode

Route = Callable[[Exchange], Awaitable[None]]
_DEFAULT_GROUP = "weight_update_group"


class Control:
    """Handlers that change the engine. Every one of them wants the admin key when there is one."""

    def __init__(self, engine: SimEngine) -> None:
        self._engine = engine
        self._groups: set[str] = set()

    def routes(self) -> dict[str, tuple[bool, Route]]:
        """Path to (POST only, handler)."""
        return {
            "/abort_request": (True, self._abort),
            "/flush_cache": (False, self._flush),
            "/pause_generation": (True, self._pause),
            "/continue_generation": (True, self._continue),
            "/release_memory_occupation": (False, self._release),
            "/resume_memory_occupation": (False, self._resume),
            "/update_weights_from_disk": (True, self._update_from_disk),
            "/update_weights_from_tensor": (True, self._update_from_tensor),
            "/update_weights_from_distributed": (True, self._update_from_distributed),
            "/init_weights_update_group": (True, self._init_group),
            "/destroy_weights_update_group": (True, self._destroy_group),
            "/update_weight_version": (True, self._update_version),
            "/weights_checker": (False, self._check_weights),
        }

    async def _abort(self, exchange: Exchange) -> None:
        body = _body(exchange)
        if body is not None:
            rid, everything = body.get("rid") or "", bool(body.get("abort_all"))
            if everything or (isinstance(rid, str) and rid):
                self._engine.scheduler.abort(rid, everything=everything)
            exchange.respond(200)

    async def _flush(self, exchange: Exchange) -> None:
        if self._engine.scheduler.in_scheduler():
            text = "Flush cache failed.\n"
        else:
            text = (
                "Cache flushed.\nPlease check backend logs for more details. "
                "(When there are running or waiting requests, the operation will not be performed.)\n"
            )
        status = 400 if self._engine.scheduler.in_scheduler() else 200
        exchange.respond(status, text.encode())

    async def _pause(self, exchange: Exchange) -> None:
        body = _body(exchange)
        if body is None:
            return
        try:
            mode = PauseMode(body.get("mode", PauseMode.ABORT))
        except ValueError:
            _invalid(exchange, "mode: Input should be 'abort', 'retract' or 'in_place'")
            return
        await self._engine.scheduler.pause(mode)
        exchange.respond_json(200, {"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, exchange: Exchange) -> None:
        if _body(exchange) is not None:
            self._engine.scheduler.resume()
            exchange.respond_json(200, {"message": "Generation continued successfully.", "status": "ok"})

    # ---- memory
    # ------------------------------------------------------------------------------------------------

    async def _release(self, exchange: Exchange) -> None:
        tags = _memory_body(exchange)
        if tags is None:
            return
        if self._engine.options.fault(FaultKind.HANG_RELEASE):
            await asyncio.Event().wait()
        if self._engine.scheduler.busy:
            raise Deadly("AssertionError: release_memory_occupation should be called only when server is idle.")
        self._engine.move_memory("release", tags)
        await self._engine.tell("release", tags)
        exchange.respond_json(200, None)

    async def _resume(self, exchange: Exchange) -> None:
        tags = _memory_body(exchange)
        if tags is None:
            return
        self._engine.move_memory("resume", tags)
        await self._engine.tell("resume", tags)
        exchange.respond_json(200, None)

    # ---- weights
    # -----------------------------------------------------------------------------------------------

    async def _update_from_disk(self, exchange: Exchange) -> None:
        body = _body(exchange, "model_path")
        if body is None:
            return
        path = body["model_path"]
        held = 0
        if not _loadable(path) or self._engine.options.fault(FaultKind.REFUSE_UPDATE):
            success, message = False, f"Failed to get weights iterator: {path} (no such checkpoint)."
        else:
            held = await self._load(body, path, fingerprint(self._engine.options.seed, path))
            success, message = True, "Succeeded to update model weights."
            self._engine.model_path = self._engine.served_model_name = path
            if body.get("weight_version") is not None:
                message += f" Weight version updated to {body['weight_version']}."
        answer = {"success": success, "message": message, "num_paused_requests": held}
        exchange.respond_json(200 if success else 400, answer)

    async def _update_from_tensor(self, exchange: Exchange) -> None:
        body = _body(exchange, "serialized_named_tensors")
        if body is not None:
            await self._load_in_place(body, body["serialized_named_tensors"])
            _outcome(exchange, True, "Success")

    async def _update_from_distributed(self, exchange: Exchange) -> None:
        body = _body(exchange, "names", "dtypes", "shapes")
        if body is None:
            return
        group = body.get("group_name", _DEFAULT_GROUP)
        if group not in self._groups:
            reason = f"Group {group} not in {sorted(self._groups)}. Please call `init_weights_update_group` first."
            _outcome(exchange, False, reason)
            return
        await self._load_in_place(body, (body["names"], body["shapes"]))
        _outcome(exchange, True, "Succeeded to update parameter online.")

    async def _load_in_place(self, body: Mapping[str, Any], content: Any) -> None:
        before = self._engine.scheduler.weights
        self._engine.updates += 1
        print_of = fingerprint(before.fingerprint, content, self._engine.updates)
        await self._load(body, before.path, print_of)

    async def _load(self, body: Mapping[str, Any], path: str, content: int) -> int:
        scheduler = self._engine.scheduler
        kept = self._engine.options.fault(FaultKind.KEEP_VERSION)
        version = None if kept else body.get("weight_version")
        weights = Weights(path, scheduler.weights.version if version is None else str(version), content)
        held = await scheduler.replace_weights(weights, abort_first=bool(body.get("abort_all_requests")))
        log(f"weights updated: path {path}, version {weights.version}")
        return held

    async def _init_group(self, exchange: Exchange) -> None:
        body = _body(exchange, "master_address", "master_port", "rank_offset", "world_size")
        if body is not None:
            self._groups.add(str(body.get("group_name", _DEFAULT_GROUP)))
            _outcome(exchange, True, "Succeeded to initialize custom process group.")

    async def _destroy_group(self, exchange: Exchange) -> None:
        body = _body(exchange)
        if body is None:
            return
        group = str(body.get("group_name", _DEFAULT_GROUP))
        known = group in self._groups
        self._groups.discard(group)
        text = "Succeeded to destroy custom process group." if known else "The group to be destroyed does not exist."
        _outcome(exchange, known, text)

    async def _update_version(self, exchange: Exchange) -> None:
        body = _body(exchange, "new_version")
        if body is None:
            return
        if not isinstance(body["new_version"], str):
            _invalid(exchange, "new_version: Input should be a valid string")
            return
        scheduler = self._engine.scheduler
        if body.get("abort_all_requests", True):
            scheduler.abort("", everything=True)
        now, version = scheduler.weights, body["new_version"]
        scheduler.weights = Weights(now.path, version, now.fingerprint, now.garbled)
        answer = {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        exchange.respond_json(200, answer)

    async def _check_weights(self, exchange: Exchange) -> None:
        body = _body(exchange) if exchange.request.body else {}
        if body is None:
            return
        action = body.get("action", "checksum")
        if action != "checksum":
            _outcome(exchange, False, f"Unsupported action={action!r}")
            return
        total = f"{self._engine.scheduler.weights.key:016x}"
        rank = {"checksums": {"model.weight": total}, "per_gpu_checksum": total}
        answer = {"success": True, "message": "Success.", "ranks": [rank], "per_engine_checksum": total}
        exchange.respond_json(200, answer)


def _body(exchange: Exchange, *required: str) -> dict[str, Any] | None:
    """The JSON object of a control call, or None after a 400 for one that does not validate."""
    try:
        value = msgspec.json.decode(exchange.request.body)
    except msgspec.DecodeError as error:
        _invalid(exchange, f"JSON decode error: {error}")
        return None
    missing = [key for key in required if not isinstance(value, dict) or key not in value]
    if not isinstance(value, dict) or missing:
        _invalid(exchange, f"{', '.join(missing) or 'body'}: Field required")
        return None
    return value


def _loadable(path: Any) -> bool:
    """Whether weights can be read from `path`: a hub name always, a path on disk when it exists."""
    if not isinstance(path, str) or not path:
        return False
    return os.path.exists(path) if path.startswith(("/", ".")) else True


def _memory_body(exchange: Exchange) -> tuple[str, ...] | None:
    """The tags of a memory call, () for all; None after a 400."""
    body = _body(exchange)
    if body is None:
        return None
    tags = body.get("tags")
    if tags is not None and not (isinstance(tags, list) and all(isinstance(tag, str) for tag in tags)):
        _invalid(exchange, "tags: Input should be a valid list")
        return None
    return tuple(tags or ())


def _invalid(exchange: Exchange, text: str) -> None:
    exchange.respond_json(400, Invalid(text, validation=True).native_body())


def _outcome(exchange: Exchange, success: bool, message: str) -> None:
    exchange.respond_json(200 if success else 400, {"success": success, "message": message})
