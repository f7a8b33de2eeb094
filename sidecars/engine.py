"""The one engine class: owns an SGLang process (or the simulated one) and speaks its admin HTTP.

It keeps what SGLang itself does not guard: which memory is resident, and whether anything may be in flight. A release
with a request under way and a resume of memory that was not released both end a real engine, so both are refused here
before anything is sent. What a failed memory call left behind is *unknown*, and unknown memory is neither released nor
resumed: only the end of the process settles it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from relax_slurm.core.engine_spec import InferenceEngineSpec, Operation, OperationRefused, spec_for
from relax_slurm.core.health import Load
from relax_slurm.core.weights import OPERATIONS, GroupAction, Transport
from relax_slurm.errors import EngineFailed, RecoveryRequired, RelaxError, StartupFailed
from sidecars import process
from sidecars.command_line import build
from sidecars.engine_http import EngineHttp, Requester, excerpt
from sidecars.process import Exit, OwnedProcess
from sidecars.worker import WorkerSpec

HEALTH_SECONDS = 5.0
CONTROL_SECONDS = 30.0
_POLL_SECONDS = (0.02, 0.5)
"""First and longest pause between two looks at an engine that is starting."""


class Tag(StrEnum):
    """A part of an engine's GPU memory that can be released on its own."""

    WEIGHTS = "weights"
    """The model."""
    KV_CACHE = "kv_cache"
    """Keys and values of requests."""
    CUDA_GRAPH = "cuda_graph"
    """Captured graphs and their buffers."""


ALL_TAGS = frozenset(Tag)


class PauseMode(StrEnum):
    """What happens to running requests when generation pauses."""

    ABORT = "abort"
    """They end with what they have."""
    RETRACT = "retract"
    """They go back to the queue; the cache cannot be flushed while they are there."""
    IN_PLACE = "in_place"
    """They freeze."""


class TagState(StrEnum):
    """Where one tag is."""

    RESIDENT = "resident"
    """On the card."""
    RELEASED = "released"
    """The engine said that it gave it back; whether the card agrees is measured elsewhere."""
    UNKNOWN = "unknown"
    """A call about it failed half-way."""


