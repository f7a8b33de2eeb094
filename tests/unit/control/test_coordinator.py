"""Who is listened to: epochs, attempts, incarnations, addresses, repeated requests, and messages that make no sense."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.lifecycle import walk
from relax_slurm.core.replica_events import Event as ReplicaEvent
from relax_slurm.core.replica_events import EventKind, Evidence
from relax_slurm.core.run import RunState
from relax_slurm.wire.client import ControlClient, RemoteError, SidecarLink
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import Event, PeerKind
from tests.unit.control.stage import EPOCH, Stage, config_of, on_stage, report_of, run, until


async def ready(stage: Stage) -> asyncio.Task[dict[str, Any]]:
    stage.enter_all()
    walking = asyncio.create_task(walk(stage.coordinator))
    await until(lambda: stage.coordinator.run.state is RunState.READY or walking.done())
    assert not walking.done(), walking.result()
    return walking


async def refusal(stage: Stage, kind: str, **fields: Any) -> str:
    """The code with which a message of a strange sidecar is refused."""
    link = SidecarLink(stage.address, credentials(stage.run_dir.keys, PeerKind.SIDECAR))
    try:
        while not await link.send({"kind": kind, **fields}):
            await asyncio.sleep(0.01)
        body = await link.receive()
        assert body["kind"] == "refused", body
        assert body["epoch"] == EPOCH
        return str(body["code"])
    finally:
        link.close()


def hello(stage: Stage, **changes: Any) -> dict[str, Any]:
    report = report_of(stage.plan, "p-0").to_wire()
    return {"node": "p-0", "incarnation": "x", "attempt": 1, "report": report, "workers": []} | changes


def test_strangers_are_refused_by_name(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            assert await refusal(stage, "hello", **hello(stage, node="n9")) == "unknown_node"
            assert await refusal(stage, "hello", **hello(stage, attempt=2)) == "stale_attempt"
            beat = {"node": "p-0", "incarnation": "x", "seq": 1}
            assert await refusal(stage, "beat", **beat, epoch="000000-000000") == "stale_epoch"
            assert await refusal(stage, "beat", **beat, epoch=EPOCH) == "stale_incarnation"
            empty = beat | {"incarnation": ""}
            assert await refusal(stage, "beat", **empty, epoch=EPOCH) == "ill_formed"
            assert await refusal(stage, "get_state", id="1") == "forbidden"
            assert await refusal(stage, "who_knows") == "unknown_kind"
            assert await refusal(stage, "hello", node=3) == "ill_formed"

    run(scenario)


def test_clients_get_error_replies_with_their_id(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            for kind, fields, code in (
                ("hello", {"node": "p-0"}, "ill_formed"),
                ("beat", {"node": "n", "incarnation": "i", "epoch": EPOCH, "seq": 1}, "forbidden"),
                ("no_such_thing", {}, "unknown_kind"),
                ("get_snapshot", {"role": "rollout"}, "unknown_role"),
                ("get_snapshot", {"role": "x" * 200}, "unknown_role"),
                ("step_ended", {"node": "n9", "returncode": 1, "proof": "none"}, "unknown_node"),
                ("gateway_up", {"url": "ftp://x"}, "ill_formed"),
            ):
                with pytest.raises(RemoteError) as caught:
                    await stage.client.request(kind, **fields)
                assert caught.value.remote_code == code, kind
            assert (await stage.client.request("ping"))["epoch"] == EPOCH

    run(scenario)


def test_a_fault_while_a_message_is_handled_is_answered_and_the_loop_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:

            def broken(self: Coordinator, url: str) -> None:
                raise KeyError(url)

            monkeypatch.setattr(Coordinator, "on_gateway", broken)
            with pytest.raises(RemoteError, match="KeyError") as caught:
                await stage.client.request("gateway_up", url="http://h:1")
            assert caught.value.remote_code == "internal"
            assert stage.coordinator.server.counters.faults == 1
            assert not stage.coordinator.fatal.done()
            assert (await stage.client.request("ping"))["state"] == "BOOTING"

    run(scenario)


def test_a_replaced_sidecar_can_never_come_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            old = stage.enter("p-0", "old")
            await until(lambda: old.epoch)
            new = stage.enter("p-0", "new", number=0)
            await until(lambda: new.epoch)
            await until(lambda: old.refused)
            assert {body["code"] for body in old.refused} == {"stale_incarnation"}
            count = len(old.refused)
            await old.hello()  # its second thought must not throw the new one out
            await until(lambda: len(old.refused) > count)
            assert stage.coordinator.links.nodes["p-0"].incarnation == "new"
            assert not new.refused
            await old.close()

    run(scenario)


def test_a_sidecar_whose_step_is_over_is_not_listened_to(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            late = stage.enter("p-0")
            await until(lambda: late.epoch)
            await stage.client.request("step_ended", node="p-0", returncode=0, proof="none")
            await until(lambda: late.refused)
            assert late.refused[0]["code"] == "stale_incarnation"
            link = stage.coordinator.links.nodes["p-0"]
            assert link.identity is None
            assert link.lost

    run(scenario)


def test_commands_find_a_sidecar_after_a_new_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            sidecar = stage.sidecars["p-0"]
            before = stage.coordinator.links.nodes["p-0"].identity
            sidecar.reconnect()
            await until(lambda: stage.coordinator.links.nodes["p-0"].identity != before)
            assert not sidecar.refused
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0
            assert len(stage.actors.methods("stop_worker")) == 4

    run(scenario)


def test_silence_stops_routing_and_a_word_starts_it_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            states = lambda: {  # noqa: E731
                engine["engine_id"]: engine["state"]
                for engine in stage.coordinator.publisher.snapshot("rollout")["models"]["m"]["engines"]
            }
            opened = len(stage.actors.methods("open_admission"))
            stage.sidecars["p-0"].mute = True
            await until(lambda: states()["m/replica-0"] == "UNKNOWN")
            assert states()["m/replica-2"] == "READY"
            assert stage.coordinator.run.state is RunState.DEGRADED or await until(
                lambda: stage.coordinator.run.state is RunState.DEGRADED
            )
            assert stage.actors.methods("stop_worker") == []  # silence is no reason to end anything
            stage.actors.admission["m/replica-0#0"] = stage.actors.admission["m/replica-1#0"] = False
            stage.sidecars["p-0"].mute = False
            await until(lambda: set(states().values()) == {"READY"})
            assert len(stage.actors.methods("open_admission")) == opened + 2
            await until(lambda: stage.coordinator.run.state is RunState.READY)
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_a_guard_that_held_by_itself_is_opened_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path, config_of(control={"beat_seconds": 0.1})) as stage:
            walking = await ready(stage)
            opened = len(stage.actors.methods("open_admission"))
            stage.actors.admission["m/replica-3#0"] = False  # the sidecar had missed its acks
            await until(lambda: stage.actors.admission["m/replica-3#0"])
            assert stage.actors.methods("open_admission")[opened:] == [{"worker_id": "m/replica-3#0", "generation": 1}]
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_an_engine_that_ends_is_built_again_one_generation_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            stage.actors.states["m/replica-1#0"] = "exited"
            engine = lambda: stage.coordinator.publisher.snapshot("rollout")["models"]["m"]["engines"][1]  # noqa: E731
            await until(lambda: engine()["generation"] == 2 and engine()["state"] == "READY")
            await until(lambda: stage.coordinator.run.state is RunState.READY)
            assert await stage.events("given_up") == []
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_a_sidecar_that_is_started_again_gets_its_engines_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            await stage.sidecars["p-0"].close()
            answer = await stage.client.request("step_ended", node="p-0", returncode=-9, proof="none")
            assert answer == {"again": True}
            for worker in ("m/replica-0#0", "m/replica-1#0"):
                del stage.actors.states[worker]
            before = len(stage.actors.seen)
            stage.enter("p-0", "i2", number=5)  # another port block than before
            await until(lambda: stage.actors.states.get("m/replica-1#0") == "up")
            await until(lambda: all(manager.complete for manager in stage.coordinator.managers.values()))
            after = stage.actors.seen[before:]
            # The new sidecar is asked to make sure of the old end, and only then to start.
            ends = [args["generation"] for _, method, args in after if method == "stop_worker"]
            assert set(ends) <= {1}
            order = [method for _, method, _ in after if method in ("start_worker", "stop_worker")]
            assert order == ["stop_worker"] * len(ends) + ["start_worker"] * 2
            first = stage.plan.ports.first + 5 * stage.plan.ports.span
            starts = [args for _, method, args in after if method == "start_worker"]
            assert all(first < args["guard"]["port"] < first + stage.plan.ports.span for args in starts)
            assert {args["generation"] for args in starts} == {2}
            assert (await stage.events("bound_again"))[0]["node"] == "p-0"
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_a_start_that_waits_for_a_sidecar_does_not_come_up_after_it_was_said_to_have_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            manager = next(iter(stage.coordinator.managers.values()))
            await stage.sidecars["p-0"].close()
            ended = ReplicaEvent(EventKind.WORKER_EXITED, 0, evidence=Evidence.CONFIRMED_EXIT, reason="it ended")
            manager.feed("m/replica-0", ended)
            link = stage.coordinator.links.nodes["p-0"]
            await until(lambda: any(each.body["method"] == "start_worker" for each in link.pending.values()))
            stage.actors.states.clear()  # its successor has swept, so that it has nothing to name
            before = len(stage.actors.seen)
            stage.enter("p-0", "i2", number=5)
            await until(lambda: manager.complete and stage.actors.states.get("m/replica-0#0") == "up")
            starts = [args for _, method, args in stage.actors.seen[before:] if method == "start_worker"]
            of_first = [args["guard"]["generation"] for args in starts if args["worker_id"] == "m/replica-0#0"]
            assert of_first == [3], "the second one was never started, and that is proven"
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_proof_from_the_step_does_not_end_the_successor(tmp_path: Path) -> None:
    """Under cgroups the end is proven before the new sidecar comes; what is started on that one must stay."""

    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            await stage.sidecars["p-0"].close()
            await stage.client.request("step_ended", node="p-0", returncode=-9, proof="cgroup")
            for worker in ("m/replica-0#0", "m/replica-1#0"):
                del stage.actors.states[worker]
            await until(lambda: stage.coordinator.run.state is RunState.DEGRADED)
            stage.enter("p-0", "i2")
            await until(lambda: stage.coordinator.run.state is RunState.READY)
            replicas = (await stage.client.request("get_state"))["replicas"]
            assert [replica["generation"] for replica in replicas] == [2, 2, 1, 1]
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)


def test_a_sidecar_that_comes_back_with_other_gpus_is_sent_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            await stage.sidecars["p-0"].close()
            await stage.client.request("step_ended", node="p-0", returncode=-9, proof="none")
            for worker in ("m/replica-0#0", "m/replica-1#0"):
                del stage.actors.states[worker]
            wrong = stage.enter("p-0", "i2", gpus=(0,))
            await until(lambda: wrong.refused)
            assert wrong.refused[0]["code"] == "not_as_bound"
            assert "p-0" in wrong.refused[0]["message"]
            assert stage.coordinator.links.nodes["p-0"].identity is None
            await stage.client.request("step_ended", node="p-0", returncode=0, proof="none", final=True)
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 9  # nothing proved the end of what ran there

    run(scenario)


def test_a_request_that_is_asked_again_is_done_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            await stage.sidecars["p-0"].close()
            fields = {"node": "p-0", "returncode": 1, "proof": "none"}
            first = await stage.client.request("step_ended", operation_id="same", **fields)
            stage.enter("p-0", "i2")
            await until(lambda: stage.coordinator.links.nodes["p-0"].incarnation == "i2")
            again = await stage.client.request("step_ended", operation_id="same", **fields)
            assert first == again == {"again": True}
            assert stage.coordinator.links.nodes["p-0"].incarnation == "i2"
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_the_gateways_address_is_written_down_for_everybody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            await stage.client.request("gateway_up", url="http://10.0.0.1:29999")
            endpoint = stage.run_dir.read("endpoint.json")
            assert endpoint is not None
            assert endpoint["gateway_url"] == "http://10.0.0.1:29999"
            assert (await stage.client.request("get_state"))["gateway_url"] == "http://10.0.0.1:29999"

    run(scenario)


def test_statuses_that_nobody_planned_change_nothing_and_do_not_pile_up(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            sidecar = stage.sidecars["p-0"]
            for number in range(50):
                strange = {"worker_id": f"who/{number}#x", "state": "exited"}
                elsewhere = {"worker_id": "m/replica-3#0", "state": "exited"}
                await sidecar.say("beat", seq=number, workers=[strange, elsewhere])
            await until(
                lambda: list(stage.coordinator.links.nodes["p-0"].workers) == ["m/replica-0#0", "m/replica-1#0"]
            )
            assert stage.coordinator.run.state is RunState.READY
            await stage.client.request("stop")
            await walking

    run(scenario)


def test_an_event_counts_like_a_beat(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            walking = await ready(stage)
            worker = {"worker_id": "m/replica-0#0", "state": "exited", "generation": 1, "detail": "exit code 1"}
            stage.actors.states["m/replica-0#0"] = "exited"
            await stage.sidecars["p-0"].say("event", worker=worker, event="exited", detail="")
            await until(lambda: len(stage.actors.methods("start_worker")) == 5)
            assert (await stage.events("worker"))[0]["what"] == "exited"
            await until(lambda: stage.coordinator.run.state is RunState.READY)
            await stage.client.request("stop")
            assert (await walking)["exit_code"] == 0

    run(scenario)
    assert Event.model_fields["worker"]


def test_a_peer_of_another_run_gets_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path / "one") as stage, on_stage(tmp_path / "other") as other:
            stranger = ControlClient(
                stage.address, credentials(other.run_dir.keys, PeerKind.CLIENT), attempt_seconds=0.3
            )
            with pytest.raises(Exception, match="no answer"):
                await stranger.request("get_state", timeout_seconds=0.3)
            stranger.close()

    run(scenario)


def test_an_id_that_comes_again_with_another_request_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with on_stage(tmp_path) as stage:
            first = await stage.client.request("gateway_up", operation_id="one", url="http://127.0.0.1:1")
            again = await stage.client.request("gateway_up", operation_id="one", url="http://127.0.0.1:1")
            assert first == again
            with pytest.raises(RemoteError, match="id one was gateway_up") as caught:
                await stage.client.request("get_state", operation_id="one")
            assert caught.value.remote_code == "id_reused"
            with pytest.raises(RemoteError):
                await stage.client.request("gateway_up", operation_id="one", url="http://127.0.0.1:2")

    run(scenario)
