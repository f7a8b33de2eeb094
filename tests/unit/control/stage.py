"""What the tests of the control room share: small runs, and sidecars that do what a test tells them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_slurm.config.load import from_mapping
from relax_slurm.config.models import RunConfig
from relax_slurm.control.allocation import Allocation
from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.local_site import node_names
from relax_slurm.control.run_dir import RunDir
from relax_slurm.core.binding import Backend
from relax_slurm.core.evidence import Proctrack
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.core.report import NodeReport, PortBlockReport
from relax_slurm.wire.client import ControlClient, SidecarLink
from relax_slurm.wire.host import boot_id, interface_addresses, net_ns
from relax_slurm.wire.keys import allowed, credentials, read_pair, write_keys
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.server import ControlServer

EPOCH = "000001-abcdef"
FAST = {
    "beat_seconds": 0.1,
    "silence_seconds": 0.6,
    "operation_seconds": 3.0,
    "drain_seconds": 0.1,
    "bind_seconds": 3.0,
}


def run(scenario: Callable[[], Coroutine[Any, Any, None]], seconds: float = 30.0) -> None:
    """Run an async test to its end, within a bound."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await scenario()

    asyncio.run(bounded())


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    """Wait for a condition of the event loop's own world and answer its value."""
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


def config_of(**changes: Any) -> RunConfig:
    """Four one-GPU replicas of one rollout model on two nodes, unless changed."""
    base: dict[str, Any] = {
        "name": "r",
        "placement": "decoupled",
        "engine": {"program": "sim", "startup_seconds": 5.0, "max_restarts": 3},
        "pools": {"p": {"nodes": 2, "gpus_per_node": 2}},
        "roles": {"rollout": {"pool": "p", "models": {"m": {"model_path": "sim/m", "gpus": 4}}}},
        "control": dict(FAST),
    }
    return from_mapping(base | changes)


def defer_config() -> RunConfig:
    """Three roles that take turns on two GPUs."""
    model = {"model_path": "sim/m", "gpus": 2, "gpus_per_engine": 2}
    return config_of(
        placement="defer",
        pools={"a": {"nodes": 1, "gpus_per_node": 2}},
        training={"pool": "a", "gpus": 2},
        roles={
            "rollout": {"pool": "a", "models": {"policy": model}},
            "genrm": {"pool": "a", "models": {"judge": model}},
            "teacher": {"pool": "a", "models": {"teacher": model}},
        },
    )


def wide_config() -> RunConfig:
    """One replica over two nodes."""
    model = {"model_path": "sim/m", "gpus": 4, "gpus_per_engine": 4}
    return config_of(roles={"rollout": {"pool": "p", "models": {"m": model}}})


def plan_of(config: RunConfig) -> InferencePlacementPlan:
    """Its plan."""
    return make_plan(config, ephemeral=None)


def allocation_of(plan: InferencePlacementPlan) -> Allocation:
    """Virtual nodes, as the local backend names them."""
    return Allocation(
        backend=Backend.LOCAL,
        nodes=tuple(node_names(component) for component in plan.components),
        gpu_indexes={
            name: tuple(range(component.gpus_per_node))
            for component in plan.components
            for name in node_names(component)
        },
        proctrack=Proctrack.LOCAL,
        head_hostname="here",
        head_boot_id=boot_id(),
        head_net_ns=net_ns(),
        head_address="127.0.0.1",
        head_addresses=interface_addresses(),
        gpu_components=tuple(component.index for component in plan.components),
    )


def report_of(
    plan: InferencePlacementPlan, node: str, number: int = 0, gpus: Iterable[int] | None = None
) -> NodeReport:
    """What a virtual node reports; `number` keeps the port blocks apart."""
    component = next(entry for entry in plan.components if node in node_names(entry))
    return NodeReport(
        node=node,
        hostname="here",
        boot_id=boot_id(),
        net_ns=net_ns(),
        pid=1,
        addresses=interface_addresses(),
        virtual_gpus=tuple(range(component.gpus_per_node) if gpus is None else gpus),
        port_block=PortBlockReport(start=plan.ports.first + number * plan.ports.span, span=plan.ports.span),
        ephemeral_range=(60000, 60999),
    )