class SGLangEngine:
    """One engine process. All methods belong to the event loop that called `start`."""

    def __init__(self, worker: WorkerSpec, upstream: Requester, clock: Callable[[], float] = time.monotonic) -> None:
        self.worker = worker
        self.spec: InferenceEngineSpec = spec_for(worker.role, worker.weight_source)
        self.served_model_name = worker.served_model_name
        """What the engine answers to now; an update from disk changes it."""
        self.model_path = worker.model_path
        self.weights_valid = False
        """Whether resident weights hold a checkpoint. A resume without a CPU backup leaves noise in them."""
        self.paused = False
        self.tags: dict[Tag, TagState] = dict.fromkeys(Tag, TagState.RESIDENT)
        self._clock = clock
        self._log_path = Path(worker.log_path)
        self._http = EngineHttp(worker, upstream)
        self._process = OwnedProcess(build(worker), self._log_path)
        self._drained = False

    # ---- process -----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Pid of the engine's leader, None before the start."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the leader lives."""
        return self._process.running

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Resolves with code or signal when the leader ends, for whatever reason."""
        return self._process.exited

    async def wait_exit(self, timeout_seconds: float | None = None) -> Exit | None:
        """How the leader ended, or None when it lives after `timeout_seconds`."""
        return await self._process.wait_exit(timeout_seconds)

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        """Call `callback` in the loop when the leader ends."""
        self._process.on_exit(callback)

    async def start(self, kill_seconds: float = 10.0) -> None:
        """Start the process, after killing what an earlier start of this worker left behind.

        `StartupFailed` when it cannot be executed, `RecoveryRequired` when an orphan will not die.
        """
        await process.kill_tagged(self.worker.run_tag, self.worker.worker_id, kill_seconds)
        self._process.start()

    async def wait_ready(self, deadline: float) -> None:
        """Return when the engine serves. `deadline` is in the units of `clock`.

        `StartupFailed` carries the exit and the last lines of the log. What the engine prints before it serves is not
        judged: warnings of network libraries look alarming and mean nothing.
        """
        pause = _POLL_SECONDS[0]
        while True:
            if not self._process.running:
                raise self._failed_start(f"ended with {await self._process.wait_exit()}")
            if await self.health():
                break
            if self._clock() >= deadline:
                raise self._failed_start(f"was not healthy within {self.worker.startup_seconds:g} s")
            await self._process.wait_exit(min(pause, max(deadline - self._clock(), 0.0)))
            pause = min(pause * 1.5, _POLL_SECONDS[1])
        self._process.remove_private()
        if self.worker.is_head:
            info = await self.info()
            self.served_model_name = str(info.get("served_model_name", self.served_model_name))
            self.weights_valid = True

    async def stop(self, term_seconds: float = 10.0, kill_seconds: float = 10.0) -> Exit | None:
        """End the process with everything it started. `RecoveryRequired` names what would not die."""
        end = await self._process.stop(term_seconds, kill_seconds)
        self.weights_valid = False
        return end

    def _failed_start(self, what: str) -> StartupFailed:
        lines = process.tail(self._log_path)
        last = lines[-1] if lines else "nothing was written"
        return StartupFailed(
            f"{self.worker.worker_id}: engine {what}; its last line is {last!r}; see {self._log_path}",
            detail={"worker": self.worker.worker_id, "log": lines},
        )

    # ---- looking -----------------------------------------------------------------------------------------------

    async def health(self, timeout_seconds: float = HEALTH_SECONDS) -> bool:
        """Whether the process lives and answers. Safe on a sleeping engine, because it generates nothing."""
        if not self._process.running:
            return False
        try:
            answer = await self._http.send("GET", "/health", None, timeout_seconds, admin=False)
        except RelaxError:
            return False
        return answer.status == 200

    async def load(self, timeout_seconds: float = HEALTH_SECONDS) -> Load | None:
        """What the scheduler says of its work; None when it does not answer. A version without the route is empty."""
        try:
            answer = await self._http.send("GET", "/v1/loads", None, timeout_seconds, admin=False)
            if answer.status == 404:
                return Load(0)
            return Load.read(self._http.document("/v1/loads", answer))
        except RelaxError:
            return None

    async def generates(self, timeout_seconds: float = HEALTH_SECONDS) -> bool:
        """Whether it makes one token. Ask only an engine that has nothing to do and all its memory."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            answer = await self._http.send("POST", "/generate", body, timeout_seconds, admin=False)
        except RelaxError:
            return False
        return answer.status == 200

    async def info(self, timeout_seconds: float = CONTROL_SECONDS) -> dict[str, Any]:
        """The engine's /model_info; the older spelling for versions that do not have it."""
        answer = await self._http.send("GET", "/model_info", None, timeout_seconds, admin=False)
        if answer.status == 404:
            answer = await self._http.send("GET", "/get_model_info", None, timeout_seconds, admin=False)
        return self._http.document("/model_info", answer)

    async def weight_version(self, timeout_seconds: float = CONTROL_SECONDS) -> str:
        """Version of the weights that are loaded now."""
        return str((await self.info(timeout_seconds)).get("weight_version", "default"))

    # ---- quiet -------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode = PauseMode.ABORT, timeout_seconds: float = CONTROL_SECONDS) -> None:
        """Stop generating; requests that come now hang until `continue_`."""
        await self._http.control("/pause_generation", {"mode": mode.value}, timeout_seconds)
        self.paused = True

    async def continue_(self, timeout_seconds: float = CONTROL_SECONDS) -> None:
        """Generate again. Refused unless all memory is resident: the first token would kill the engine."""
        missing = sorted(tag for tag, state in self.tags.items() if state is not TagState.RESIDENT)
        if missing:
            raise self._refused("continue", f"{', '.join(missing)} is not resident", "onload it first")
        self._drained = False
        await self._http.control("/continue_generation", {}, timeout_seconds)
        self.paused = False

    async def abort_all(self, timeout_seconds: float = CONTROL_SECONDS) -> None:
        """Abort everything the engine's scheduler has."""
        await self._http.control("/abort_request", {"abort_all": True}, timeout_seconds)

    async def abort(self, rid: str, timeout_seconds: float = CONTROL_SECONDS) -> None:
        """Abort request `rid` and every request whose id begins with it: ids must all be of one length."""
        if not rid:
            raise self._refused("abort", "the request id is empty", "name one, or abort all")
        await self._http.control("/abort_request", {"rid": rid}, timeout_seconds)

    async def flush(self, timeout_seconds: float = CONTROL_SECONDS) -> bool:
        """Empty the KV cache. True only when nothing runs or waits: the proof that the engine is drained."""
        answer = await self._http.send("POST", "/flush_cache", {}, timeout_seconds, admin=True)
        if answer.status not in {200, 400}:
            raise self._http.unexpected("/flush_cache", answer)
        self._drained = answer.status == 200 and self.paused
        return answer.status == 200

    # ---- memory ------------------------------------------------------------------------------------------------

    @property
    def resident(self) -> frozenset[Tag]:
        """Tags that are on the card for certain."""
        return frozenset(tag for tag, state in self.tags.items() if state is TagState.RESIDENT)

    async def release(self, tags: Iterable[Tag] = ALL_TAGS, timeout_seconds: float = CONTROL_SECONDS) -> None:
        """Give memory back. Only what is resident is asked for; with nothing left to ask, nothing is sent.

        `OperationRefused` unless the engine is paused and a flush proved it empty. When the call fails, the tags are
        unknown and `RecoveryRequired` is raised. The card may need longer than the answer: measure it.
        """
        self.spec.check(Operation.OFFLOAD)
        wanted = sorted(set(tags) & self.resident)
        self._refuse_unknown("release")
        if not self.worker.memory_saver:
            raise self._refused("release", "it was started without a memory saver", "plan the role with offload")
        if wanted and not (self.paused and self._drained):
            raise self._refused("release", "requests may still be under way", "pause, abort and flush first")
        await self._move(wanted, "/release_memory_occupation", TagState.RELEASED, timeout_seconds)
        if Tag.WEIGHTS in wanted:
            self.weights_valid = False

    async def resume(self, tags: Iterable[Tag] = ALL_TAGS, timeout_seconds: float = CONTROL_SECONDS) -> None:
        """Take memory again. Only what was released is asked for; a resident tag would kill the engine."""
        self.spec.check(Operation.ONLOAD)
        self._refuse_unknown("resume")
        wanted = sorted(tag for tag in set(tags) if self.tags[tag] is TagState.RELEASED)
        await self._move(wanted, "/resume_memory_occupation", TagState.RESIDENT, timeout_seconds)
        if Tag.WEIGHTS in wanted:
            self.weights_valid = bool(self.worker.has_weights_backup)

    async def _move(self, tags: list[Tag], path: str, after: TagState, timeout_seconds: float) -> None:
        if not tags:
            return
        self.tags.update(dict.fromkeys(tags, TagState.UNKNOWN))
        body = {"tags": [tag.value for tag in tags]}
        try:
            answer = await self._http.send("POST", path, body, timeout_seconds, admin=True)
        except RelaxError as error:
            raise self._doubtful(path, tags, error.message) from error
        if answer.status != 200:
            raise self._doubtful(path, tags, excerpt(answer))
        self.tags.update(dict.fromkeys(tags, after))

    def followed(self, state: TagState) -> None:
        """A follower's memory went where its head's went."""
        self.tags = dict.fromkeys(Tag, state)
        self.weights_valid = state is TagState.RESIDENT

    def _refuse_unknown(self, what: str) -> None:
        unknown = sorted(tag for tag, state in self.tags.items() if state is TagState.UNKNOWN)
        if unknown:
            raise RecoveryRequired(
                f"{self.worker.worker_id}: {what} is refused, an earlier memory call left {', '.join(unknown)} in "
                "doubt; stop the engine to settle it"
            )

    def _doubtful(self, path: str, tags: Iterable[Tag], why: str) -> RecoveryRequired:
        return RecoveryRequired(
            f"{self.worker.worker_id}: {path} for {', '.join(tags)} had no clear outcome ({why}); the GPUs stay "
            "fenced until the engine is stopped"
        )

    # ---- weights -----------------------------------------------------------------------------------------------

    async def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        *,
        abort_all_requests: bool = False,
        flush_cache: bool = True,
        timeout_seconds: float = 600.0,
    ) -> None:
        """Load other weights. Refused for a static engine; a bad path leaves the old ones in place.

        SGLang takes the path as its new served name as well, which `served_model_name` then says.
        """
        body: dict[str, Any] = {
            "model_path": model_path,
            "flush_cache": flush_cache,
            "abort_all_requests": abort_all_requests,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        await self.change_weights(Transport.DISK, body, timeout_seconds)

    async def reload_weights(self, timeout_seconds: float = 600.0) -> None:
        """Load the present checkpoint again, to fill weights that a resume left as noise. No other weights."""
        body = {"model_path": self.model_path, "flush_cache": True, "abort_all_requests": False}
        await self._load(Transport.DISK, body, timeout_seconds)

    async def change_weights(self, transport: Transport, body: Mapping[str, Any], timeout_seconds: float) -> None:
        """SGLang's update call for this way of sending, with its body as it is. Refused for a static engine.

        `EngineFailed` when the engine says no: a checkpoint then leaves the old weights in place, what came from a
        trainer may have replaced some of them.
        """
        self.spec.check(OPERATIONS[transport])
        await self._load(transport, body, timeout_seconds)

    async def change_group(self, action: GroupAction, body: Mapping[str, Any], timeout_seconds: float) -> None:
        """Join or leave a group for distributed updates. Refused for a static engine."""
        self.spec.check(Operation.UPDATE_WEIGHTS_DISTRIBUTED)
        await self._agreed(f"/{action}_weights_update_group", body, timeout_seconds)

    async def _load(self, transport: Transport, body: Mapping[str, Any], timeout_seconds: float) -> None:
        if self.tags[Tag.WEIGHTS] is not TagState.RESIDENT:
            raise self._refused("a weight update", "the weights are not resident", "resume them first")
        self.weights_valid = self.weights_valid and transport is Transport.DISK
        await self._agreed(f"/update_weights_from_{transport}", body, timeout_seconds)
        if transport is Transport.DISK:
            self.model_path = self.served_model_name = str(body["model_path"])
        self.weights_valid = True

    async def _agreed(self, path: str, body: Mapping[str, Any], timeout_seconds: float) -> None:
        answer = await self._http.control(path, body, timeout_seconds)
        if answer.get("success") is not True:
            raise EngineFailed(f"{self.worker.worker_id}: {path} failed: {answer.get('message')}")

    def _refused(self, what: str, why: str, instead: str) -> OperationRefused:
        return OperationRefused(f"{self.worker.worker_id}: {what} is refused, {why}; {instead}")
