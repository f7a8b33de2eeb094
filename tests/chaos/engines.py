"""Cards, engine processes and the workers that a sidecar hosts: small models with the interfaces of the real ones.

An `Engine` is a process: what was asked of it goes on when its sidecar has died or given up. A `SimHosted` is what
`sidecars.hosted.HostedWorker` is to the node daemon. `Cards` is the truth that invariants are measured against.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.core.replica_events import ALL_TAGS
from relax_slurm.errors import RecoveryRequired, StartupFailed
from relax_slurm.wire.messages import WorkerState
from sidecars.hosted import EngineExited
from tests.chaos.story import Story
from tests.chaos.weather import CALM, Weather

Card = tuple[str, int]
"""Node and GPU."""


@dataclass(slots=True, eq=False)
class Engine:
    """One process and what it holds."""

    number: int
    worker_id: str
    role: str
    generation: int
    cards: tuple[Card, ...]
    tags: frozenset[str] = frozenset()
    weights_valid: bool = False
    alive: bool = True
    dying: bool = False
    """Its leader has ended and the rest has not, so that its memory is still taken."""
    hosted: SimHosted | None = None

    def __str__(self) -> str:
        return f"engine {self.number} ({self.worker_id} g{self.generation})"


class Cards:
    """All engines of all nodes and who has memory on which card."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.engines: list[Engine] = []
        self.training: str = ""
        """Who trains now; training uses every card."""
        self.changed: Callable[[str], None] = lambda role: None
        """Hears which role's memory has changed."""
        self._count = 0

    def start(self, worker_id: str, role: str, generation: int, cards: tuple[Card, ...]) -> Engine:
        """A new process, without memory yet."""
        self._count += 1
        engine = Engine(self._count, worker_id, role, generation, cards)
        self.engines.append(engine)
        self.story.tell("engine", "%s starts", engine)
        return engine

    def set_tags(self, engine: Engine, tags: frozenset[str], why: str) -> None:
        """Memory comes or goes, if the process is still there."""
        if not engine.alive or engine.tags == tags:
            return
        engine.tags = tags
        engine.weights_valid = engine.weights_valid and "weights" in tags
        self.story.tell("engine", "%s holds %s (%s)", engine, ", ".join(sorted(tags)) or "nothing", why)
        self.changed(engine.role)

    def end(self, engine: Engine, why: str) -> None:
        """The process and everything it had started is gone, and so is its memory."""
        if not engine.alive:
            return
        engine.alive, engine.tags = False, frozenset()
        self.engines.remove(engine)
        self.story.tell("engine", "%s has ended (%s)", engine, why)
        self.changed(engine.role)

    def train(self, who: str) -> None:
        """Training takes every card, or leaves them (an empty name)."""
        self.training = who
        self.story.tell("trainer", "has its memory on the cards" if who else "has left the cards")
        self.changed("training")

    def holding(self, role: str) -> list[str]:
        """What has memory on cards for this holder."""
        if role == "training":
            return [f"training of {self.training}"] if self.training else []
        return [str(engine) for engine in self.engines if engine.role == role and engine.tags]

    def overlap(self) -> str:
        """Two who are on one card; empty while there are none."""
        users: dict[Card, Engine] = {}
        for engine in self.engines:
            if not engine.tags:
                continue
            if self.training:
                return f"{engine} and training are on {engine.cards[0]}"
            for card in engine.cards:
                other = users.setdefault(card, engine)
                if other is not engine:
                    return f"{other} and {engine} are both on {card}"
        return ""


@dataclass(slots=True)
class Bench:
    """What all workers of one sidecar process share."""

    node: str
    cards: Cards
    rng: random.Random
    run_tag: str = "run"
    weather: Weather = field(default=CALM)
    dead: bool = False
    """The sidecar was killed: it does nothing more, and its engines stay."""


