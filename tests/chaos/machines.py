"""The pure machines alone, ten times as many schedules in the same time: `core.lifecycle` and `core.replica` with a
manager, sidecars and a workload that are a page each. What these get wrong is their own; what the machines allow is
looked at by the same rules as the whole (`tests.chaos.rules`).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from relax_slurm.control.links import CommandFailed
from relax_slurm.control.replica_commands import failure, success
from relax_slurm.core.lifecycle import Lifecycle, Move, Work
from relax_slurm.core.operations import Ask, Method, Operation, Progress
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import (
    ALL_TAGS,
    Command,
    CommandKind,
    Event,
    EventKind,
    Evidence,
    IllegalEvent,
    State,
)
from relax_slurm.errors import RelaxError
from tests.chaos.engines import Cards, Engine
from tests.chaos.rules import ROLES, Rules
from tests.chaos.story import Story
from tests.chaos.weather import Weather

AGAIN_SECONDS = 2.0
OPERATION_SECONDS = 10.0
_LOST = (State.FAILED, State.STOPPING, State.GONE)
_AT_REST = (State.SLEEPING, State.GONE)


class Clock:
    """Time and what is to be done when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something later."""
        self._count += 1
        heapq.heappush(self._due, (self.now + seconds, self._count, do))

    def step(self) -> bool:
        """Do the next thing; False when there is none."""
        if not self._due:
            return False
        self.now, _, do = heapq.heappop(self._due)
        do()
        return True


@dataclass(slots=True)
class _Sent:
    """A command on its way, again and again until it is answered, withdrawn or too old."""

    replica: Replica
    command: Command
    deadline: float


@dataclass(slots=True)
class _Worker:
    """A worker as its sidecar knows it."""

    engine: Engine | None = None
    generation: int = 0
    ended: int = 0
    """Highest generation that was told to stop."""
    results: dict[str, CommandFailed | None] = field(default_factory=dict)
    running: set[str] = field(default_factory=set)


class Machines:
    """One schedule."""

    def __init__(self, seed: int, weather: Weather, sharing: Any) -> None:
        self.clock = Clock()
        self.rng = random.Random(f"{seed}/machines")
        self.weather = weather
        self.story = Story(lambda: self.clock.now)
        self.cards = Cards(self.story)
        self.rules = Rules(self.story, self.cards)
        self.book = Lifecycle(sharing, operation_seconds=OPERATION_SECONDS)
        self.rules.sharing, self.rules.serving = sharing, True
        self.seen = self._shown()
        self.rules.leases = {name: str(lease.state) for name, lease in self.book.leases.items()}
        self.replicas: dict[tuple[str, int], Replica] = {}
        self.workers: dict[tuple[str, int], _Worker] = {}
        self.moves: dict[str, Work] = {}
        self.sent: dict[str, _Sent] = {}
        self.ids = 0
        for role in ROLES:
            for number in range(2):
                self._asleep(role, number)

    def _asleep(self, role: str, number: int) -> None:
        """As after the start: up once, and sleeping."""
        replica = Replica(f"{role}/replica-{number}", 1)
        for kind in (EventKind.BEGIN, EventKind.WORKER_READY, EventKind.ADMISSION_OPENED, EventKind.OFFLOAD):
            worker = 0 if kind is EventKind.WORKER_READY else None
            replica.apply(Event(kind, worker, base_url="http://n:1" if worker == 0 else None), 0.0)
        for kind in (EventKind.ADMISSION_CLOSED, EventKind.RELEASED):
            replica.apply(Event(kind, 0 if kind is EventKind.RELEASED else None), 0.0)
        assert replica.state is State.SLEEPING
        self.replicas[role, number] = replica
        engine = self.cards.start(f"{role}/replica-{number}#0", role, 1, (("n", number),))
        self.workers[role, number] = _Worker(engine, 1)

    # --- the wire -------------------------------------------------------------------------------------------

    def carry(self, what: str, arrive: Callable[[], None]) -> None:
        """A message: lost, doubled, late or simply there a moment later."""
        rng, weather = self.rng, self.weather
        chance = rng.random()
        if chance < weather.drop:
            self.story.tell("wire", "%s is lost", what)
            return
        for _ in range(2 if chance < weather.drop + weather.double else 1):
            late = rng.random() < weather.far
            self.clock.after(rng.uniform(0.01, weather.far_seconds) if late else rng.uniform(0.001, 0.01), arrive)

    # --- the manager ----------------------------------------------------------------------------------------

    def feed(self, key: tuple[str, int], event: Event) -> None:
        """An event for a replica, and what follows from it."""
        replica = self.replicas[key]
        try:
            commands = replica.apply(event, self.clock.now)
        except IllegalEvent:
            return
        self._follow(key, commands)

    def _follow(self, key: tuple[str, int], commands: list[Command]) -> None:
        replica = self.replicas[key]
        if replica.state is State.GONE or any(each.kind is CommandKind.STOP_WORKER for each in commands):
            self.sent = {name: each for name, each in self.sent.items() if each.replica is not replica}
        for command in commands:
            if command.kind is CommandKind.PUBLISH:
                self.rules.publishes(replica.published())
            else:
                self._send(key, replica, command)
        if replica.state is State.FAILED:
            self._follow(key, replica.shutdown(self.clock.now, "it failed"))
        self._settle(key[0])

    def _send(self, key: tuple[str, int], replica: Replica, command: Command) -> None:
        self.ids += 1
        name = f"c{self.ids}"
        self.sent[name] = _Sent(replica, command, self.clock.now + OPERATION_SECONDS)
        self._deliver(key, name)

    def _deliver(self, key: tuple[str, int], name: str) -> None:
        sent = self.sent.get(name)
        if sent is None:
            return
        if self.clock.now >= sent.deadline:
            del self.sent[name]
            if sent.replica is self.replicas[key]:
                again = sent.command.kind is CommandKind.STOP_WORKER
                self.feed(key, Event(EventKind.STOP if again else EventKind.FAIL, reason="no answer"))
            return
        kind, generation = sent.command.kind, sent.replica.generation
        self.carry(f"{kind} {key[0]}/{key[1]} g{generation} [{name}]", lambda: self._take(key, name, kind, generation))
        self.clock.after(AGAIN_SECONDS, lambda: self._deliver(key, name))

    def _answered(self, key: tuple[str, int], name: str, error: CommandFailed | None) -> None:
        sent = self.sent.pop(name, None)
        if sent is not None and sent.replica is self.replicas[key]:
            value = {"base_url": "http://n:1"}
            self.feed(key, success(sent.command, 0, value) if error is None else failure(0, error))

    def _of(self, role: str) -> Iterator[tuple[tuple[str, int], Replica]]:
        return ((key, each) for key, each in list(self.replicas.items()) if key[0] == role)

    def begin(self, work: Work) -> None:
        """Move all replicas of a role."""
        self.moves[work.holder] = work
        onload = work.move is Move.ONLOAD
        for key, replica in self._of(work.holder):
            if onload and replica.state is State.GONE:
                self.replicas[key] = replica.successor(self.clock.now)
                self.feed(key, Event(EventKind.BEGIN))
            elif replica.state is (State.SLEEPING if onload else State.READY):
                self.feed(key, Event(EventKind.ONLOAD if onload else EventKind.OFFLOAD))
        self._settle(work.holder)

    def _settle(self, role: str) -> None:
        work = self.moves.get(role)
        if work is None:
            return
        states = [replica.state for _, replica in self._of(role)]
        if work.move is Move.ONLOAD:
            lost = any(state in _LOST for state in states)
            done = all(state is State.READY for state in states)
        else:
            lost, done = False, all(state in _AT_REST for state in states)
        if not (lost or done):
            return
        del self.moves[role]
        in_time = self.book.settle(work.operation, "" if done else "a replica did not come")
        self.rules.recorded("moved", {"id": work.operation, "holder": role, "late": not in_time})
        if not done and in_time:
            self.abandon(role)
        self.changed(str(work.move))

    def abandon(self, role: str) -> None:
        """End what hangs in between. The move itself ends late, when everything is at rest."""
        for key, replica in self._of(role):
            if replica.state in (State.STARTING, State.ONLOADING, State.DRAINING, State.READY):
                self._follow(key, replica.shutdown(self.clock.now, "abandoned"))

    # --- the sidecar ----------------------------------------------------------------------------------------

    def _take(self, key: tuple[str, int], name: str, kind: CommandKind, generation: int) -> None:
        worker = self.workers[key]
        if name in worker.running:
            return
        if name in worker.results:
            self._reply(key, name, worker.results[name])
            return
        worker.running.add(name)
        self.story.tell("sidecar", "%s/%d takes %s g%d [%s]", *key, kind, generation, name)
        stale = generation <= worker.ended if kind is CommandKind.START_WORKER else generation != worker.generation
        if stale and kind is not CommandKind.STOP_WORKER:
            self._finish(key, name, CommandFailed("of another generation", "stale_generation"))
            return
        rng = self.rng
        moves = kind in (CommandKind.OFFLOAD, CommandKind.ONLOAD, CommandKind.START_WORKER)
        slow = moves and rng.random() < self.weather.slow
        seconds = rng.uniform(5.0, 30.0) if slow else rng.uniform(0.01, 1.0)
        fails = moves and rng.random() < self.weather.fails
        if kind is CommandKind.START_WORKER:
            worker.generation = generation
            worker.engine = self.cards.start(f"{key[0]}/replica-{key[1]}#0", key[0], generation, (("n", key[1]),))
        elif kind is CommandKind.STOP_WORKER:
            worker.ended = max(worker.ended, generation)
        self.clock.after(seconds, lambda: self._do(key, name, kind, generation, fails=fails))

    def _do(self, key: tuple[str, int], name: str, kind: CommandKind, generation: int, *, fails: bool) -> None:
        worker = self.workers[key]
        engine = worker.engine
        error = None
        if kind is CommandKind.STOP_WORKER:
            if engine is not None and engine.generation <= generation:
                self.cards.end(engine, "stopped")
        elif engine is None or not engine.alive or engine.generation != generation:
            error = CommandFailed("its engine has ended", "exited")
        elif fails:
            error = CommandFailed("the engine refused", "recovery_required")
        elif kind in (CommandKind.START_WORKER, CommandKind.ONLOAD):
            engine.weights_valid = True
            self.cards.set_tags(engine, ALL_TAGS, str(kind))
        elif kind is CommandKind.OFFLOAD:
            self.cards.set_tags(engine, frozenset(), "it releases")
        self._finish(key, name, error)

    def _finish(self, key: tuple[str, int], name: str, error: CommandFailed | None) -> None:
        worker = self.workers[key]
        worker.running.discard(name)
        worker.results[name] = error
        self._reply(key, name, error)

    def _reply(self, key: tuple[str, int], name: str, error: CommandFailed | None) -> None:
        end = "ok" if error is None else error.message
        self.carry(f"result of [{name}] {end}", lambda: self._answered(key, name, error))

    def exits(self, key: tuple[str, int]) -> None:
        """An engine ends by itself; its sidecar says so now and then until it is heard."""
        engine = self.workers[key].engine
        if engine is None or not engine.alive:
            return
        self.cards.end(engine, "by itself")
        gone = Event(EventKind.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT, reason="it ended")

        def told() -> None:
            if self.replicas[key].generation == engine.generation:
                self.feed(key, gone)

        for beat in range(3):
            self.clock.after(1.0 + beat, lambda: self.carry("word of its end", told))

    # --- the coordinator ------------------------------------------------------------------------------------

    def unproven(self) -> dict[str, list[str]]:
        """Holder to replicas whose release is not proven."""
        found: dict[str, list[str]] = {}
        for (role, _), replica in self.replicas.items():
            if not replica.release_proven:
                found.setdefault(role, []).append(replica.engine_id)
        return found

    def ask(self, ask: Ask) -> Operation:
        """As `LifecycleCoordinator.ask`."""
        operation, work = self.book.ask(ask, self.clock.now, self.unproven())
        if work is not None:
            fields = {"id": work.operation, "holder": work.holder, "method": str(ask.method)}
            self.rules.recorded("operation", fields)
        self.changed(str(ask.method))
        if work is not None:
            self.begin(work)
            self.clock.after(OPERATION_SECONDS, self._tick)
        return operation

    def _tick(self) -> None:
        for operation in self.book.tick(self.clock.now):
            holder = operation.ask.holder or "rollout"
            self.rules.recorded("gave_up", {"id": operation.id, "holder": holder})
            self.abandon(holder)
        self.changed("deadline")

    def changed(self, cause: str) -> None:
        """As `LifecycleCoordinator` writes it down."""
        after = self._shown()
        before, self.seen = self.seen, after
        for what, state in after.items():
            if state != before.get(what):
                fields = {"holder": what, "before": before.get(what), "after": state, "cause": cause}
                self.rules.recorded("batch" if what == "batch" else "lease", fields)

    def _shown(self) -> dict[str, str]:
        return {"batch": self.book.shown_batch} | {name: str(lease.state) for name, lease in self.book.leases.items()}


class Client:
    """Asks under one id until there is an answer, or until it has waited for too long."""

    def __init__(self, of: Machines, name: str, patience: float) -> None:
        self.of, self.name, self.patience, self.ids = of, name, patience, 0

    def ask(
        self,
        method: Method,
        batch: int | None,
        holder: str | None,
        then: Callable[[RelaxError | str | None], None],
        operation: str = "",
    ) -> None:
        """One request; `then` hears its end once."""
        self.ids += 1
        ask = Ask(operation or f"{self.name}-{self.ids}", method, batch, holder, "it failed")
        of, until, open_ = self.of, self.of.clock.now + self.patience, [True]

        def end(outcome: RelaxError | str | None) -> None:
            if open_:
                open_.clear()
                of.story.tell(self.name, "%s: %s", ask, outcome or "done")
                then(outcome)

        def arrives() -> None:
            try:
                watch(of.ask(ask))
            except RelaxError as error:
                refused = error
                of.carry("a refusal", lambda: end(refused))

        def watch(found: Operation) -> None:
            if found.progress is not Progress.RUNNING:
                of.carry("an answer", lambda: end(found.error))
            elif open_:
                of.clock.after(0.25, lambda: watch(found))

        def send() -> None:
            if not open_:
                return
            if of.clock.now >= until:
                end("no answer")
                return
            of.carry(f"{ask} [{ask.operation}]", arrives)
            of.clock.after(3.0, send)

        send()