def run_dir_of(root: Path, run_name: str = "r") -> RunDir:
    """An attempt with keys."""
    run_dir = RunDir.create(root, run_name)
    write_keys(run_dir.keys)
    run_dir.make_latest()
    return run_dir


# --- a sidecar that a test directs --------------------------------------------------------------------------------

Answer = dict[str, Any] | None
"""The body of a result (`ok` and `value` or `error`), or None for no answer."""
Actor = Callable[[dict[str, Any]], Answer]


def good(**value: Any) -> Answer:
    """A result that went well."""
    return {"ok": True, "value": value}


def bad(code: str, message: str = "it did not work") -> Answer:
    """A refusal, or a failure."""
    return {"ok": False, "error": {"code": code, "message": message}}


@dataclass(slots=True)
class Actors:
    """What the fake sidecars of one test do with commands, and what they were asked."""

    by_method: dict[str, Actor] = field(default_factory=dict)
    seen: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Node, method and arguments of every command, repeated ones included."""
    admission: dict[str, bool] = field(default_factory=dict)
    states: dict[str, str] = field(default_factory=dict)
    generations: dict[str, int] = field(default_factory=dict)
    suspect: set[str] = field(default_factory=set)

    def methods(self, method: str) -> list[dict[str, Any]]:
        """Arguments of all commands of one kind."""
        return [args for _, name, args in self.seen if name == method]

    def answer(self, node: str, body: Mapping[str, Any]) -> Answer:
        """Play one command."""
        method, args = str(body["method"]), dict(body["args"])
        self.seen.append((node, method, args))
        actor = self.by_method.get(method)
        answer = actor(args) if actor is not None else self.by_default(node, method, args)
        if answer is not None and answer["ok"]:
            self._note(method, args)
        return answer

    def by_default(self, node: str, method: str, args: Mapping[str, Any]) -> Answer:
        """What a sidecar without trouble says."""
        if method == "start_worker":
            return good(base_url=f"http://127.0.0.1:{args['guard']['port']}", pid=1)
        return good(unconfirmed=[]) if method == "shutdown" else good()

    def _note(self, method: str, args: Mapping[str, Any]) -> None:
        worker = str(args.get("worker_id", ""))
        state = {"start_worker": "up", "stop_worker": "exited", "offload": "asleep", "onload": "up"}.get(method)
        if state is not None:
            self.states[worker] = state
            self.generations[worker] = int(args["generation"])
        if method in ("open_admission", "close_admission", "stop_worker"):
            self.admission[worker] = method == "open_admission"

    def statuses(self, workers: Iterable[str]) -> list[dict[str, Any]]:
        """What a beat says of workers that were ever started."""
        return [
            {
                "worker_id": worker,
                "state": self.states[worker],
                "generation": self.generations[worker],
                "admission_open": self.admission.get(worker, False),
                "suspect": worker in self.suspect,
                "detail": "it did not answer" if worker in self.suspect else "",
            }
            for worker in workers
            if worker in self.states
        ]


class FakeSidecar:
    """A sidecar over a real socket, without engines."""

    def __init__(
        self,
        address: str,
        keys: Path,
        node: str,
        report: NodeReport,
        actors: Actors,
        *,
        incarnation: str = "i1",
        attempt: int = 1,
        beat_seconds: float = 0.1,
    ) -> None:
        self.node, self.report, self.actors, self.incarnation = node, report, actors, incarnation
        self.epoch = ""
        self.attempt = attempt
        self.refused: list[dict[str, Any]] = []
        self.mute = False
        """Say nothing more, as a node that is cut off."""
        self.left = asyncio.Event()
        self._beat_seconds = beat_seconds
        self._address, self._keys = address, keys
        self.link = SidecarLink(address, credentials(keys, PeerKind.SIDECAR))
        self._tasks = [asyncio.create_task(work) for work in (self._receive(), self._beat())]

    async def close(self) -> None:
        """Vanish."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.link.close()

    def reconnect(self) -> None:
        """Lose the connection and make another one, as after a network fault: same process, new address."""
        self.link.close()
        self._tasks[0].cancel()
        self.link = SidecarLink(self._address, credentials(self._keys, PeerKind.SIDECAR))
        self._tasks[0] = asyncio.create_task(self._receive())

    @property
    def workers(self) -> list[str]:
        """Workers that this node was asked about."""
        return sorted({args["worker_id"] for node, _, args in self.actors.seen if node == self.node and args})

    async def say(self, kind: str, **fields: Any) -> bool:
        """Send one message in this sidecar's name."""
        head = {"kind": kind, "node": self.node, "incarnation": self.incarnation, "epoch": self.epoch}
        return await self.link.send(head | fields)

    async def hello(self, **changes: Any) -> bool:
        """Introduce itself."""
        workers = self.actors.statuses(self.workers)
        fields = {"attempt": self.attempt, "report": self.report.to_wire(), "workers": workers} | changes
        return await self.say("hello", **fields)

    async def _beat(self) -> None:
        sequence = 0
        while True:
            if not self.mute:
                if self.epoch:
                    sequence += 1
                    await self.say("beat", seq=sequence, workers=self.actors.statuses(self.workers))
                else:
                    await self.hello()
            await asyncio.sleep(self._beat_seconds if self.epoch else 0.02)

    async def _receive(self) -> None:
        while True:
            body = await self.link.receive()
            if self.mute:
                continue
            if body["kind"] == "welcome":
                self.epoch = body["epoch"]
            elif body["kind"] == "refused":
                self.refused.append(body)
            elif body["kind"] == "command":
                answer = self.actors.answer(self.node, body)
                if answer is not None:
                    await self.say("result", id=body["id"], **answer)
                if body["method"] == "shutdown":
                    self.left.set()


