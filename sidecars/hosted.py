"""One worker on this node: engine process, admission guard (on the head) and its stay on the cards, as one thing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from relax_slurm.core.health import HealthBudget, Pulse, Verdict
from relax_slurm.core.weights import GroupAction, Weights
from relax_slurm.errors import ProtocolError, RecoveryRequired, RelaxError, StartupFailed, UpstreamFailed
from relax_slurm.forward.upstream import Upstream
from relax_slurm.wire.messages import WorkerState
from sidecars.admission import Admission, AdmissionGuard, DrainResult
from sidecars.engine import SGLangEngine, Tag, TagState
from sidecars.engine_http import EngineHttp
from sidecars.health import HealthWatch
from sidecars.ledger import NodeLedger
from sidecars.nvml import memory_meter
from sidecars.payload_check import PayloadCheck
from sidecars.process import Exit
from sidecars.residency import Outcome, Result, Tenancy
from sidecars.sweep import NODE_TAG
from sidecars.vocabulary import vocabulary
from sidecars.weights import WeightChange
from sidecars.worker import WorkerSpec

log = logging.getLogger(__name__)
TERM_SECONDS = 10.0
KILL_SECONDS = 10.0
MEASURE_SECONDS = 1.0
MUTE_TERM_SECONDS = 1.0
"""How long an engine that failed its health checks may take to end by itself: it has shown that it does not listen."""

Tell = Callable[["HostedWorker", str, str], None]


class EngineExited(RelaxError):
    """The engine ended during an operation and everything it had started is confirmed gone."""

    code = "exited"


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What all workers of a node share."""

    run_tag: str
    node: str
    logs: Path
    ledger: Path
    """Folder of the memory ledger of simulated engines."""
    guard_key: str
    """What callers of the guards must show."""
    upstream: Upstream


class _Gate:
    """The guard as `Tenancy` sees it: opening is the coordinator's decision, so here it is only noted."""

    def __init__(self, guard: AdmissionGuard | None) -> None:
        self._guard = guard
        self.backend_drained = False

    def open(self, *, backend_drained: bool = False) -> None:
        self.backend_drained = backend_drained

    async def close(self, drain_deadline_seconds: float) -> DrainResult:
        self.backend_drained = False
        return DrainResult(0, 0) if self._guard is None else await self._guard.close(drain_deadline_seconds)


