"""The discovery subscriber against real sockets: late joiners, gaps, lost updates, new coordinators, silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control.publisher import Publisher
from relax_slurm.core.plan import Role, RolePlan, RouteMode, WeightSource
from relax_slurm.core.snapshot import EngineEntry, ModelEntry, ReplicaState, RoleSnapshot
from relax_slurm.wire.codec import MAGIC
from relax_slurm.wire.keys import allowed, credentials, read_pair, write_keys
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.server import ControlServer
from relax_slurm.wire.subscriber import DiscoverySubscriber
from tests.unit.control.stage import run, until

FIRST, SECOND = "000001-aaaaaa", "000002-000000"


class Head:
    """A coordinator's discovery: sockets, registry, heartbeats. What it does not say is up to the test."""

    def __init__(self, keys: Path, epoch: str = FIRST, ports: tuple[int, int] = (0, 0)) -> None:
        self.epoch = epoch
        self.server = ControlServer(read_pair(keys, PeerKind.COORDINATOR), allowed(keys))
        self.ports = self.server.bind("127.0.0.1", ports)
        self.publisher = Publisher(epoch, self.server)
        self.asked = 0
        self.mute = self.deaf = False
        self.broken: dict[str, Any] | None = None
        self._tasks = [asyncio.create_task(work) for work in (self._answer(), self._beat(), self.publisher.run())]

    @property
    def addresses(self) -> tuple[str, str]:
        return f"tcp://127.0.0.1:{self.ports[0]}", f"tcp://127.0.0.1:{self.ports[1]}"

    @property
    def snapshot(self) -> RoleSnapshot | None:
        return self.publisher.registry.snapshot(Role.TEACHER)

    def publish(self, *states: ReplicaState) -> None:
        """The role as a whole with these replicas."""
        engines = tuple(engine(number, state) for number, state in enumerate(states))
        role = RolePlan(Role.TEACHER, "p", 0, 4, 0, False, "m", {}, {}, "round_robin", ())
        model = ModelEntry("m", ReplicaState.STARTING, RouteMode.DIRECT, None, WeightSource.STATIC, None, "m", engines)
        self.publisher.publish_role(role, [model])

    def change(self, number: int, state: ReplicaState) -> None:
        """One replica changes."""
        self.publisher.publish_engine(Role.TEACHER, "m", engine(number, state))

    def lose(self, number: int, state: ReplicaState) -> None:
        """One replica changes and the update never leaves."""
        queue = self.publisher._queue
        self.publisher._queue = lambda update: None  # type: ignore[method-assign]
        self.change(number, state)
        self.publisher._queue = queue  # type: ignore[method-assign]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.server.aclose()

    async def _answer(self) -> None:
        while True:
            incoming = await self.server.receive()
            self.asked += 1
            if self.deaf:
                continue
            body = {"kind": "reply", "id": incoming.body["id"], "epoch": self.epoch, "ok": True}
            if self.broken is not None:
                body["result"] = {"snapshot": self.broken}
            elif self.snapshot is None:
                body |= {"ok": False, "error": {"code": "unknown_role", "message": "not yet"}}
            else:
                body["result"] = {"snapshot": self.publisher.snapshot("teacher")}
            await self.server.send(incoming.identity, body)

    async def _beat(self) -> None:
        while True:
            if not self.mute:
                await self.publisher.heartbeat("READY")
            await asyncio.sleep(0.05)


def engine(number: int, state: ReplicaState) -> EngineEntry:
    ready = state is ReplicaState.READY
    return EngineEntry(f"m/replica-{number}", f"http://h:{number + 1}" if ready else None, state, ready, 1)


@asynccontextmanager
async def following(
    tmp_path: Path, *, staleness: float = 10.0, publish: bool = True
) -> AsyncIterator[tuple[Head, DiscoverySubscriber]]:
    write_keys(tmp_path)
    head = Head(tmp_path)
    if publish:
        head.publish(ReplicaState.STARTING, ReplicaState.STARTING)
    subscriber = DiscoverySubscriber(
        *head.addresses, credentials(tmp_path, PeerKind.CLIENT), [Role.TEACHER], staleness_seconds=staleness
    )
    subscriber.start()
    try:
        yield head, subscriber
    finally:
        await subscriber.close()
        await head.close()


def view(subscriber: DiscoverySubscriber) -> RoleSnapshot | None:
    return subscriber.current(Role.TEACHER)


def test_a_late_joiner_gets_everything_and_then_every_change(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path) as (head, subscriber):
            await until(lambda: view(subscriber) == head.snapshot)
            asked = head.asked
            for number in (0, 1, 0, 1):
                head.change(number, ReplicaState.READY)
                head.change(number, ReplicaState.DRAINING)
            await until(lambda: view(subscriber) == head.snapshot)
            assert head.asked == asked  # by updates, not by asking
            assert 1 <= subscriber.states[Role.TEACHER].counters.applied <= 8, (
                "changes of one moment may travel together"
            )
            await until(lambda: subscriber.run_state == "READY")
            assert subscriber.current(Role.GENRM) is None
            subscriber.invalidate(Role.GENRM)

    run(scenario)


def test_a_role_that_is_published_later_is_waited_for(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path, publish=False) as (head, subscriber):
            await until(lambda: head.asked)
            assert view(subscriber) is None
            waiting = asyncio.create_task(subscriber.changed())
            head.publish(ReplicaState.READY)
            await waiting
            await until(lambda: view(subscriber) == head.snapshot)

    run(scenario)


