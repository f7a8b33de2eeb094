"""The node daemon itself: what it says, what it does when asked, and when it closes its doors on its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from relax_slurm.errors import ProtocolError, RelaxError
from relax_slurm.wire.client import SidecarLink
from relax_slurm.wire.messages import BeatAck, Command, Method, Refused, Welcome, parse_for_sidecar
from sidecars.commands import CommandTable
from sidecars.hosted import HostedWorker, HostSettings
from sidecars.sweep import sweep

log = logging.getLogger(__name__)
HELLO_SECONDS = 1.0
AGAIN_SECONDS = 0.05
FIRST_SILENCE_SECONDS = 10.0
NOT_OURS = frozenset({"stale_incarnation", "stale_attempt", "unknown_node", "not_as_bound"})
"""Refusals after which this node is somebody else's, or nobody's."""


class StaleGeneration(ProtocolError):
    """The command is for a worker that a later command has ended or replaced."""

    code = "stale_generation"


class NodeDaemon:
    """State of one sidecar process."""

    def __init__(
        self,
        node: str,
        attempt: int,
        report: dict[str, Any],
        link: SidecarLink,
        settings: HostSettings,
    ) -> None:
        self.node, self.attempt, self.report = node, attempt, report
        self.incarnation = secrets.token_hex(8)
        self.epoch = ""
        self.workers: dict[str, HostedWorker] = {}
        self.leaving = asyncio.Event()
        self._closing = False
        self._ended: dict[str, int] = {}
        """Highest generation of each worker that was told to stop: a start that was overtaken must not happen."""
        self._link, self._settings = link, settings
        self._commands = CommandTable()
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcomed = asyncio.Event()
        self._beat_seconds, self._silence_seconds = 1.0, FIRST_SILENCE_SECONDS
        self._last_heard = time.monotonic()
        self._sequence = 0

    async def run(self) -> None:
        """Serve until told to shut down; every engine is ended before this returns."""
        works = (self._receive(), self._beat(), self._watch(), self._measure())
        loops = [asyncio.create_task(work) for work in works]
        leaving = asyncio.create_task(self.leaving.wait())
        try:
            done, _ = await asyncio.wait({*loops, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()
        finally:
            await self.end_all()
            await self._send_beat()  # the last word: what is proven to have ended
            for task in (*loops, leaving, *self._tasks):
                task.cancel()
            await asyncio.gather(*loops, leaving, *self._tasks, return_exceptions=True)

    async def end_all(self) -> list[str]:
        """End every engine for good; the worker ids whose end could not be confirmed."""
        self._closing = True
        results = await asyncio.gather(
            *(worker.stop(drain_seconds=0.0) for worker in self.workers.values()), return_exceptions=True
        )
        pairs = zip(self.workers, results, strict=True)
        return [worker for worker, result in pairs if isinstance(result, BaseException)]

    # --- out ------------------------------------------------------------------------------------------------

    def _statuses(self) -> list[dict[str, Any]]:
        return [worker.status() for worker in self.workers.values()]

    async def _hello(self) -> bool:
        return await self._link.send(
            {
                "kind": "hello",
                "node": self.node,
                "incarnation": self.incarnation,
                "attempt": self.attempt,
                "report": self.report,
                "workers": self._statuses(),
            }
        )

    async def _beat(self) -> None:
        while True:
            if self._welcomed.is_set():
                await self._send_beat()
                await asyncio.sleep(self._beat_seconds)
            else:
                pause = HELLO_SECONDS if await self._hello() else AGAIN_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._welcomed.wait()

    async def _send_beat(self) -> None:
        if self._welcomed.is_set():
            self._sequence += 1
            await self._send("beat", seq=self._sequence, workers=self._statuses())

    async def _measure(self) -> None:
        """Keep an eye on the cards beside the beats, which must never wait for a driver or a file system."""
        while True:
            await asyncio.gather(*(worker.look_at_memory() for worker in self.workers.values()))
            await asyncio.sleep(self._beat_seconds)

    async def _send(self, kind: str, **fields: Any) -> None:
        head = {"kind": kind, "node": self.node, "incarnation": self.incarnation, "epoch": self.epoch}
        await self._link.send(head | fields)

    def tell(self, worker: HostedWorker, event: str, detail: str = "") -> None:
        """Report a change between beats."""
        self._spawn(self._send("event", worker=worker.status(), event=event, detail=detail))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a task of the sidecar failed", exc_info=fault)

    # --- in -------------------------------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            body = await self._link.receive()
            try:
                message = parse_for_sidecar(body)
            except ProtocolError as error:
                log.warning("ignored: %s", error.message)
                continue
            if isinstance(message, Refused):
                await self._refused(message)
            elif message.epoch < self.epoch:
                log.warning("ignored %s of epoch %s, %s is known", message.kind, message.epoch, self.epoch)
            elif isinstance(message, Welcome):
                self._heard()
                self.epoch = message.epoch
                self._welcomed.set()
                self._beat_seconds, self._silence_seconds = message.beat_seconds, message.silence_seconds
            elif isinstance(message, BeatAck):
                self._heard()
            else:
                self._heard()
                self._take(message)

    def _heard(self) -> None:
        self._last_heard = time.monotonic()

    async def _refused(self, refusal: Refused) -> None:
        log.warning("refused: %s: %s", refusal.code, refusal.message)
        if refusal.epoch < self.epoch:
            return  # the word of a coordinator that was replaced counts for nothing
        if refusal.code == "stale_epoch":
            self._welcomed.clear()  # another coordinator is there now: introduce ourselves
        elif refusal.code in NOT_OURS:
            # Our engines may hold GPUs that are not ours any more, so they go with us.
            self.leaving.set()

    def _take(self, command: Command) -> None:
        if command.epoch != self.epoch:
            # A newer coordinator that we have not said hello to: it cannot know our workers yet.
            self._welcomed.clear()
            return
        answer = self._commands.begin(command.id, command.method, command.args, self._do)
        self._spawn(self._answer(command.id, answer))

    async def _answer(self, operation: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        try:
            body: dict[str, Any] = {"ok": True, "value": await asyncio.shield(outcome)}
        except RelaxError as error:
            body = {"ok": False, "error": {"code": error.code, "message": error.message}}
        except Exception as error:  # the edge to the coordinator, which waits for exactly one result
            log.error("operation %s failed", operation, exc_info=error)
            message = (
                f"node {self.node}: {type(error).__name__}: {error}; a fault of relax-slurm, see the sidecar's log"
            )
            body = {"ok": False, "error": {"code": "internal", "message": message}}
        await self._send("result", id=operation, **body)
        if self._commands.method_of(operation) == Method.SHUTDOWN:
            self.leaving.set()
            return
        await asyncio.gather(*(worker.look_at_memory() for worker in self.workers.values()))
        await self._send_beat()  # after the result, so that whoever looks next sees what it did

    async def _do(self, method: str, args: dict[str, Any]) -> dict[str, Any]:
        if method == Method.SHUTDOWN:
            left = await self.end_all()
            return {"unconfirmed": left}
        worker_id = str(args.get("worker_id", ""))
        generation = int(args.get("generation", 1))
        if self._closing:
            raise ProtocolError(f"{method}: the sidecar of node {self.node} is leaving")
        if method == Method.START_WORKER:
            return await self._start(worker_id, generation, args)
        if method == Method.STOP_WORKER:
            return await self._stop(worker_id, generation, float(args.get("drain_seconds", 0.0)))
        worker = self.workers.get(worker_id)
        if worker is None:
            raise ProtocolError(f"{method}: node {self.node} has no worker {worker_id!r}; start it first")
        if worker.generation != generation:
            raise StaleGeneration(
                f"{method} is for generation {generation} of {worker_id}, {worker.generation} runs here"
            )
        match method:
            case Method.OPEN_ADMISSION:
                return worker.open_admission()
            case Method.CLOSE_ADMISSION:
                return await worker.close_admission(float(args.get("drain_seconds", 0.0)))
            case Method.OFFLOAD:
                return await worker.offload(args)
            case Method.ONLOAD:
                return await worker.onload(args)
            case Method.UPDATE_WEIGHTS:
                return await worker.update_weights(args)
            case Method.WEIGHTS_GROUP:
                return await worker.weights_group(args)
        raise ProtocolError(f"method {method!r} is not one of {', '.join(Method)}")

    async def _start(self, worker_id: str, generation: int, args: dict[str, Any]) -> dict[str, Any]:
        before = self.workers.get(worker_id)
        if before is not None and before.generation < generation:
            await before.stop(drain_seconds=0.0)
            before = None
        if before is not None or generation <= self._ended.get(worker_id, 0) or self._closing:
            raise StaleGeneration(f"start of {worker_id}, generation {generation}: a later command has overtaken it")
        worker = self.workers[worker_id] = HostedWorker.from_args(args, self._settings, self.tell)
        return await worker.start()

    async def _stop(self, worker_id: str, generation: int, drain_seconds: float) -> dict[str, Any]:
        worker = self.workers.get(worker_id)
        if worker is not None and worker.generation > generation:
            return {}  # its successor runs: that one was started after the end of what is asked about
        self._ended[worker_id] = max(generation, self._ended.get(worker_id, 0))
        if worker is not None:
            await worker.stop(drain_seconds)
        else:
            await sweep(self._settings.run_tag, self.node, worker_id)
        return {}

    # --- self-fencing ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Hold admission when nothing is heard: a head node that is gone cannot take a lease back from us."""
        while True:
            quiet = time.monotonic() - self._last_heard
            if quiet > self._silence_seconds:
                for worker in self.workers.values():
                    worker.hold("the head node is silent")
                self._welcomed.clear()
            await asyncio.sleep(min(0.25, self._beat_seconds))
