"""What leaves on discovery, and that a lost update is healed by asking again."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from relax_slurm.control.publisher import Publisher
from relax_slurm.control.refusals import UnknownRole
from relax_slurm.core.discovery import from_json
from relax_slurm.core.plan import Role, RouteMode, WeightSource
from relax_slurm.core.snapshot import EngineEntry, ModelEntry, ReplicaState
from relax_slurm.core.subscription import Action, SubscriberState
from relax_slurm.core.update import update_from_json
from relax_slurm.wire.server import ControlServer
from tests.unit.control.stage import EPOCH, config_of, plan_of, run, until


class Socket:
    """Stands for the server: keeps what was published."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    async def publish(self, topic: str, body: dict[str, Any]) -> None:
        self.sent.append((topic, body))


def engine(number: int, state: ReplicaState) -> EngineEntry:
    ready = state is ReplicaState.READY
    return EngineEntry(f"m/replica-{number}", f"http://h:{number + 1}" if ready else None, state, ready, 1)


def model(*engines: EngineEntry) -> ModelEntry:
    return ModelEntry("m", ReplicaState.STARTING, RouteMode.DIRECT, None, WeightSource.ACTOR, "0", "m", tuple(engines))


def publisher(**options: Any) -> tuple[Publisher, Socket]:
    socket = Socket()
    made = Publisher(EPOCH, cast(ControlServer, socket), **options)
    role = plan_of(config_of()).roles[0]
    made.publish_role(role, [model(*(engine(number, ReplicaState.STARTING) for number in range(4)))])
    return made, socket


def test_a_subscriber_that_applies_everything_ends_up_equal() -> None:
    async def scenario() -> None:
        made, socket = publisher()
        task = asyncio.create_task(made.run())
        for number in range(4):
            made.publish_engine(Role.ROLLOUT, "m", engine(number, ReplicaState.READY))
            made.publish_engine(Role.ROLLOUT, "m", engine(number, ReplicaState.READY))  # nothing changed
        await until(lambda: len(socket.sent) == 2)
        # The first one carries the routing; what gathered after it is one message.
        assert [(body["base_revision"], body["revision"]) for _, body in socket.sent] == [(0, 1), (1, 5)]
        made.publish_engine(Role.ROLLOUT, "m", engine(0, ReplicaState.SLEEPING))
        await until(lambda: len(socket.sent) == 3)
        assert socket.sent[-1][1]["revision"] == 6
        assert {topic for topic, _ in socket.sent} == {"snap.rollout"}
        state = SubscriberState(Role.ROLLOUT)
        state.on_time(0.0)
        state.on_snapshot(from_json(made.snapshot("rollout")), 0.0)
        assert state.snapshot == made.registry.snapshot(Role.ROLLOUT)
        for _, body in socket.sent:
            assert state.on_update(update_from_json(body), 0.0) is Action.DROPPED
        task.cancel()

    run(scenario)


def test_an_update_that_did_not_fit_is_a_gap_that_the_heartbeat_shows() -> None:
    async def scenario() -> None:
        made, socket = publisher(max_waiting=1)
        state = SubscriberState(Role.ROLLOUT)
        state.on_time(0.0)
        state.on_snapshot(from_json(made.snapshot("rollout")), 0.0)
        made.publish_engine(Role.ROLLOUT, "m", engine(0, ReplicaState.READY))  # the queue is full: lost
        task = asyncio.create_task(made.run())
        await until(lambda: socket.sent)
        await made.heartbeat("READY")
        topic, beat = socket.sent[-1]
        assert topic == "beat"
        assert beat == {
            "kind": "heartbeat", "epoch": EPOCH, "seq": 1, "state": "READY", "revisions": {"rollout": 2},
        }  # fmt: skip
        assert state.on_heartbeat(beat["epoch"], beat["revisions"], 1.0) is Action.RESYNC
        made.publish_engine(Role.ROLLOUT, "m", engine(1, ReplicaState.READY))
        await until(lambda: len(socket.sent) == 3)
        assert state.on_update(update_from_json(socket.sent[-1][1]), 1.0) is Action.QUEUED
        assert state.on_snapshot(from_json(made.snapshot("rollout")), 1.0) is Action.APPLIED
        assert state.snapshot == made.registry.snapshot(Role.ROLLOUT)
        task.cancel()

    run(scenario)


def test_a_role_that_is_not_there_is_named() -> None:
    async def scenario() -> None:
        made, _ = publisher()
        for name in ("genrm", "x" * 100):
            with pytest.raises(UnknownRole, match="published: rollout"):
                made.snapshot(name)
        with pytest.raises(UnknownRole, match="none yet"):
            Publisher(EPOCH, cast(ControlServer, Socket())).snapshot("rollout")

    run(scenario)
