"""What the control plane costs: memory, the share of a core that a thousand sidecars take, how long a question takes.

    python tests/bench/control_bench.py [--nodes 1024] [--workers 1] [--seconds 4]

A coordinator process with real CURVE sockets, bound to a plan of `nodes` x `workers` one-GPU replicas that are all
READY; one load process that plays all sidecars at one beat a second each and then asks questions as well, like a
command line. Prints one JSON document. `core_share` is CPU time of the coordinator's process over wall time while
nothing but beats arrive; `ready_burst` is the start of all replicas at once, both processes on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
import zmq
import zmq.asyncio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from relax_slurm.config.load import from_mapping
from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.manager import InferenceManager
from relax_slurm.core.binding import bind
from relax_slurm.core.run import RunEvent
from relax_slurm.wire.client import ControlClient, curve_client
from relax_slurm.wire.codec import from_frames, to_frames
from relax_slurm.wire.host import allow_many_files
from relax_slurm.wire.keys import Credentials, allowed, credentials, read_pair
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.server import ControlServer
from tests.unit.control.stage import EPOCH, allocation_of, plan_of, report_of, run_dir_of


def _config(nodes: int, workers: int) -> Any:
    return from_mapping(
        {
            "name": "bench",
            "placement": "decoupled",
            "engine": {"program": "sim"},
            "pools": {"p": {"nodes": nodes, "gpus_per_node": workers}},
            "roles": {"rollout": {"pool": "p", "models": {"m": {"model_path": "x", "gpus": nodes * workers}}}},
        }
    )


def _memory(field: str = "VmRSS") -> float:
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith(field)).split()[1]) / 1024


async def _serve(root: Path, nodes: int, workers: int, seconds: float, ready: Any, done: Any, out: Any) -> None:
    imported = _memory()
    config = _config(nodes, workers)
    began = time.perf_counter()
    plan = plan_of(config)
    planned = time.perf_counter() - began
    run_dir = run_dir_of(root, "bench")
    server = ControlServer(read_pair(run_dir.keys, PeerKind.COORDINATOR), allowed(run_dir.keys))
    control, discovery = server.bind("127.0.0.1", [0, 0])
    allocation = allocation_of(plan)
    endpoint = {"epoch": EPOCH, "control": f"tcp://127.0.0.1:{control}", "discovery": f"tcp://127.0.0.1:{discovery}"}
    coordinator = Coordinator(run_dir, config, plan, allocation, server, endpoint)
    # Every virtual node is this machine, where 1,024 port blocks do not fit; ports are not what is measured.
    reports = {name: report_of(plan, name) for name in allocation.node_names}
    hosts = {name: report.model_copy(update={"hostname": name}) for name, report in reports.items()}
    began = time.perf_counter()
    bound = bind(plan, allocation.facts(), hosts)
    binding = time.perf_counter() - began
    model = plan.roles[0].models[0]
    manager = InferenceManager(
        model, bound, config, coordinator.links, coordinator.hooks, run_tag="bench", memory_saver=False
    )
    coordinator.managers.add(manager)
    coordinator.publish_all()
    for event in (RunEvent.ALL_REPORTED, RunEvent.BOUND, RunEvent.ALL_READY):
        coordinator.advance(event)
    coordinator.start()
    ready.put((str(run_dir.path), endpoint))
    links = coordinator.links.nodes.values()
    while not all(link.incarnation for link in links):
        await asyncio.sleep(0.05)
    # All replicas become READY at once: the burst of a start, with its events, updates and commands.
    before, cpu = time.perf_counter(), time.process_time()
    starting = asyncio.create_task(manager.start())
    await starting
    burst = {"seconds": time.perf_counter() - before, "cpu_seconds": time.process_time() - cpu}
    manager.serve(rebuild=True)
    await asyncio.sleep(1.5)
    before, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - before < seconds:  # nothing but beats
        await asyncio.sleep(1.0)
        coordinator.follow_replicas()
    share = (time.process_time() - cpu) / (time.perf_counter() - before)
    ready.put("ask")
    worst = 0.0
    while done.empty():
        tick = time.perf_counter()
        await asyncio.sleep(0.005)
        worst = max(worst, time.perf_counter() - tick - 0.005)
    out.put(
        {
            "rss_after_imports_mib": round(imported, 1),
            "rss_mib": round(_memory(), 1),
            "peak_rss_mib": round(_memory("VmHWM"), 1),
            "core_share": round(share, 3),
            "worst_loop_delay_ms": round(worst * 1000, 1),
            "ready_burst": {name: round(value, 2) for name, value in burst.items()},
            "plan_seconds": round(planned, 2),
            "bind_seconds": round(binding, 2),
            "undeliverable": server.counters.undeliverable,
            "garbage": server.counters.garbage,
            "silent": sum(link.silent for link in links),
        }
    )
    await coordinator.close()


class _Link:
    """A sidecar's DEALER in a context that all of them share: a thousand contexts are two thousand threads."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: Credentials) -> None:
        self._socket = context.socket(zmq.DEALER)
        curve_client(self._socket, keys)
        self._socket.immediate = True
        self._socket.connect(address)

    async def send(self, body: dict[str, Any]) -> bool:
        try:
            await self._socket.send_multipart(to_frames(body), flags=zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        return True

    async def receive(self) -> dict[str, Any]:
        return from_frames(await self._socket.recv_multipart())


class _Node:
    """A sidecar without engines."""

    def __init__(self, link: _Link, name: str, report: dict[str, Any]) -> None:
        self.link = link
        self.head = {"node": name, "incarnation": "i", "epoch": ""}
        self.report = report
        self.workers: dict[str, dict[str, Any]] = {}
        self.acks = 0
        self.sequence = 0

    async def beat(self, phase: float) -> None:
        await asyncio.sleep(phase)
        while True:
            if self.head["epoch"]:
                self.sequence += 1
                workers = list(self.workers.values())
                await self.link.send({"kind": "beat", **self.head, "seq": self.sequence, "workers": workers})
                await asyncio.sleep(1.0)
            else:
                said = await self.link.send(
                    {"kind": "hello", **self.head, "attempt": 1, "report": self.report, "workers": []}
                )
                await asyncio.sleep(2.0 if said else 0.1)

    async def listen(self) -> None:
        while True:
            body = await self.link.receive()
            if body["kind"] == "welcome":
                self.head["epoch"] = body["epoch"]
            elif body["kind"] == "beat_ack":
                self.acks += 1
            elif body["kind"] == "command":
                await self.carry_out(body)

    async def carry_out(self, body: dict[str, Any]) -> None:
        args, value = body["args"], {}
        worker = args["worker_id"]
        if body["method"] == "start_worker":
            value = {"base_url": f"http://127.0.0.1:{args['guard']['port']}"}
            self.workers[worker] = {
                "worker_id": worker, "state": "up", "generation": args["generation"], "admission_open": False,
                "in_flight": 3, "pid": 1234, "resident_tags": ["cuda_graph", "kv_cache", "weights"],
                "memory_bytes": 70 << 30, "detail": "",
            }  # fmt: skip
        elif body["method"] == "open_admission":
            self.workers[worker]["admission_open"] = True
        await self.link.send({"kind": "result", **self.head, "id": body["id"], "ok": True, "value": value})


async def _load(run_dir: Path, endpoint: dict[str, Any], nodes: int, workers: int, seconds: float, ready: Any) -> Any:
    plan = plan_of(_config(nodes, workers))
    names = allocation_of(plan).node_names
    report = report_of(plan, names[0])
    address = endpoint["control"]
    keys = credentials(run_dir / "keys", PeerKind.SIDECAR)
    context = zmq.asyncio.Context()
    context.set(zmq.MAX_SOCKETS, 2 * nodes + 64)
    fleet = [
        _Node(
            _Link(context, address, keys),
            name,
            report.model_copy(update={"node": name, "hostname": name}).to_wire(),
        )
        for name in names
    ]
    tasks = [asyncio.create_task(node.listen()) for node in fleet]
    tasks += [asyncio.create_task(node.beat(number / nodes)) for number, node in enumerate(fleet)]
    acks = 0
    while ready.empty():
        acks, before = sum(node.acks for node in fleet), time.perf_counter()
        await asyncio.sleep(0.5)
    heard = sum(node.acks for node in fleet) - acks
    rate = heard / (time.perf_counter() - before)
    ready.get()
    answers: dict[str, list[float]] = {"ping": [], "get_state": []}
    start = time.perf_counter()
    size = 0
    async with ControlClient(address, credentials(run_dir / "keys", PeerKind.CLIENT)) as client:
        while time.perf_counter() - start < seconds:
            for kind, every in (("ping", 1), ("get_state", 100)):
                if len(answers["ping"]) % every == 0:
                    began = time.perf_counter()
                    answer = await client.request(kind)
                    answers[kind].append((time.perf_counter() - began) * 1000)
                    size = max(size, len(json.dumps(answer)) if kind == "get_state" and not size else 0)
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    context.destroy(linger=0)
    return {
        "beats_per_second": round(rate),
        "ping_ms": _percentiles(answers["ping"]),
        "get_state_ms": _percentiles(answers["get_state"]),
        "state_document_bytes": size,
    }


def _percentiles(values: list[float]) -> dict[str, Any]:
    values = sorted(values)
    return {
        "n": len(values),
        "p50": round(statistics.median(values), 2),
        "p99": round(values[int(len(values) * 0.99)], 2),
    }


async def _quiet(root: Path, seconds: float) -> dict[str, Any]:
    """One question at a time to a coordinator that has nothing else to do, in one process."""
    plan = plan_of(_config(1, 1))
    run_dir = run_dir_of(root, "quiet")
    server = ControlServer(read_pair(run_dir.keys, PeerKind.COORDINATOR), allowed(run_dir.keys))
    control, _ = server.bind("127.0.0.1", [0, 0])
    address = f"tcp://127.0.0.1:{control}"
    coordinator = Coordinator(
        run_dir, _config(1, 1), plan, allocation_of(plan), server, {"epoch": EPOCH, "control": address}
    )
    coordinator.start()
    times = []
    async with ControlClient(address, credentials(run_dir.keys, PeerKind.CLIENT)) as client:
        await client.request("ping")
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            began = time.perf_counter()
            await client.request("ping")
            times.append((time.perf_counter() - began) * 1000)
    began = time.perf_counter()
    async with ControlClient(address, credentials(run_dir.keys, PeerKind.CLIENT)) as client:
        await client.request("ping")
    first = (time.perf_counter() - began) * 1000
    await coordinator.close()
    return {**_percentiles(times), "with_new_connection": round(first, 2)}


def _coordinator(root: str, nodes: int, workers: int, seconds: float, ready: Any, done: Any, out: Any) -> None:
    uvloop.run(_serve(Path(root), nodes, workers, seconds, ready, done, out))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    arguments = parser.parse_args()
    allow_many_files()
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as root:
        result: dict[str, Any] = {
            "nodes": arguments.nodes,
            "workers_per_node": arguments.workers,
            "cores": os.cpu_count(),
            "ping_alone_ms": uvloop.run(_quiet(Path(root), 1.0)),
        }
        ready, done, out = spawn.Queue(), spawn.Queue(), spawn.Queue()
        process = spawn.Process(
            target=_coordinator,
            args=(root, arguments.nodes, arguments.workers, arguments.seconds, ready, done, out),
            daemon=True,
        )
        process.start()
        try:
            run_dir, endpoint = ready.get(timeout=60)
            load = _load(Path(run_dir), endpoint, arguments.nodes, arguments.workers, 2.5, ready)
            result |= uvloop.run(load)
            done.put(True)
            result |= out.get(timeout=30)
        finally:
            process.join(5)
            if process.is_alive():
                process.kill()
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