class SimHosted:
    """As `sidecars.hosted.HostedWorker`, on a model of an engine."""

    def __init__(
        self,
        worker_id: str,
        role: str,
        generation: int,
        cards: tuple[Card, ...],
        url: str | None,
        bench: Bench,
        tell: Any,
    ) -> None:
        self.worker_id, self.generation, self.state, self.detail = worker_id, generation, WorkerState.STARTING, ""
        self.admission_open = self.suspect = False
        self.engine: Engine | None = None
        self._role, self._cards, self._url, self._bench, self._tell = role, cards, url, bench, tell
        self._stopping = False
        self._started: asyncio.Event = asyncio.Event()
        self._starting = False

    @classmethod
    def from_args(cls, args: Mapping[str, Any], settings: Bench, tell: Any) -> SimHosted:
        """The worker of a start_worker command."""
        spec, guard = args["spec"], args["guard"]
        cards = tuple((settings.node, int(index)) for index in spec["gpu_indexes"])
        url = f"http://{guard['host']}:{guard['port']}" if spec["node_rank"] == 0 else None
        return cls(spec["worker_id"], spec["role"], int(guard["generation"]), cards, url, settings, tell)

    def status(self) -> dict[str, Any]:
        """As a beat carries it."""
        return {
            "worker_id": self.worker_id,
            "generation": self.generation,
            "state": str(self.state),
            "admission_open": self.admission_open,
            "in_flight": 0,
            "pid": None if self.engine is None else self.engine.number,
            "resident_tags": [] if self.engine is None else sorted(self.engine.tags),
            "memory_bytes": None,
            "suspect": self.suspect,
            "detail": self.detail,
        }

    async def look_at_memory(self) -> None:
        """Nothing to measure here."""

    async def start(self) -> dict[str, Any]:
        """Answers when the engine is up; ends everything when it does not come up."""
        self._starting = True
        try:
            await self._wait(0.0, 0.2)
            if self._stopping:
                raise await self._gone("it was told to stop while it started")
            engine = self.engine = self._bench.cards.start(self.worker_id, self._role, self.generation, self._cards)
            engine.hosted = self
            # The process loads by itself, whoever still waits for it.
            seconds = self._bench.rng.uniform(0.1, 1.0)
            asyncio.get_running_loop().call_later(seconds / 2, self._loaded, engine)
            await self._wait(seconds, seconds)
            if self._stopping or not engine.alive or self._luck(self._bench.weather.fails / 2):
                self._stopping = True
                await self._end_engine()
                raise await self._gone("it did not come up")
        finally:
            self._started.set()
        self.state = WorkerState.UP
        return {"base_url": self._url, "pid": engine.number}

    def _loaded(self, engine: Engine) -> None:
        if engine.alive:
            engine.weights_valid = True
            self._bench.cards.set_tags(engine, ALL_TAGS, "it has loaded")

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """End the engine for certain, or say that it is not certain."""
        if self._bench.dead:
            return
        self._stopping, self.admission_open = True, False
        await self._end_engine()
        if self._starting and not self._started.is_set():
            await self._started.wait()
            await self._end_engine()
        self.state, self.detail = WorkerState.EXITED, self.detail or "stopped"

    async def _end_engine(self) -> None:
        engine = self.engine
        if engine is None or not engine.alive:
            return
        await self._wait(0.05, 0.6)
        if self._luck(self._bench.weather.sticks):
            self.state, self.detail = WorkerState.UNCONFIRMED, "a process of it survives KILL"
            raise RecoveryRequired(f"{self.worker_id}: the end of {engine} is not confirmed")
        self._bench.cards.end(engine, "ended by its sidecar")

    async def _gone(self, why: str) -> EngineExited:
        self.state, self.detail = WorkerState.EXITED, why
        return EngineExited(f"{self.worker_id}: {why}")

    def open_admission(self) -> dict[str, Any]:
        """Let requests in."""
        if self.state is not WorkerState.UP:
            raise RecoveryRequired(f"{self.worker_id} is {self.state}, wanted up")
        self.admission_open = True
        return {"base_url": self._url}

    async def close_admission(self, drain_seconds: float) -> dict[str, Any]:
        """Let nobody in; what runs gets a moment."""
        self.admission_open = False
        await self._wait(0.0, drain_seconds)
        return {"drained": 0, "cancelled": 0}

    async def offload(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Release everything; answers once the card agrees."""
        engine = self._alive()
        self.admission_open = False
        await self._move(engine, frozenset(), float(args["deadline_seconds"]), "it releases")
        self.state = WorkerState.ASLEEP
        return {"result": "released"}

    async def onload(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Bring tags back."""
        engine = self._alive()
        tags = engine.tags | frozenset(args.get("tags") or ALL_TAGS)
        pending = self._luck(self._bench.weather.fails / 3) and args.get("weights") is not None
        await self._move(engine, tags, float(args["deadline_seconds"]), "it resumes")
        engine.weights_valid = not pending
        self.state = WorkerState.UP
        return {"result": "weights_pending" if pending else "ready"}

    def hold(self, reason: str) -> None:
        """Admit nothing new until asked again."""
        if self.admission_open:
            self._bench.cards.story.tell(self._bench.node, "closes %s by itself: %s", self.worker_id, reason)
            self.admission_open = False

    # --- what happens by itself -----------------------------------------------------------------------------

    def leader_ends(self) -> None:
        """The engine's first process ends; the rest of it takes a moment longer."""
        engine = self.engine
        if engine is None or not engine.alive or self._stopping or not self._started.is_set():
            return
        engine.dying, self._stopping = True, True
        self._bench.cards.story.tell("engine", "the leader of %s ends by itself", engine)
        self.state, self.detail, self.admission_open = WorkerState.FAILED, "the engine ended", False
        asyncio.get_running_loop().call_later(self._bench.rng.uniform(0.05, 1.5), self._confirmed, engine)

    def _confirmed(self, engine: Engine) -> None:
        self._bench.cards.end(engine, "the rest of it followed")
        if not self._bench.dead:
            self.state = WorkerState.EXITED
            self._tell(self, "exited", self.detail)

    def doubt(self, suspect: bool) -> None:
        """Its health is in doubt, or no longer."""
        if self.state is WorkerState.UP and not self._bench.dead:
            self.suspect, self.detail = suspect, "it does not move" if suspect else ""
            self._tell(self, "suspect" if suspect else "healthy", self.detail)

    # --- small things ---------------------------------------------------------------------------------------

    def _alive(self) -> Engine:
        engine = self.engine
        if engine is None or not engine.alive:
            raise EngineExited(f"{self.worker_id}: its engine has ended")
        if engine.dying or self._stopping:
            raise RecoveryRequired(f"{self.worker_id}: its engine is ending")
        return engine

    async def _move(self, engine: Engine, tags: frozenset[str], deadline_seconds: float, why: str) -> None:
        bench = self._bench
        if engine.tags == tags:
            return
        seconds = bench.rng.uniform(0.02, 1.0)
        if self._luck(bench.weather.slow):
            seconds = bench.rng.uniform(deadline_seconds * 0.5, deadline_seconds * 4)
        loop = asyncio.get_running_loop()
        if self._luck(bench.weather.fails):
            await self._wait(seconds / 2, seconds / 2)
            self.state, self.detail = WorkerState.FAILED, "the engine refused"
            raise RecoveryRequired(f"{self.worker_id}: the engine refused")
        # In two parts, and in the engine: it goes on when nobody waits any more.
        first = frozenset({"weights"}) if tags else engine.tags - {"kv_cache"}
        loop.call_later(seconds / 2, bench.cards.set_tags, engine, first, why)
        loop.call_later(seconds, bench.cards.set_tags, engine, tags, why)
        await self._wait(min(seconds, deadline_seconds), min(seconds, deadline_seconds))
        await asyncio.sleep(0.001)
        if not engine.alive:
            raise EngineExited(f"{self.worker_id}: its engine ended meanwhile")
        if engine.tags != tags or engine.dying:
            self.state, self.detail = WorkerState.FAILED, "not done at the deadline"
            raise RecoveryRequired(f"{self.worker_id}: not done at the deadline")

    def _luck(self, chance: float) -> bool:
        return chance > 0 and self._bench.rng.random() < chance

    async def _wait(self, low: float, high: float) -> None:
        await asyncio.sleep(self._bench.rng.uniform(low, high))
        if self._bench.dead:
            raise StartupFailed("the sidecar was killed")