@dataclass(slots=True)
class Stage:
    """A coordinator with real sockets and its fake sidecars."""

    coordinator: Coordinator
    address: str
    discovery: str
    client: ControlClient
    run_dir: RunDir
    plan: InferencePlacementPlan
    actors: Actors = field(default_factory=Actors)
    sidecars: dict[str, FakeSidecar] = field(default_factory=dict)

    def enter(self, node: str, incarnation: str = "i1", number: int | None = None, **options: Any) -> FakeSidecar:
        """Let a sidecar come; it says hello by itself."""
        names = list(self.coordinator.links.nodes)
        place = names.index(node) if number is None else number
        gpus = options.pop("gpus", None)
        report = options.pop("report", None) or report_of(self.plan, node, place, gpus)
        sidecar = FakeSidecar(
            self.address, self.run_dir.keys, node, report, self.actors, incarnation=incarnation, **options
        )
        self.sidecars[node] = sidecar
        return sidecar

    def enter_all(self) -> None:
        """One sidecar per node."""
        for node in self.coordinator.links.nodes:
            self.enter(node)

    async def events(self, kind: str) -> list[dict[str, Any]]:
        """Recorded events of one kind."""
        await self.coordinator.events.flush()
        path = self.run_dir.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@asynccontextmanager
async def on_stage(root: Path, config: RunConfig | None = None) -> AsyncIterator[Stage]:
    """A coordinator that listens; the run is not walked."""
    config = config or config_of()
    plan = plan_of(config)
    run_dir = run_dir_of(root)
    server = ControlServer(read_pair(run_dir.keys, PeerKind.COORDINATOR), allowed(run_dir.keys))
    control, discovery = server.bind("127.0.0.1", [0, 0])
    address, published = f"tcp://127.0.0.1:{control}", f"tcp://127.0.0.1:{discovery}"
    endpoint = {"epoch": EPOCH, "control": address, "discovery": published}
    coordinator = Coordinator(run_dir, config, plan, allocation_of(plan), server, endpoint)
    coordinator.start()
    client = ControlClient(address, credentials(run_dir.keys, PeerKind.CLIENT))
    stage = Stage(coordinator, address, published, client, run_dir, plan)
    try:
        yield stage
    finally:
        for sidecar in stage.sidecars.values():
            await sidecar.close()
        client.close()
        await coordinator.close()