class HostedWorker:
    """All methods belong to the sidecar's loop. Commands arrive one at a time, `stop` may come in between."""

    def __init__(
        self,
        spec: WorkerSpec,
        guard_at: tuple[str, int] | None,
        generation: int,
        settings: HostSettings,
        tell: Tell,
        budget: HealthBudget,
    ) -> None:
        self.spec = spec
        self.generation = generation
        self.state = WorkerState.STARTING
        self.detail = ""
        self.memory_bytes: int | None = None
        """Bytes in use on its cards when they were last looked at; None when that is not known."""
        self._guard_at, self._settings, self._tell = guard_at, settings, tell
        self.engine = SGLangEngine(spec, settings.upstream)
        self._check = PayloadCheck()
        self.guard: AdmissionGuard | None = None
        if guard_at is not None:
            self.guard = AdmissionGuard(
                spec.base_url,
                spec.api_key,
                generation=generation,
                is_alive=lambda: self.engine.running,
                require_key=settings.guard_key,
                payload_check=self._check,
                served_name=spec.served_model_name,
            )
        self._gate = _Gate(self.guard)
        self.tenancy = Tenancy(self.engine, self._gate, _meter(spec, settings))
        self.suspect = False
        """Alive and not moving: nothing new is given to it."""
        self._budget = budget
        self._watch = HealthWatch(self.engine, self.guard, budget, self._unasked)
        self._operations = 0
        self._term_seconds = TERM_SECONDS
        self._stopping = False
        self._starting: asyncio.Future[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._health: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    def from_args(cls, args: Mapping[str, Any], settings: HostSettings, tell: Tell) -> HostedWorker:
        """The worker of a `start_worker` command; `ProtocolError` names what is wrong with the arguments."""
        body = args.get("spec")
        guard = args.get("guard")
        if not isinstance(body, Mapping) or not isinstance(guard, Mapping):
            raise ProtocolError("start_worker: spec or guard is missing; send both as maps")
        name = str(body.get("worker_id", "")).replace("/", "_").replace("#", "_w")
        log_path = settings.logs / f"{settings.node}_{body.get('role')}_{name}.log"
        spec = WorkerSpec.from_wire({**body, "log_path": str(log_path)})
        spec = replace(
            spec,
            api_key=secrets.token_hex(24),  # a leading "-" would be taken for an option
            admin_key=secrets.token_hex(24),
            run_tag=settings.run_tag,
            env={**spec.env, NODE_TAG: settings.node},  # what a later sidecar of this node finds it by
            sim={**spec.sim, "ledger": str(settings.ledger), "node": settings.node},
        )
        at = (str(guard["host"]), int(guard["port"])) if spec.is_head else None
        budget = HealthBudget.from_wire(args.get("health"))
        return cls(spec, at, int(guard.get("generation", 1)), settings, tell, budget)

    # --- what others see ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The worker as a beat carries it (`wire.messages.WorkerStatus`)."""
        guard = self.guard
        return {
            "worker_id": self.spec.worker_id,
            "generation": self.generation,
            "state": str(self.state),
            "admission_open": guard is not None and guard.state is Admission.OPEN,
            "in_flight": 0 if guard is None else guard.in_flight,
            "pid": self.engine.pid,
            "resident_tags": sorted(str(tag) for tag in self.engine.resident) if self.engine.running else [],
            "memory_bytes": self.memory_bytes,
            "suspect": self.suspect,
            "detail": self.detail,
        }

    async def look_at_memory(self) -> None:
        """Measure again, in a thread and for a bounded time: a driver or file system that hangs costs the number."""
        if self._measuring is None or self._measuring.done():
            self._measuring = asyncio.create_task(self._measure())
        await asyncio.wait({self._measuring}, timeout=MEASURE_SECONDS)

    async def _measure(self) -> None:
        used: Mapping[int, int] = {}
        with contextlib.suppress(RelaxError, OSError):
            used = await asyncio.to_thread(self.tenancy.measure)
        self.memory_bytes = sum(used.values()) if used else None

    @property
    def base_url(self) -> str | None:
        """Where the guard is published."""
        if self._guard_at is None:
            return None
        host, port = self._guard_at
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # --- commands -------------------------------------------------------------------------------------------

    async def start(self) -> dict[str, Any]:
        """Start the engine and the closed guard; answers when it is healthy. Ends everything when it is not."""
        self._starting = asyncio.get_running_loop().create_future()
        try:
            await self._bring_up(time.monotonic() + self.spec.startup_seconds)
        except RelaxError as error:
            await self._give_up(error)
        except OSError as error:
            await self._give_up(StartupFailed(f"{self.spec.worker_id}: {error}; see this node's file systems"))
        finally:
            self._starting.set_result(None)
        self._set(WorkerState.UP)
        self._health = asyncio.get_running_loop().create_task(self._look_after_health())
        return {"base_url": self.base_url, "pid": self.engine.pid}

    async def _bring_up(self, deadline: float) -> None:
        await self.tenancy.note_before_start()
        await self.engine.start()
        self.engine.on_exit(self._exited)
        if self._stopping:
            raise StartupFailed(f"{self.spec.worker_id} was told to stop while it started")
        await self.engine.wait_ready(deadline)
        if self.guard is not None and self._guard_at is not None:
            await self._learn_vocabulary()
            await self._listen(*self._guard_at)
        await self.tenancy.note_loaded()

    async def _learn_vocabulary(self) -> None:
        size = await vocabulary(self.spec, EngineHttp(self.spec, self._settings.upstream))
        if size is None:
            log.warning(
                "%s: its vocabulary is not known; too large token ids are not kept from it", self.spec.worker_id
            )
        self._check.learn(size)

    async def _listen(self, host: str, port: int) -> None:
        assert self.guard is not None
        try:
            await self.guard.start(host, port)
        except OSError as error:
            raise StartupFailed(
                f"{self.spec.worker_id}: port {port} on {host} for its admission guard is not to be had "
                f"({error.strerror}); free it or choose another port window"
            ) from None

    async def _give_up(self, error: RelaxError) -> NoReturn:
        """A start failed: nothing of it may stay. The error becomes `EngineExited` when that is proven."""
        self._stopping = True
        if self.guard is not None:
            await self.guard.stop(0.0)
        try:
            await self.engine.stop(TERM_SECONDS, KILL_SECONDS)
        except RecoveryRequired as doubt:
            self._set(WorkerState.UNCONFIRMED, doubt.message)
            raise
        self._set(WorkerState.EXITED, error.message)
        raise EngineExited(error.message) from error

    async def stop(self, drain_seconds: float) -> None:
        """End the engine with everything it started. `RecoveryRequired` when that cannot be confirmed."""
        self._stopping = True
        if self._health is not None:
            self._health.cancel()
        if self.guard is not None:
            await self.guard.close(drain_seconds)
            await self.guard.stop()
        try:
            await self.engine.stop(min(TERM_SECONDS, self._term_seconds), KILL_SECONDS)
            if self._starting is not None and not self._starting.done():
                # A start under way may have been just before its process: only when it is over nothing comes after us.
                await asyncio.wait({self._starting})
                await self.engine.stop(TERM_SECONDS, KILL_SECONDS)
        except RecoveryRequired as doubt:
            self._set(WorkerState.UNCONFIRMED, doubt.message)
            raise
        self._set(WorkerState.EXITED, self.detail or "stopped")

    def open_admission(self) -> dict[str, Any]:
        """Let requests in, when the engine is up and nothing of an earlier time is left."""
        if self.state is not WorkerState.UP or self.guard is None:
            raise RecoveryRequired(f"{self.spec.worker_id} is {self.state}, wanted up; onload or start it first")
        self.guard.open(backend_drained=self._gate.backend_drained)
        self.tenancy.opened()
        return {"base_url": self.base_url}

    async def close_admission(self, drain_seconds: float) -> dict[str, Any]:
        """Admit nothing more; what runs gets `drain_seconds` before it is cut."""
        result = await self._gate.close(drain_seconds)
        return {"drained": result.drained, "cancelled": result.cancelled}

    async def offload(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """The safe offload order under one deadline; answers after the memory was measured."""
        with self.operation():
            outcome = await self.tenancy.offload(float(args["deadline_seconds"]))
            if not outcome.ok:
                raise await self._failed(outcome)
            self._set(WorkerState.ASLEEP)
        return outcome.as_json()

    async def onload(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Bring released tags back; admission stays closed until it is asked for.

        An engine that has its memory and waits for weights is up; the result says so, and the same call again, once
        they are there, does the rest.
        """
        tags = [Tag(name) for name in args.get("tags") or list(Tag)]
        with self.operation():
            wanted = args.get("weights")
            weights = None if wanted is None else Weights(str(wanted["version"]), str(wanted["path"]))
            outcome = await self.tenancy.onload(float(args["deadline_seconds"]), tags, weights=weights)
            if not (outcome.ok or outcome.result is Result.WEIGHTS_PENDING):
                raise await self._failed(outcome)
            self._set(WorkerState.UP)
        return outcome.as_json()

    @contextlib.contextmanager
    def operation(self) -> Iterator[None]:
        """Hold the replica: inside, nothing is asked of the engine for the sake of its health."""
        self._operations += 1
        try:
            yield
        finally:
            self._operations -= 1

    async def _failed(self, outcome: Outcome) -> RelaxError:
        if outcome.result is Result.ENGINE_GONE:
            if self._ending is not None:
                await asyncio.wait({self._ending})
            if self.state is WorkerState.EXITED:
                return EngineExited(outcome.message)
        else:
            self._set(WorkerState.FAILED, outcome.message)
        return RecoveryRequired(outcome.message)

    async def update_weights(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Close, load other weights, ask the engine for its version; admission stays closed until it is asked for."""
        with self.operation():
            return await WeightChange(self.engine, self.tenancy).run(args)

    async def weights_group(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Join or leave a group for distributed updates."""
        action, payload = GroupAction(args["action"]), dict(args["payload"])
        with self.operation():
            await self.engine.change_group(action, payload, float(args["deadline_seconds"]))
        return {}

    def hold(self, reason: str) -> None:
        """Admit nothing new until the coordinator asks for it again; what runs goes on."""
        if self.guard is not None and self.guard.state is Admission.OPEN:
            log.warning("%s: admission is held: %s", self.spec.worker_id, reason)
            self.guard.hold()

    # --- what happens by itself -----------------------------------------------------------------------------

    def _exited(self, end: Exit) -> None:
        """The engine's leader ended. Unless we ended it, close the door and make sure that nothing is left."""
        if self._stopping or self.state is WorkerState.STARTING:
            return  # whoever stops or starts it sees it too, and knows more about it
        self._set(WorkerState.FAILED, f"the engine ended with {end}")
        self._ending = asyncio.get_running_loop().create_task(self._after_exit(end))

    async def _after_exit(self, end: Exit) -> None:
        detail = f"the engine ended with {end}; see {self.spec.log_path}"
        try:
            await self.stop(drain_seconds=0.0)
        except RecoveryRequired as doubt:
            detail = doubt.message
        self.detail = detail
        self._tell(self, "exited", detail)

    def _unasked(self) -> bool:
        """Whether looking is forbidden: an operation holds the replica, it sleeps, is paused, or drains."""
        awake = all(state is TagState.RESIDENT for state in self.engine.tags.values())
        draining = self.guard is not None and self.guard.state is Admission.DRAINING
        return self._operations > 0 or self.state is not WorkerState.UP or self.engine.paused or draining or not awake

    async def _look_after_health(self) -> None:
        """The second signal beside the process (`core.health`): suspect engines get nothing new, failed ones end."""
        pulse = Pulse()
        while True:
            await asyncio.sleep(pulse.pause(self._budget, busy=self._watch.busy))
            pulse = pulse.after((await self._watch.look()).sign)
            verdict = pulse.verdict(self._budget)
            if verdict is Verdict.FAILED:
                self._lost(str(pulse))
                return
            if self.suspect is not (verdict is Verdict.SUSPECT):
                self._doubt(verdict is Verdict.SUSPECT, str(pulse))

    def _doubt(self, suspect: bool, why: str) -> None:
        self.suspect, self.detail = suspect, why if suspect else ""
        if self.guard is not None:
            self.guard.suspect = self.detail
        log.warning("%s is %s", self.spec.worker_id, f"suspect: {why}" if suspect else "well again")
        self._tell(self, "suspect" if suspect else "healthy", self.detail)

    def _lost(self, why: str) -> None:
        """The budget is used up: whoever waits for an answer hears it now, and the coordinator will end the rest."""
        self._set(WorkerState.FAILED, f"health: {why}")
        self._term_seconds = MUTE_TERM_SECONDS
        if self.guard is not None:
            self.guard.suspect = why
            self.guard.cut(
                UpstreamFailed(f"{self.spec.worker_id}: the engine is given up, {why}; it may have run this")
            )
        self._tell(self, "unhealthy", self.detail)

    def _set(self, state: WorkerState, detail: str = "") -> None:
        self.state, self.detail = state, detail


def _meter(spec: WorkerSpec, settings: HostSettings) -> Callable[[Sequence[int]], Mapping[int, int]] | None:
    """What measures the cards: the ledger for simulated engines, NVML for real ones where there is one."""
    if spec.program == "sim":
        return NodeLedger(settings.ledger, settings.node).used_by_gpu
    return memory_meter(spec.gpus, spec.gpu_indexes)
