"""Figure F8: what a lease handover costs beyond what the engines take.

    python tests/bench/handover_bench.py [--nodes 8] [--gpus 8] [--rounds 40] [--engine-ms 0]

A run whose judge and teacher take turns on `nodes` x `gpus` one-GPU replicas. Three processes with CURVE between them:
the coordinator, one that plays all sidecars, and the client, which asks deactivate(genrm), activate(teacher) and the
way back. Every engine takes `engine-ms` for each release and each resume, all at the same time. `handover_ms` is from
the question to leave until the other role serves, less what the engines took. The players of the sidecars, which in a
real run are on nodes of their own, share this machine's cores: `cpu_ms` says whose time it was, `_loop` without
ZeroMQ's own threads. Prints one JSON document.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from relax_slurm.client.lifecycle import LifecycleClient
from relax_slurm.config.load import from_mapping
from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.lifecycle import walk
from relax_slurm.core.run import RunState
from relax_slurm.wire.client import ControlClient, SidecarLink
from relax_slurm.wire.keys import allowed, credentials, read_pair
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.server import ControlServer
from tests.unit.control.stage import EPOCH, allocation_of, plan_of, report_of, run_dir_of

SLOW = ("offload", "onload")
"""Commands that an engine takes time for."""


def _config(nodes: int, gpus: int) -> Any:
    role = {"pool": "p", "models": {}}
    model = {"model_path": "sim/m", "gpus": nodes * gpus}
    return from_mapping(
        {
            "name": "bench",
            "placement": "defer",
            "engine": {"program": "sim"},
            "pools": {"p": {"nodes": nodes, "gpus_per_node": gpus}},
            "training": {"pool": "p", "gpus": nodes * gpus},
            "roles": {
                "rollout": role | {"models": {"policy": model}},
                "genrm": role | {"models": {"judge": model}},
                "teacher": role | {"models": {"teacher": model}},
            },
        }
    )


async def _serve(root: Path, nodes: int, gpus: int, ready: Any, questions: Any, answers: Any) -> None:
    config = _config(nodes, gpus)
    plan = plan_of(config)
    run_dir = run_dir_of(root, "bench")
    server = ControlServer(read_pair(run_dir.keys, PeerKind.COORDINATOR), allowed(run_dir.keys))
    control, discovery = server.bind("127.0.0.1", [0, 0])
    endpoint = {"epoch": EPOCH, "control": f"tcp://127.0.0.1:{control}", "discovery": f"tcp://127.0.0.1:{discovery}"}
    coordinator = Coordinator(run_dir, config, plan, allocation_of(plan), server, endpoint)
    coordinator.start()
    ready.put((str(run_dir.path), endpoint["control"]))
    walking = asyncio.create_task(walk(coordinator))
    while coordinator.run.state is not RunState.READY and not walking.done():
        await asyncio.sleep(0.02)
    ready.put("ready" if not walking.done() else str(walking.result()))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, questions.get) != "end":
        answers.put((time.process_time(), time.thread_time()))
    walking.cancel()
    await asyncio.gather(walking, return_exceptions=True)
    await coordinator.close()


class _Node:
    """A sidecar whose engines take `seconds` for every release and resume."""

    def __init__(self, link: SidecarLink, name: str, report: dict[str, Any], seconds: float) -> None:
        self.link, self.report, self.seconds = link, report, seconds
        self.head = {"node": name, "incarnation": "i", "epoch": ""}
        self.workers: dict[str, dict[str, Any]] = {}

    async def beat(self) -> None:
        number = 0
        while True:
            if self.head["epoch"]:
                number += 1
                await self.link.send(
                    {"kind": "beat", **self.head, "seq": number, "workers": list(self.workers.values())}
                )
                await asyncio.sleep(1.0)
            else:
                await self.link.send({"kind": "hello", **self.head, "attempt": 1, "report": self.report, "workers": []})
                await asyncio.sleep(0.1)

    async def listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            body = await self.link.receive()
            if body["kind"] == "welcome":
                self.head["epoch"] = body["epoch"]
            elif body["kind"] == "command":
                if self.seconds and body["method"] in SLOW:
                    loop.call_later(self.seconds, lambda body=body: loop.create_task(self.carry_out(body)))
                else:
                    await self.carry_out(body)

    async def carry_out(self, body: dict[str, Any]) -> None:
        args, method, value = body["args"], body["method"], {}
        worker = args["worker_id"]
        if method == "start_worker":
            value = {"base_url": f"http://127.0.0.1:{args['guard']['port']}"}
            self.workers[worker] = {
                "worker_id": worker, "state": "up", "generation": args["generation"], "admission_open": False,
                "in_flight": 0, "pid": 1234, "resident_tags": ["cuda_graph", "kv_cache", "weights"],
                "memory_bytes": 70 << 30, "detail": "",
            }  # fmt: skip
        elif method in ("open_admission", "close_admission"):
            self.workers[worker]["admission_open"] = method == "open_admission"
        elif method in SLOW:
            self.workers[worker]["state"] = "asleep" if method == "offload" else "up"
        await self.link.send({"kind": "result", **self.head, "id": body["id"], "ok": True, "value": value})


async def _play(
    run_dir: Path, address: str, nodes: int, gpus: int, seconds: float, questions: Any, answers: Any
) -> None:
    plan = plan_of(_config(nodes, gpus))
    keys = credentials(run_dir / "keys", PeerKind.SIDECAR)
    fleet = [
        _Node(SidecarLink(address, keys), name, report_of(plan, name, number).to_wire(), seconds)
        for number, name in enumerate(allocation_of(plan).node_names)
    ]
    tasks = [asyncio.create_task(work) for node in fleet for work in (node.listen(), node.beat())]
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, questions.get) != "end":
        answers.put((time.process_time(), time.thread_time()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _ask(run_dir: Path, address: str, rounds: int, used: Any) -> dict[str, Any]:
    """The handovers; CPU of the others before and after."""
    walls, leaves, comes = [], [], []
    async with ControlClient(address, credentials(run_dir / "keys", PeerKind.CLIENT)) as control:
        lifecycle = LifecycleClient(control)
        await lifecycle.begin_batch(0)
        await lifecycle.offload_rollout(0)
        await lifecycle.acknowledge_rollout_offloaded(0)
        old, new = "genrm", "teacher"
        await lifecycle.activate(old, 0)
        for turn in range(rounds + 4):
            if turn == 4:  # the first ones warm up
                before, own = used(), time.process_time()
            began = time.perf_counter()
            await lifecycle.deactivate(old, 0)
            left = time.perf_counter()
            await lifecycle.activate(new, 0)
            there = time.perf_counter()
            if turn >= 4:
                walls.append((there - began) * 1000)
                leaves.append((left - began) * 1000)
                comes.append((there - left) * 1000)
            old, new = new, old
        after = used()
        cpu = {name: round((after[name] - before[name]) * 1000 / rounds, 2) for name in before}
        cpu["client"] = round((time.process_time() - own) * 1000 / rounds, 2)
    return {"wall": walls, "leave": leaves, "come": comes, "cpu_ms": cpu}


def _percentiles(values: list[float], less: float = 0.0) -> dict[str, Any]:
    values = sorted(value - less for value in values)
    return {
        "n": len(values),
        "p50": round(statistics.median(values), 2),
        "p99": round(values[int(len(values) * 0.99)], 2),
        "least": round(values[0], 2),
    }


def _coordinator(*words: Any) -> None:
    uvloop.run(_serve(*words))


def _sidecars(*words: Any) -> None:
    uvloop.run(_play(*words))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus", type=int, default=8, help="per node")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--engine-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    shape = (arguments.nodes, arguments.gpus)
    with tempfile.TemporaryDirectory() as root:
        ready, asked, told = spawn.Queue(), (spawn.Queue(), spawn.Queue()), (spawn.Queue(), spawn.Queue())
        first = spawn.Process(target=_coordinator, args=(Path(root), *shape, ready, asked[0], told[0]), daemon=True)
        first.start()
        run_dir, address = ready.get(timeout=60)
        seconds = arguments.engine_ms / 1000
        second = spawn.Process(
            target=_sidecars, args=(Path(run_dir), address, *shape, seconds, asked[1], told[1]), daemon=True
        )
        second.start()

        def used() -> dict[str, float]:
            for queue in asked:
                queue.put("cpu")
            found = {}
            for place, name in enumerate(("coordinator", "sidecars")):
                found[name], found[f"{name}_loop"] = told[place].get(timeout=30)
            return found

        try:
            state = ready.get(timeout=120)
            if state != "ready":
                print(f"error: the run did not come up: {state}", file=sys.stderr)
                return 1
            found = uvloop.run(_ask(Path(run_dir), address, arguments.rounds, used))
        finally:
            for queue in asked:
                queue.put("end")
            for process in (first, second):
                process.join(10)
                if process.is_alive():
                    process.kill()
    engines = 2 * arguments.engine_ms
    document = {
        "nodes": arguments.nodes,
        "replicas_per_role": arguments.nodes * arguments.gpus,
        "cores": os.cpu_count(),
        "engine_ms": engines,
        "handover_ms": _percentiles(found["wall"], engines),
        "leave_ms": _percentiles(found["leave"], engines / 2),
        "come_ms": _percentiles(found["come"], engines / 2),
        "cpu_ms": found["cpu_ms"],
    }
    print(json.dumps(document, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