def test_a_lost_update_is_seen_by_the_next_one_or_by_the_heartbeat(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path) as (head, subscriber):
            await until(lambda: view(subscriber) == head.snapshot)
            head.mute = True
            head.lose(0, ReplicaState.READY)
            head.change(1, ReplicaState.READY)  # its base is a revision that was never seen
            await until(lambda: view(subscriber) == head.snapshot)
            resyncs = subscriber.states[Role.TEACHER].counters.resyncs
            head.lose(0, ReplicaState.DRAINING)
            await asyncio.sleep(0.1)
            assert view(subscriber) != head.snapshot
            head.mute = False
            await until(lambda: view(subscriber) == head.snapshot)
            assert subscriber.states[Role.TEACHER].counters.resyncs == resyncs + 1

    run(scenario)


def test_a_coordinator_that_is_started_again_on_the_same_ports(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path) as (head, subscriber):
            head.change(0, ReplicaState.READY)
            await until(lambda: view(subscriber) == head.snapshot)
            await head.close()
            again = Head(tmp_path, SECOND, head.ports)
            try:
                again.publish(ReplicaState.STARTING, ReplicaState.READY)
                await until(lambda: view(subscriber) == again.snapshot)
                assert view(subscriber).epoch == SECOND  # type: ignore[union-attr]
                again.change(0, ReplicaState.READY)
                await until(lambda: view(subscriber) == again.snapshot)
            finally:
                await again.close()

    run(scenario)


def test_silence_ends_the_view_within_its_bound_and_a_word_brings_it_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path, staleness=0.6) as (head, subscriber):
            await until(lambda: view(subscriber) == head.snapshot)
            head.mute = head.deaf = True
            silent_since = time.monotonic()
            await until(lambda: view(subscriber) is None)
            assert 0.4 <= time.monotonic() - silent_since <= 1.5
            head.mute = head.deaf = False
            await until(lambda: view(subscriber) == head.snapshot)

    run(scenario)


def test_heartbeats_alone_do_not_keep_a_view_that_cannot_be_brought_up_to_date(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path, staleness=0.6) as (head, subscriber):
            await until(lambda: view(subscriber) == head.snapshot)
            head.deaf = True
            head.lose(0, ReplicaState.READY)
            await until(lambda: view(subscriber) is None)
            head.deaf = False
            await until(lambda: view(subscriber) == head.snapshot)

    run(scenario)


def test_doubt_asks_again_and_serves_meanwhile(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path) as (head, subscriber):
            await until(lambda: view(subscriber) == head.snapshot)
            asked = head.asked
            for _ in range(20):
                subscriber.invalidate(Role.TEACHER)
            assert view(subscriber) == head.snapshot
            await until(lambda: head.asked > asked)
            await asyncio.sleep(0.2)
            assert head.asked == asked + 1  # twenty doubts are one question

    run(scenario)


@pytest.mark.parametrize("broken", [{}, {"schema_version": 2}, {"schema_version": 9, "role": "teacher"}])
def test_a_broken_snapshot_is_not_believed(tmp_path: Path, broken: dict[str, Any]) -> None:
    async def scenario() -> None:
        write_keys(tmp_path)
        head = Head(tmp_path)
        head.broken = broken
        head.publish(ReplicaState.READY)
        subscriber = DiscoverySubscriber(*head.addresses, credentials(tmp_path, PeerKind.CLIENT), [Role.TEACHER])
        subscriber.start()
        try:
            await until(lambda: head.asked >= 2)  # asked, not believed, asked again
            assert view(subscriber) is None
            head.broken = None
            await until(lambda: view(subscriber) == head.snapshot)
        finally:
            await subscriber.close()
            await head.close()

    run(scenario)


def test_garbage_is_counted_and_the_reader_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with following(tmp_path) as (head, subscriber):
            await until(lambda: view(subscriber) == head.snapshot)
            socket = head.server._discovery
            assert socket is not None
            for frames in (
                [b"beat"],
                [b"beat", b"RLX9", b"\x80"],
                [b"beat", MAGIC, b"\xc1"],
                [b"snap.teacher", MAGIC, b"\x80"],
            ):
                await socket.send_multipart(frames)
            update = {"role": "teacher", "epoch": FIRST, "base_revision": 1, "revision": 2}
            for broken in (
                {"kind": "update", **update, "update": {"engines": {"m": [{"engine_id": 3}]}}},
                {"kind": "update", **update, "role": "nobody", "update": {}},
                {"kind": "heartbeat", "epoch": FIRST},
                {"kind": "who"},
            ):
                await head.server.publish("snap.teacher", broken)
            await until(lambda: subscriber.garbage == 8)
            head.change(0, ReplicaState.READY)
            await until(lambda: view(subscriber) == head.snapshot)

    run(scenario)


def test_closing_while_asking_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario() -> None:
        write_keys(tmp_path)
        head = Head(tmp_path)
        head.deaf = True
        subscriber = DiscoverySubscriber(*head.addresses, credentials(tmp_path, PeerKind.CLIENT), [Role.TEACHER])
        subscriber.start()
        await until(lambda: head.asked)
        await subscriber.close()
        await head.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)

    run(scenario)
