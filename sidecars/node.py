"""The node daemon: one per node, owner of the node's engines and of their admission guards.

`python -m sidecars.node --run-dir DIR` inside a Slurm step, with `--node` and `--virtual` for a virtual node. It reports
what the node has, does what the coordinator asks, tells what happens, and holds every guard by its own deadline
when the head node falls silent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from relax_slurm.core.placement_json import from_json
from relax_slurm.errors import ProtocolError, RelaxError, StartupFailed
from relax_slurm.forward.upstream import Upstream
from relax_slurm.wire.client import SidecarLink
from relax_slurm.wire.host import ephemeral_range
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import BeatAck, Command, Method, PeerKind, Refused, Welcome, parse_for_sidecar
from relax_slurm.wire.parent import end_with_parent
from sidecars.commands import CommandTable
from sidecars.hosted import HostedWorker, HostSettings
from sidecars.port_block import take_port_block
from sidecars.probe import VirtualNode, probe
from sidecars.sweep import NODE_TAG, sweep

log = logging.getLogger(__name__)
ENDPOINT_SECONDS = 60.0
HELLO_SECONDS = 1.0
FIRST_SILENCE_SECONDS = 10.0


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
        self._link, self._settings = link, settings
        self._commands = CommandTable()
        self._tasks: set[asyncio.Task[None]] = set()
        self._welcomed = False
        self._beat_seconds, self._silence_seconds = 1.0, FIRST_SILENCE_SECONDS
        self._last_heard = time.monotonic()
        self._sequence = 0

    async def run(self) -> None:
        """Serve until told to shut down; every engine is ended before this returns."""
        loops = [asyncio.create_task(work) for work in (self._receive(), self._beat(), self._watch())]
        leaving = asyncio.create_task(self.leaving.wait())
        try:
            done, _ = await asyncio.wait({*loops, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()
        finally:
            await self.end_all()
            for task in (*loops, leaving, *self._tasks):
                task.cancel()
            await asyncio.gather(*loops, leaving, *self._tasks, return_exceptions=True)

    async def end_all(self) -> list[str]:
        """End every engine; the worker ids whose end could not be confirmed."""
        results = await asyncio.gather(
            *(worker.stop(drain_seconds=0.0) for worker in self.workers.values()), return_exceptions=True
        )
        pairs = zip(self.workers, results, strict=True)
        return [worker for worker, result in pairs if isinstance(result, BaseException)]

    # --- out ------------------------------------------------------------------------------------------------

    def _statuses(self) -> list[dict[str, Any]]:
        return [worker.status() for worker in self.workers.values()]

    async def _hello(self) -> None:
        await self._link.send(
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
            if self._welcomed:
                self._sequence += 1
                await self._send("beat", seq=self._sequence, workers=self._statuses())
                await asyncio.sleep(self._beat_seconds)
            else:
                await self._hello()
                await asyncio.sleep(HELLO_SECONDS)

    async def _send(self, kind: str, **fields: Any) -> None:
        head = {"kind": kind, "node": self.node, "incarnation": self.incarnation, "epoch": self.epoch}
        await self._link.send(head | fields)

    def tell(self, worker: HostedWorker, event: str, detail: str = "") -> None:
        """Report a change between beats."""
        self._spawn(self._send("event", worker=worker.status(), event=event, detail=detail))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
                self.epoch, self._welcomed = message.epoch, True
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
        if refusal.code in ("stale_epoch", "unknown_kind"):
            self._welcomed = False  # another coordinator is there now: introduce ourselves
        elif refusal.code in ("stale_incarnation", "stale_attempt", "unknown_node"):
            # Somebody else owns this node now. Our engines may hold its GPUs, so they go with us.
            self.leaving.set()

    def _take(self, command: Command) -> None:
        if command.epoch != self.epoch:
            # A newer coordinator that we have not said hello to: it cannot know our workers yet.
            self._welcomed = False
            return
        answer = self._commands.begin(command.id, command.method, command.args, self._do)
        self._spawn(self._answer(command.id, answer))

    async def _answer(self, operation: str, outcome: asyncio.Future[dict[str, Any]]) -> None:
        try:
            body: dict[str, Any] = {"ok": True, "value": await asyncio.shield(outcome)}
        except RelaxError as error:
            body = {"ok": False, "error": {"code": error.code, "message": error.message}}
        await self._send("result", id=operation, **body)
        if self._commands.method_of(operation) == Method.SHUTDOWN:
            # The answer must leave before we do; the beat loop still runs while the queue drains.
            self.leaving.set()

    async def _do(self, method: str, args: dict[str, Any]) -> dict[str, Any]:
        if method == Method.SHUTDOWN:
            left = await self.end_all()
            return {"unconfirmed": left}
        worker_id = str(args.get("worker_id", ""))
        if method == Method.START_WORKER:
            return await self._start(worker_id, args)
        worker = self.workers.get(worker_id)
        if method == Method.STOP_WORKER:
            if worker is not None:
                await worker.stop(drain_seconds=float(args.get("drain_seconds", 0.0)))
            else:
                await sweep(self._settings.run_tag, self.node, worker_id)
            return {}
        if worker is None:
            raise ProtocolError(f"{method}: node {self.node} has no worker {worker_id!r}; start it first")
        match method:
            case Method.OPEN_ADMISSION:
                return worker.open_admission()
            case Method.CLOSE_ADMISSION:
                return await worker.close_admission(float(args.get("drain_seconds", 0.0)))
            case Method.OFFLOAD:
                return await worker.offload(args)
            case Method.ONLOAD:
                return await worker.onload(args)
        raise ProtocolError(f"method {method!r} is not one of {', '.join(Method)}")

    async def _start(self, worker_id: str, args: dict[str, Any]) -> dict[str, Any]:
        before = self.workers.get(worker_id)
        if before is not None:
            await before.stop(drain_seconds=0.0)
        worker = self.workers[worker_id] = HostedWorker.from_args(args, self._settings, self.tell)
        return await worker.start()

    # --- self-fencing ---------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Hold admission when nothing is heard: a head node that is gone cannot take a lease back from us."""
        while True:
            quiet = time.monotonic() - self._last_heard
            if quiet > self._silence_seconds:
                for worker in self.workers.values():
                    worker.hold("the head node is silent")
                self._welcomed = False
            await asyncio.sleep(min(0.25, self._beat_seconds))


