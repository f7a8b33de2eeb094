"""One schedule: the real coordinator, sidecar daemons and clients on simulated wire, engines and time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import relax_slurm.client.lifecycle
import relax_slurm.wire.client
import sidecars.daemon
from relax_slurm.config.models import RunConfig
from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.lifecycle import walk
from relax_slurm.control.manager import InferenceManager
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.core.replica import Replica
from relax_slurm.core.run import RunState
from sidecars.daemon import NodeDaemon
from tests.chaos.engines import Bench, Cards, SimHosted
from tests.chaos.loop import VirtualLoop
from tests.chaos.network import Network, SimClient, SimLink
from tests.chaos.rules import Rules
from tests.chaos.story import Story
from tests.chaos.weather import CALM
from tests.unit.control.stage import EPOCH, allocation_of, config_of, plan_of, report_of

CONTROL = {
    "beat_seconds": 1.0,
    "silence_seconds": 4.0,
    "lost_seconds": 9.0,
    "operation_seconds": 10.0,
    "drain_seconds": 0.3,
    "bind_seconds": 10.0,
}
SHAPES = {"one node": (1, 1), "a pair": (1, 2), "two nodes": (2, 1), "across nodes": (2, 2)}
"""Nodes, and GPUs per engine; every role uses every card."""


@cache
def scene(shape: str) -> tuple[RunConfig, InferencePlacementPlan]:
    """Config and plan of a shape: three roles and training that take turns on all cards."""
    nodes, per_engine = SHAPES[shape]
    per_node = 2 if per_engine > 1 and nodes == 1 else 1
    gpus = nodes * per_node
    model = {"model_path": "sim/m", "gpus": gpus, "gpus_per_engine": per_engine}
    names = {"rollout": "policy", "genrm": "judge", "teacher": "teacher"}
    config = config_of(
        placement="defer",
        pools={"a": {"nodes": nodes, "gpus_per_node": per_node}},
        training={"pool": "a", "gpus": gpus},
        roles={role: {"pool": "a", "models": {name: model}} for role, name in names.items()},
        control=dict(CONTROL),
    )
    return config, plan_of(config)


@cache
def _report(shape: str, node: str, number: int) -> dict[str, Any]:
    return report_of(scene(shape)[1], node, number).to_wire()


@dataclass(frozen=True, slots=True)
class SimRunDir:
    """A run directory that nothing is written to."""

    path: Path = Path("/simulated")
    run: str = "r"
    attempt: int = 1
    tag: str = "run"

    @property
    def token_file(self) -> Path:
        """Nobody asks for it here."""
        return self.path / "token"

    logs = engine_key_file = token_file

    def write_json(self, name: str, value: Any) -> None:
        """Not here."""


class SimCoordinator(Coordinator):
    """The coordinator, whose records and published engines are looked at."""

    def __init__(self, rules: Rules, *args: Any, **options: Any) -> None:
        self._rules = rules
        super().__init__(*args, **options)

    def record(self, event: str, /, **fields: Any) -> None:
        """See Coordinator."""
        self._rules.recorded(event, fields)

    def _publish_replica(self, manager: InferenceManager, replica: Replica) -> None:
        super()._publish_replica(manager, replica)
        self._rules.publishes(replica.published())


class Node:
    """A node with its sidecar, which may be killed and started again, and what the supervisor says about it."""

    def __init__(self, world: World, name: str, number: int) -> None:
        self.world, self.name, self.number = world, name, number
        self.rng = random.Random(f"{world.seed}/{name}")
        self.lives = 0
        self.up = False
        self.start()

    def start(self) -> None:
        """A new sidecar process."""
        world = self.world
        self.lives += 1
        self.bench = Bench(self.name, world.cards, random.Random(f"{world.seed}/{self.name}/{self.lives}"))
        self.bench.weather = world.network.weather
        self.link = SimLink(world.network, f"{self.name}.{self.lives}")
        report = _report(world.shape, self.name, self.number)
        self.daemon = NodeDaemon(self.name, 1, report, self.link, self.bench)  # type: ignore[arg-type]
        self.daemon.incarnation = f"{self.name}-{self.lives}"
        self.up = True
        world.story.tell(self.name, "its sidecar %d starts", self.lives)
        self._running = asyncio.get_running_loop().create_task(self._run(self.daemon))

    async def _run(self, daemon: NodeDaemon) -> None:
        await daemon.run()
        self.link.close()
        self.up = False
        self.world.story.tell(self.name, "its sidecar has left")

    def kill(self) -> None:
        """SIGKILL to the sidecar: its engines stay, and nobody looks after them."""
        if not self.up:
            return
        self.world.story.tell(self.name, "its sidecar is killed")
        self.bench.dead, self.up = True, False
        self.link.close()
        self._running.cancel()
        self.world.spawn(self._again())

    async def _again(self) -> None:
        """The supervisor sees the end of the step, tells the coordinator, and starts another sidecar."""
        rng, world = self.rng, self.world
        await asyncio.sleep(rng.uniform(0.05, 3.0))
        proof = rng.choice(("none", "swept", "cgroup", ""))
        if proof in ("swept", "cgroup"):
            await self.sweep()
        if proof:
            await world.supervisor.request(
                "step_ended", timeout_seconds=600.0, node=self.name, returncode=-9, proof=proof
            )
        await asyncio.sleep(rng.uniform(0.05, 2.0))
        await self.sweep()
        self.start()

    async def sweep(self, worker_id: str | None = None) -> None:
        """End what an earlier sidecar left, and wait until it is gone."""
        await asyncio.sleep(self.rng.uniform(0.02, 0.5))
        for engine in [each for each in self.world.cards.engines if each.cards[0][0] == self.name]:
            if worker_id in (None, engine.worker_id):
                self.world.cards.end(engine, "swept")


class World:
    """Everything of one schedule."""

    def __init__(self, seed: int) -> None:
        self.seed = str(seed)
        self.rng = random.Random(f"{seed}/world")
        self.loop = asyncio.get_running_loop()
        assert isinstance(self.loop, VirtualLoop)
        self.story = Story(self.loop.time)
        self.cards = Cards(self.story)
        self.rules = Rules(self.story, self.cards)
        self.shape = self.rng.choice(tuple(SHAPES))
        self.network = Network(self.seed, self.story)
        self._tasks: set[asyncio.Task[None]] = set()
        config, plan = scene(self.shape)
        endpoint = {"epoch": EPOCH}
        ids = iter(range(10**9))
        self.coordinator = SimCoordinator(
            self.rules,
            SimRunDir(),
            config,
            plan,
            allocation_of(plan),
            self.network,
            endpoint,
            clock=self.loop.time,
            new_id=lambda: f"c{next(ids)}",
        )
        book = self.coordinator.leases.book
        self.rules.sharing = book.sharing
        self.rules.leases = {name: str(lease.state) for name, lease in book.leases.items()}
        self.supervisor = self.client("supervisor", attempt_seconds=2.0)
        self.nodes: dict[str, Node] = {}
        self.walking: asyncio.Task[dict[str, Any]] | None = None

    def client(self, name: str, *, attempt_seconds: float) -> SimClient:
        """A client of the coordinator."""
        return SimClient(self.network, name, attempt_seconds=attempt_seconds)

    def spawn(self, work: Any) -> asyncio.Task[None]:
        """Run beside everything; what goes wrong in it is a broken promise of the simulation itself."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self.rules.breach("a task of the simulation failed: %r", fault)

    async def up(self) -> None:
        """Start everything in calm weather, until the run is READY."""
        coordinator = self.coordinator
        for work in (coordinator._inbox.run(), coordinator._watch(), coordinator.leases.watch()):
            coordinator.spawn(work)
        self.nodes = {name: Node(self, name, number) for number, name in enumerate(coordinator.links.nodes)}
        self.walking = self.loop.create_task(walk(coordinator))
        while coordinator.run.state is not RunState.READY:
            await asyncio.sleep(0.1)
            assert not self.walking.done(), self.walking.result()

    def storm(self, weather: Any) -> None:
        """From now on the weather is this."""
        self.network.weather = weather
        for node in self.nodes.values():
            node.bench.weather = weather

    def calm(self) -> None:
        """The weather clears up."""
        self.storm(CALM)


class _Clock:
    """`time` as modules see it that ask the clock themselves."""

    @staticmethod
    def monotonic() -> float:
        """Seconds of the running loop."""
        return asyncio.get_running_loop().time()


@contextmanager
def simulated() -> Iterator[None]:
    """Real modules on simulated time and engines, without their logs."""

    async def swept(run_tag: str, node: str, worker_id: str | None = None) -> list[int]:
        await _worlds[asyncio.get_running_loop()].nodes[node].sweep(worker_id)
        return []

    modules = (relax_slurm.client.lifecycle, relax_slurm.wire.client, sidecars.daemon)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    patches = [patch.object(module, "time", _Clock) for module in modules]
    patches += [patch.object(sidecars.daemon, "HostedWorker", SimHosted), patch.object(sidecars.daemon, "sweep", swept)]
    try:
        for each in patches:
            each.start()
        yield
    finally:
        for each in patches:
            each.stop()
        logging.disable(before)


_worlds: dict[asyncio.AbstractEventLoop, World] = {}
