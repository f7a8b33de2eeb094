"""A manager with links whose far end is a dictionary: what it sends, when it builds again, whom it does not believe."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.config.models import RunConfig
from relax_slurm.control import manager as manager_module
from relax_slurm.control import replica_commands
from relax_slurm.control.hooks import Hooks
from relax_slurm.control.links import NodeLinks
from relax_slurm.control.manager import InferenceManager
from relax_slurm.core.binding import bind
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Event, EventKind, Evidence, State
from relax_slurm.core.snapshot import ReplicaState
from relax_slurm.errors import EngineFailed, RecoveryRequired, StartupFailed
from relax_slurm.wire.messages import Result, WorkerStatus
from tests.unit.control.stage import (
    EPOCH,
    Actors,
    allocation_of,
    bad,
    config_of,
    defer_config,
    good,
    plan_of,
    report_of,
    run,
    until,
    wide_config,
)


class Far:
    """The other end of all links: answers at once unless `behave` says otherwise."""

    def __init__(self) -> None:
        self.actors = Actors()
        self.links: NodeLinks | None = None
        self.behave: Callable[[str, dict[str, Any], Callable[[], None]], None] = lambda node, body, answer: answer()
        self.done: dict[str, Any] = {}
        """Answers by operation id: a repeated command is not carried out twice."""

    async def send(self, identity: bytes, body: dict[str, Any]) -> bool:
        node = identity.decode().partition("/")[0]

        def answer() -> None:
            assert self.links is not None
            if body["id"] not in self.done:
                self.done[body["id"]] = self.actors.answer(node, body)
            outcome = self.done[body["id"]]
            if outcome is not None:
                told = Result(kind="result", id=body["id"], node=node, incarnation="i1", epoch=EPOCH, **outcome)
                self.links.resolve(self.links.nodes[node], told)

        asyncio.get_running_loop().call_soon(self.behave, node, body, answer)
        return True


class Bench:
    """One manager, what it published and recorded, and its far end."""

    def __init__(self, config: RunConfig, model: str | None = None) -> None:
        plan = plan_of(config)
        allocation = allocation_of(plan)
        reports = {node: report_of(plan, node, place) for place, node in enumerate(allocation.node_names)}
        self.far = Far()
        loop = asyncio.get_running_loop()
        self.links = NodeLinks(allocation.node_names, EPOCH, self.far.send, loop.time, resend_seconds=(0.01, 0.02))
        self.far.links = self.links
        for node in allocation.node_names:
            self.enter(node)
        self.published: list[tuple[str, ReplicaState, int]] = []
        self.recorded: list[dict[str, Any]] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.faults: list[BaseException] = []
        ids = iter(range(1_000_000))
        hooks = Hooks(self._publish, self._record, self._spawn, loop.time, lambda: f"op{next(ids)}")
        found = next(entry for role in plan.roles for entry in role.models if model is None or entry.name == model)
        self.manager = InferenceManager(
            found,
            bind(plan, allocation.facts(), reports),
            config,
            self.links,
            hooks,
            run_tag="tag",
            memory_saver=config.placement != "decoupled",
        )

    def enter(self, node: str, incarnation: str = "i1") -> None:
        link = self.links.nodes[node]
        link.incarnation, link.identity = incarnation, f"{node}/{incarnation}".encode()

    def states(self) -> list[State]:
        return [replica.state for replica in self.manager.replicas]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.recorded if event["event"] == kind]

    def status(self, replica: str, state: str, rank: int = 0, **fields: Any) -> None:
        """What a beat says of a worker."""
        self.manager.on_status(replica, rank, WorkerStatus(worker_id=f"{replica}#{rank}", state=state, **fields))

    def _publish(self, manager: InferenceManager, replica: Replica) -> None:
        entry = replica.published()
        self.published.append((entry.engine_id, entry.state, entry.generation))

    def _record(self, event: str, /, **fields: Any) -> None:
        self.recorded.append({"event": event, **fields})

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self.tasks.discard(task)
            if not task.cancelled() and (fault := task.exception()) is not None:
                self.faults.append(fault)

        task.add_done_callback(ended)
        return task


@asynccontextmanager
async def bench(config: RunConfig | None = None, model: str | None = None) -> AsyncIterator[Bench]:
    made = Bench(config or config_of(), model)
    try:
        yield made
        assert made.faults == []
    finally:
        for task in tuple(made.tasks):
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)


FIRST = "m/replica-0"


def test_start_opens_every_replica_and_says_so_in_order() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            assert at.states() == [State.READY] * 4
            assert at.manager.complete
            assert {entry.state for entry in at.manager.entry().engines} == {ReplicaState.READY}
            sent = [(method, args["worker_id"]) for _, method, args in at.far.actors.seen]
            assert [entry for entry in sent if entry[1] == f"{FIRST}#0"] == [
                ("start_worker", f"{FIRST}#0"),
                ("open_admission", f"{FIRST}#0"),
            ]
            spec = at.far.actors.methods("start_worker")[0]["spec"]
            assert spec["run_tag"] == "tag"
            assert spec["host"] == "127.0.0.1"

    run(scenario)


def test_start_fails_with_the_first_reason() -> None:
    async def scenario() -> None:
        async with bench() as at:
            at.far.actors.by_method["start_worker"] = lambda args: bad("exited", "no model")
            with pytest.raises(StartupFailed, match=r"m/replica-0 on p-0 is FAILED, wanted READY.*no model"):
                await at.manager.start()
            # Nobody looks after it yet: the run is about to end, and a retry would hide the reason.
            assert State.STARTING not in at.states()
            assert at.far.actors.methods("stop_worker") == []

    run(scenario)


def test_nobody_answers_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_commands, "ENDING_SECONDS", 0.0)

    async def scenario() -> None:
        config = config_of(engine={"program": "sim", "startup_seconds": 0.3, "sim": {"startup_seconds": 0.0}})
        async with bench(config) as at:
            at.far.behave = lambda node, body, answer: None
            with pytest.raises(StartupFailed, match="no result within"):
                await at.manager.start()

    run(scenario)


def test_offload_and_onload_and_both_again() -> None:
    async def scenario() -> None:
        async with bench(defer_config(), "policy") as at:
            await at.manager.start()
            await at.manager.offload()
            assert at.states() == [State.SLEEPING]
            assert at.manager.complete
            await at.manager.offload()
            assert len(at.far.actors.methods("offload")) == 1
            deadline = at.far.actors.methods("offload")[0]
            assert deadline["tags"] == ["cuda_graph", "kv_cache", "weights"]
            assert deadline["deadline_seconds"] == pytest.approx(2.9)
            await at.manager.onload()
            assert at.states() == [State.READY]
            at.far.actors.by_method["offload"] = lambda args: bad("recovery_required", "in doubt")
            with pytest.raises(RecoveryRequired):
                await at.manager.offload()

    run(scenario)


def test_an_onload_that_fails() -> None:
    async def scenario() -> None:
        async with bench(defer_config(), "policy") as at:
            await at.manager.start()
            await at.manager.offload()
            at.far.actors.by_method["onload"] = lambda args: bad("exited", "died")
            with pytest.raises(EngineFailed, match="died"):
                await at.manager.onload()

    run(scenario)


def test_an_onload_whose_weights_have_to_be_sent_is_pending_and_no_failure() -> None:
    async def scenario() -> None:
        async with bench(defer_config(), "policy") as at:
            await at.manager.start()
            await at.manager.offload()
            at.far.actors.by_method["onload"] = lambda args: good(result="weights_pending")
            assert await at.manager.onload() == ("policy/replica-0",)
            assert at.states() == [State.ONLOADING]
            assert not at.manager.complete
            assert at.published[-1][1] is ReplicaState.ONLOADING
            del at.far.actors.by_method["onload"]
            at.manager.feed("policy/replica-0", Event(EventKind.WEIGHTS_VALID))
            await until(lambda: at.states() == [State.READY])
            assert at.far.actors.methods("onload")[-1]["tags"] == []
            assert at.manager.replicas[0].generation == 1

    run(scenario)


def elastic_config(role: str) -> RunConfig:
    """Two replicas of one role beside training, on the GPUs of both."""
    model = {"model_path": "sim/m", "gpus": 2, "gpus_per_engine": 1}
    return config_of(
        placement="split",
        pools={"a": {"nodes": 1, "gpus_per_node": 2}},
        training={"pool": "a", "gpus": 2},
        roles={role: {"pool": "a", "models": {"m": model}}},
    )


def one_fails(at: Bench) -> None:
    """The first onload of the first replica ends its engine."""
    failed: list[str] = []

    def onload(args: dict[str, Any]) -> Any:
        if args["worker_id"] == f"{FIRST}#0" and not failed:
            failed.append(args["worker_id"])
            return bad("exited", "out of memory")
        return good()

    at.far.actors.by_method["onload"] = onload


def test_when_one_of_a_rollout_does_not_wake_up_the_others_sleep_again() -> None:
    async def scenario() -> None:
        async with bench(elastic_config("rollout")) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            await at.manager.offload()
            one_fails(at)
            with pytest.raises(EngineFailed, match="out of memory"):
                await at.manager.onload()
            assert at.states() == [State.GONE, State.SLEEPING]
            assert all(replica.release_proven for replica in at.manager.replicas)
            at.manager.tick()
            assert at.states() == [State.GONE, State.SLEEPING], "nothing is built where somebody else may be"
            await at.manager.onload()
            assert at.states() == [State.READY, State.READY]
            assert [replica.generation for replica in at.manager.replicas] == [2, 1]

    run(scenario)


def test_when_one_of_a_judge_does_not_wake_up_it_is_built_again() -> None:
    async def scenario() -> None:
        async with bench(elastic_config("genrm")) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            await at.manager.offload()
            one_fails(at)
            assert await at.manager.onload() == ()
            assert at.states() == [State.READY, State.READY]
            assert [replica.generation for replica in at.manager.replicas] == [2, 1]

    run(scenario)


def test_a_replica_that_is_still_being_built_is_put_to_sleep_too() -> None:
    async def scenario() -> None:
        async with bench(elastic_config("genrm")) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            at.status(FIRST, "exited", generation=1)
            assert at.states() == [State.STARTING, State.READY]
            await at.manager.offload()
            assert at.states() == [State.SLEEPING, State.SLEEPING]

    run(scenario)


def test_one_offload_that_fails_does_not_keep_the_others_awake() -> None:
    async def scenario() -> None:
        async with bench(elastic_config("genrm")) as at:
            await at.manager.start()
            at.far.actors.by_method["offload"] = lambda args: (
                bad("recovery_required", "still holds") if args["worker_id"] == f"{FIRST}#0" else good()
            )
            with pytest.raises(RecoveryRequired, match=r"m/replica-0 .*still holds"):
                await at.manager.offload()
            assert at.states() == [State.FAILED, State.SLEEPING]
            assert not at.manager.replicas[0].release_proven

    run(scenario)


def test_stop_waits_for_proof_and_for_nothing_else() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            await at.manager.stop("enough")
            assert at.states() == [State.GONE] * 4
            assert at.manager.unproven() == []
            again = len(at.far.actors.seen)
            await at.manager.stop("again")
            assert len(at.far.actors.seen) == again

    run(scenario)


def test_stop_does_not_wait_for_what_nobody_will_say() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.far.actors.by_method["stop_worker"] = lambda args: bad("recovery_required", "pid 7 will not die")
            async with asyncio.timeout(1):
                await at.manager.stop("enough")
            assert len(at.manager.unproven()) == 4
            # the second chance: a sidecar that leaves says what it could confirm
            at.manager.on_node_emptied("p-0", Evidence.CONFIRMED_EXIT, "left", frozenset({f"{FIRST}#0"}))
            assert [replica.engine_id for replica in at.manager.unproven()] == [
                "m/replica-0",
                "m/replica-2",
                "m/replica-3",
            ]

    run(scenario)


def test_stop_while_starting_ends_what_a_start_may_have_begun() -> None:
    async def scenario() -> None:
        async with bench() as at:
            held: list[Callable[[], None]] = []

            def behave(node: str, body: dict[str, Any], answer: Callable[[], None]) -> None:
                if body["method"] == "start_worker":
                    held.append(answer)
                else:
                    answer()

            at.far.behave = behave
            starting = asyncio.create_task(at.manager.start())
            await until(lambda: len(held) >= 4)
            starting.cancel()
            await at.manager.stop("stop")
            assert at.states() == [State.GONE] * 4
            for answer in held:
                answer()  # too late: nobody asks any more
            assert at.states() == [State.GONE] * 4
            repeated = len(held)
            await asyncio.sleep(0.1)
            assert len(held) == repeated  # and a withdrawn start is not sent again

    run(scenario)


def test_an_exit_is_cleaned_up_and_built_again() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            at.status(FIRST, "exited", generation=1, detail="exit code 1")
            await until(lambda: at.states() == [State.READY] * 4)
            assert at.manager.replicas[0].generation == 2
            shown = [entry for entry in at.published if entry[0] == FIRST]
            assert (FIRST, ReplicaState.DEAD, 1) in shown or (FIRST, ReplicaState.STOPPING, 1) in shown
            assert shown[-1] == (FIRST, ReplicaState.READY, 2)

    run(scenario)


def test_the_end_of_a_predecessor_is_not_the_end_of_its_successor() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            held: list[Callable[[], None]] = []
            at.far.behave = lambda node, body, answer: held.append(answer)
            at.status(FIRST, "exited", generation=1)
            await until(lambda: held)
            assert at.manager.replicas[0].state is State.STARTING
            at.status(FIRST, "exited", generation=1)  # the next beat, sent before the start arrived
            assert at.manager.replicas[0].state is State.STARTING
            at.far.behave = lambda node, body, answer: answer()
            held[0]()
            await until(lambda: at.manager.complete)

    run(scenario)


def test_an_old_sidecar_without_generations_is_still_understood() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.status(FIRST, "exited")
            assert at.manager.replicas[0].state is State.GONE

    run(scenario)


def test_a_stop_of_before_does_not_reach_the_successor() -> None:
    """It was on its way when the node's emptiness was proven otherwise; sent again it would end the new engine."""

    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)

            def behave(node: str, body: dict[str, Any], answer: Callable[[], None]) -> None:
                if body["method"] != "stop_worker":
                    answer()
                else:
                    at.far.actors.seen.append((node, "stop_worker", body["args"]))

            at.far.behave = behave
            at.status(FIRST, "failed", generation=1, detail="3 health checks failed")
            assert at.manager.replicas[0].state is State.STOPPING
            await until(lambda: at.far.actors.methods("stop_worker"))
            at.manager.on_node_emptied("p-0", Evidence.CONFIRMED_EXIT, "replaced", frozenset({"m/replica-1#0"}))
            await until(lambda: at.manager.replicas[0].state is State.READY)
            stops = len(at.far.actors.methods("stop_worker"))
            await asyncio.sleep(0.1)
            assert len(at.far.actors.methods("stop_worker")) == stops

    run(scenario)