def _endpoint(run_dir: Path) -> dict[str, Any]:
    """The coordinator's addresses; the file is there before a sidecar is started, shared file systems may lag."""
    deadline = time.monotonic() + ENDPOINT_SECONDS
    while True:
        try:
            found: dict[str, Any] = json.loads((run_dir / "endpoint.json").read_text())
            return found
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise StartupFailed(f"cannot read {run_dir / 'endpoint.json'} on this node: {error}") from None
            time.sleep(0.1)


async def serve(run_dir: Path, virtual: VirtualNode | None) -> int:
    """The whole life of a sidecar; answers its exit code."""
    endpoint = _endpoint(run_dir)
    plan = from_json((run_dir / "plan.json").read_text())
    host, port = str(endpoint["control"]).removeprefix("tcp://").rsplit(":", 1)
    run_tag = os.environ.get("RELAX_RUN_TAG", str(run_dir))
    node = virtual.name if virtual is not None else os.environ.get("SLURMD_NODENAME", "")
    swept = await sweep(run_tag, node)
    if swept:
        log.warning("ended %d processes that an earlier sidecar of this node left: %s", len(swept), swept)
    os.environ[NODE_TAG] = node  # inherited by engines only: it does not show in our own /proc entry
    try:
        block = take_port_block(plan.ports, ephemeral=ephemeral_range())
        busy: Sequence[int] = ()
    except StartupFailed as error:
        # Reported, so that the binding can name the ports in its table.
        log.error("%s", error.message)
        block, busy = None, error.detail.get("busy", ())
    report = probe(os.environ, virtual=virtual, head=(host, int(port)), port_block=block, busy_ports=busy)
    settings = HostSettings(
        run_tag=run_tag,
        node=report.node,
        logs=run_dir / "logs",
        ledger=run_dir.parent / "ledger",
        guard_key=(run_dir / "keys" / "engine.token").read_text().strip(),
        upstream=Upstream(),
    )
    link = SidecarLink(endpoint["control"], credentials(run_dir / "keys", PeerKind.SIDECAR))
    attempt = int(run_dir.name.rpartition("_")[2])
    daemon = NodeDaemon(report.node, attempt, report.to_wire(), link, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.leaving.set)
    try:
        await daemon.run()
    finally:
        link.close()
        await settings.upstream.close()
        if block is not None:
            block.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of a node's step."""
    parser = argparse.ArgumentParser(prog="sidecars.node")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", default=None, help="name of a virtual node")
    parser.add_argument("--virtual", default=None, help="what the virtual node pretends to have, as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    virtual = None
    if arguments.virtual is not None:
        told = json.loads(arguments.virtual)
        virtual = VirtualNode(told["name"], tuple(told["gpus"]), told.get("mask"), told.get("simulated", True))
    try:
        return uvloop.run(serve(arguments.run_dir, virtual))
    except RelaxError as error:
        log.error("%s", error.message)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