def test_what_fails_again_at_once_is_built_again_more_and_more_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [manager_module.rebuild_pause(number) for number in (1, 2, 3, 9)] == [1.0, 2.0, 4.0, 30.0]
    monkeypatch.setattr(manager_module, "REBUILD_PAUSE_SECONDS", 0.2)

    async def scenario() -> None:
        config = config_of(engine={"program": "sim", "startup_seconds": 5.0, "max_restarts": 2})
        async with bench(config) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            at.far.actors.by_method["start_worker"] = lambda args: bad("exited", "broken disk")
            at.status(FIRST, "exited", generation=1)
            await until(lambda: at.manager.replicas[0].generation == 2)
            await until(lambda: at.manager.replicas[0].state is State.GONE)
            at.manager.tick()
            assert at.manager.replicas[0].generation == 2, "not before the pause is over"
            while not at.events("given_up"):
                at.manager.tick()
                await asyncio.sleep(0.01)
            assert at.manager.replicas[0].generation == 3

    run(scenario)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rebuilds without a pause."""
    monkeypatch.setattr(manager_module, "REBUILD_PAUSE_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
def test_restarts_are_counted_and_then_given_up() -> None:
    async def scenario() -> None:
        config = config_of(engine={"program": "sim", "startup_seconds": 5.0, "max_restarts": 2})
        async with bench(config) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            at.far.actors.by_method["start_worker"] = lambda args: bad("exited", "broken disk")
            at.status(FIRST, "exited", generation=1)
            await until(lambda: at.events("given_up"))
            assert len(at.far.actors.methods("start_worker")) == 4 + 2
            assert at.manager.replicas[0].state is State.GONE
            assert not at.manager.complete
            assert at.manager.exhausted == ""  # three others serve
            for number in (1, 2, 3):
                at.status(f"m/replica-{number}", "exited", generation=1)
            await until(lambda: len(at.events("given_up")) == 4)
            assert "broken disk" in at.manager.exhausted

    run(scenario)


@pytest.mark.usefixtures("at_once")
def test_a_start_that_fails_while_serving_is_cleaned_up_even_without_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            once = iter([bad("recovery_required", "start was not confirmed to have ended")])
            at.far.actors.by_method["start_worker"] = lambda args: next(
                once, at.far.actors.by_default("", "start_worker", args)
            )
            at.status(FIRST, "exited", generation=1)
            await until(lambda: at.manager.complete)
            assert at.manager.replicas[0].generation == 3
            assert len(at.far.actors.methods("stop_worker")) == 1

    run(scenario)


def test_an_end_that_was_not_confirmed_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "STOP_AGAIN_SECONDS", 0.05)

    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            tries = iter([bad("recovery_required", "state D"), bad("recovery_required", "state D")])
            at.far.actors.by_method["stop_worker"] = lambda args: next(tries, good())
            at.status(FIRST, "failed", generation=1)
            while not at.manager.complete:
                at.manager.tick()
                await asyncio.sleep(0.01)
            assert len(at.far.actors.methods("stop_worker")) == 3

    run(scenario)


def test_a_rebuild_waits_for_its_node_and_ends_with_it() -> None:
    async def scenario() -> None:
        async with bench(wide_config()) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            link = at.links.nodes["p-1"]
            at.links.retire(link, "its step ended")
            at.manager.on_node_emptied("p-1", Evidence.STEP_ENDED_WITH_CGROUP, "its step ended")
            await until(lambda: at.states() == [State.GONE])
            at.manager.tick()
            assert at.states() == [State.GONE]
            starts = len(at.far.actors.methods("start_worker"))
            assert starts == 2
            at.enter("p-1", "i2")
            at.manager.tick()
            await until(lambda: at.states() == [State.READY])
            at.links.retire(link, "its step ended")
            link.lost, link.step_ended = True, "the step of node p-1 ended with code 1"
            at.manager.on_node_emptied("p-1", Evidence.STEP_ENDED_WITH_CGROUP, "its step ended")
            await until(lambda: at.manager.exhausted)
            assert "p-1" in at.manager.exhausted

    run(scenario)


def test_a_start_that_reached_nobody_is_not_sent_to_the_next_sidecar_once_its_end_is_proven() -> None:
    async def scenario() -> None:
        async with bench(defer_config(), "judge") as at:
            await at.manager.start()
            await at.manager.offload()
            at.manager.serve(rebuild=True)
            link = at.links.nodes["a-0"]
            at.status("judge/replica-0", "exited", generation=1)
            await until(lambda: at.states() == [State.GONE])
            link.identity = b"nobody"
            sent = at.links._send

            async def lost(identity: bytes, body: dict[str, Any]) -> bool:
                return identity != b"nobody" and await sent(identity, body)

            at.links._send = lost
            waking = asyncio.create_task(at.manager.onload())
            await until(lambda: any(each.body["method"] == "start_worker" for each in link.pending.values()))
            at.links.retire(link, "its step ended")
            at.manager.on_node_emptied("a-0", Evidence.STEP_ENDED_WITH_CGROUP, "its step ended")
            assert at.states() == [State.GONE]
            at.manager.abandon("too slow")
            assert all(replica.release_proven for replica in at.manager.replicas)
            at.enter("a-0", "i2")
            await at.links.follow(link, b"a-0/i3")
            with pytest.raises(EngineFailed):
                await waking
            await until(lambda: not link.pending)
            starts = [args["generation"] for args in at.far.actors.methods("start_worker")]
            assert starts == [1], "who has the lease now would meet it on the GPU"

    run(scenario)


def test_every_worker_of_a_wide_replica_ends_before_it_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with bench(wide_config()) as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            order: list[tuple[str, str]] = []
            inner = at.far.actors.answer

            def answer(node: str, body: dict[str, Any]) -> Any:
                order.append((body["method"], node))
                return inner(node, body)

            monkeypatch.setattr(Actors, "answer", lambda self, node, body: answer(node, body))
            at.status("m/replica-0", "exited", rank=1, generation=1)
            await until(lambda: at.manager.complete)
            assert ("stop_worker", "p-0") in order
            assert order.index(("stop_worker", "p-0")) < order.index(("start_worker", "p-0"))

    run(scenario)


def test_without_rebuild_the_end_is_the_end() -> None:
    async def scenario() -> None:
        async with bench(defer_config(), "judge") as at:
            await at.manager.start()
            await at.manager.offload()
            at.manager.serve(rebuild=False)
            at.status("judge/replica-0", "exited", generation=1, detail="exit code 9")
            assert at.states() == [State.GONE]
            assert at.manager.exhausted == "exit code 9"

    run(scenario)


def test_silence_fences_and_a_word_opens_again() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            at.manager.serve(rebuild=True)
            at.manager.on_node_silent("p-0")
            assert [entry.state for entry in at.manager.entry().engines] == [
                ReplicaState.UNKNOWN,
                ReplicaState.UNKNOWN,
                ReplicaState.READY,
                ReplicaState.READY,
            ]
            assert not at.manager.complete
            assert all(not replica.release_proven for replica in at.manager.replicas)
            opened = len(at.far.actors.methods("open_admission"))
            at.manager.on_node_heard("p-0")
            await until(lambda: at.manager.complete)
            assert len(at.far.actors.methods("open_admission")) == opened + 2

    run(scenario)


def test_a_held_guard_is_asked_once_to_open() -> None:
    async def scenario() -> None:
        async with bench() as at:
            await at.manager.start()
            held: list[Callable[[], None]] = []
            at.far.behave = lambda node, body, answer: held.append(answer)
            for _ in range(5):
                at.status(FIRST, "up", generation=1, admission_open=False)
            await asyncio.sleep(0)
            await until(lambda: held)
            assert at.manager.replicas[0].fenced
            assert at.manager._dispatch.in_flight == 1
            held[0]()
            await until(lambda: not at.manager.replicas[0].fenced)

    run(scenario)


def test_an_event_that_cannot_be_is_recorded_and_changes_nothing() -> None:
    async def scenario() -> None:
        async with bench() as at:
            before = at.states()
            at.manager.feed(FIRST, Event(EventKind.ADMISSION_CLOSED, 0))
            assert at.events("ignored")[0]["replica"] == FIRST
            assert at.states() == before

    run(scenario)


def test_waiting_for_a_thousand_replicas_does_not_look_at_all_of_them_each_time() -> None:
    async def scenario() -> None:
        config = config_of(
            pools={"p": {"nodes": 64, "gpus_per_node": 8}},
            roles={"rollout": {"pool": "p", "models": {"m": {"model_path": "x", "gpus": 512}}}},
        )
        async with bench(config) as at:
            looks = 0
            inner = type(at.manager).replicas.fget

            def counted(manager: InferenceManager) -> Any:
                nonlocal looks
                looks += 1
                assert inner is not None
                return inner(manager)

            type(at.manager).replicas = property(counted)  # type: ignore[assignment]
            try:
                await at.manager.start()
            finally:
                type(at.manager).replicas = property(inner)  # type: ignore[assignment,arg-type]
            assert at.states() == [State.READY] * 512
            assert looks <= 4

    run(scenario)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_network_does_everything_comes_up_and_everything_ends(seed: int) -> None:
    """Drops, delays, repeats, refusals and exits, in any order: no fault, no leak, and the end is proven."""

    async def scenario() -> None:
        config = config_of(engine={"program": "sim", "startup_seconds": 5.0, "max_restarts": 1000})
        async with bench(config) as at:
            dice = random.Random(seed)
            await at.manager.start()
            at.manager.serve(rebuild=True)
            loop = asyncio.get_running_loop()

            def behave(node: str, body: dict[str, Any], answer: Callable[[], None]) -> None:
                fate = dice.random()
                if fate < 0.3:
                    return  # lost on the way there
                if fate < 0.6:
                    loop.call_later(dice.random() * 0.03, answer)
                    return
                answer()
                if fate > 0.9:
                    loop.call_later(dice.random() * 0.03, answer)

            at.far.behave = behave
            refused = lambda method, chance: (  # noqa: E731
                lambda args: (
                    bad("exited" if method == "start_worker" else "recovery_required")
                    if dice.random() < chance
                    else at.far.actors.by_default("", method, args)
                )
            )
            at.far.actors.by_method = {
                "start_worker": refused("start_worker", 0.2),
                "open_admission": refused("open_admission", 0.1),
            }
            for _ in range(30):
                replica = dice.choice(at.manager.replicas)
                what = dice.choice(["exited", "failed", "closed", "silent", "heard", "stale", "emptied"])
                if what in ("exited", "failed"):
                    at.status(replica.engine_id, what, generation=replica.generation)
                elif what == "closed":
                    at.status(replica.engine_id, "up", generation=replica.generation)
                elif what == "stale":
                    at.status(replica.engine_id, "exited", generation=replica.generation - 1)
                elif what == "emptied":
                    at.manager.on_node_emptied("p-0", Evidence.CONFIRMED_EXIT, "replaced")
                else:
                    getattr(at.manager, f"on_node_{what}")("p-1")
                at.manager.tick()
                await asyncio.sleep(dice.random() * 0.005)
            at.far.behave = lambda node, body, answer: answer()
            at.far.actors.by_method = {}
            at.manager.on_node_heard("p-1")
            async with asyncio.timeout(5):
                while not at.manager.complete:
                    at.manager.tick()
                    for replica in at.manager.replicas:  # beats: what a sidecar says of a guard that is closed
                        is_open = at.far.actors.admission.get(f"{replica.engine_id}#0", False)
                        at.status(replica.engine_id, "up", generation=replica.generation, admission_open=is_open)
                    await asyncio.sleep(0.005)
            assert sum(at.manager._counts.values()) == 4
            await at.manager.stop("end")
            assert at.states() == [State.GONE] * 4
            assert all(replica.release_proven for replica in at.manager.replicas)
            await until(lambda: at.manager._dispatch.in_flight == 0, 5.0)

    run(scenario)
