"""The node daemon: against a head node that a test plays over real sockets, with stub workers and with real engines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from relax_slurm.control.run_dir import RunDir
from relax_slurm.core.placement_json import to_json
from relax_slurm.errors import RecoveryRequired
from relax_slurm.wire.client import SidecarLink
from relax_slurm.wire.keys import allowed, credentials, read_pair
from relax_slurm.wire.messages import PeerKind, WorkerState
from relax_slurm.wire.server import ControlServer
from sidecars import daemon as daemon_module
from sidecars import proc
from sidecars.daemon import NodeDaemon
from sidecars.hosted import HostSettings
from tests.contract.engine_program import worker
from tests.unit.control.stage import config_of, plan_of, run_dir_of

EPOCH, LATER, EARLIER = "000002-aaaaaa", "000003-000000", "000001-ffffff"


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


class Head:
    """The head node: hears everything, answers what the test wants."""

    def __init__(self, run_dir: RunDir, ports: tuple[int, int] = (0, 0), epoch: str = EPOCH) -> None:
        self.run_dir, self.epoch = run_dir, epoch
        self.server = ControlServer(read_pair(run_dir.keys, PeerKind.COORDINATOR), allowed(run_dir.keys))
        self.ports = self.server.bind("127.0.0.1", ports)
        self.heard: list[dict[str, Any]] = []
        self.identity = b""
        self.welcoming = self.acking = True
        self.silence_seconds = 5.0
        self._task = asyncio.create_task(self._receive())

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [body for body in self.heard if body["kind"] == kind and all(body[key] == fields[key] for key in fields)]

    async def wait(self, kind: str, count: int = 1, seconds: float = 15.0, **fields: Any) -> dict[str, Any]:
        """The `count`-th message of a kind."""
        async with asyncio.timeout(seconds):
            while len(found := self.of(kind, **fields)) < count:
                await asyncio.sleep(0.005)
        return found[count - 1]

    async def send(self, kind: str, **fields: Any) -> None:
        await self.server.send(self.identity, {"kind": kind, "epoch": self.epoch} | fields)

    async def command(self, operation: str, method: str, args: Mapping[str, Any] | None = None, **more: Any) -> None:
        await self.send("command", id=operation, method=method, args=dict(args or {}), **more)

    async def ask(self, operation: str, method: str, args: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A command and its result."""
        await self.command(operation, method, args)
        return await self.wait("result", id=operation)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.server.aclose()

    async def _receive(self) -> None:
        while True:
            incoming = await self.server.receive()
            self.identity = incoming.identity
            body = incoming.body
            self.heard.append(body)
            if body["kind"] == "hello" and self.welcoming:
                await self.send("welcome", beat_seconds=0.05, silence_seconds=self.silence_seconds)
            elif body["kind"] == "beat" and self.acking:
                await self.send("beat_ack", seq=body["seq"])


class Stub:
    """A worker without an engine."""

    made: ClassVar[list[Stub]] = []

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.worker_id, self.generation = args["worker_id"], args["generation"]
        self.state = WorkerState.STARTING
        self.is_open = False
        self.held: list[str] = []
        self.calls: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.unconfirmed = False
        Stub.made.append(self)

    @classmethod
    def from_args(cls, args: Mapping[str, Any], settings: HostSettings, tell: Any) -> Stub:
        return cls(args)

    def status(self) -> dict[str, Any]:
        return {
            "worker_id": self.worker_id,
            "generation": self.generation,
            "state": str(self.state),
            "admission_open": self.is_open,
        }

    async def look_at_memory(self) -> None:
        self.calls.append("measured")

    async def start(self) -> dict[str, Any]:
        self.calls.append("start")
        await self.gate.wait()
        self.state = WorkerState.UP
        return {"base_url": "http://h:1", "pid": 1}

    async def stop(self, drain_seconds: float) -> None:
        self.calls.append(f"stop {drain_seconds:g}")
        self.gate.set()
        if self.unconfirmed:
            raise RecoveryRequired("pid 7 survives")
        self.state = WorkerState.EXITED

    def open_admission(self) -> dict[str, Any]:
        self.is_open = True
        return {}

    async def close_admission(self, drain_seconds: float) -> dict[str, Any]:
        self.is_open = False
        return {"drained": 0, "cancelled": 0}

    async def offload(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return {"deadline": args["deadline_seconds"]}

    def hold(self, reason: str) -> None:
        self.held.append(reason)
        self.is_open = False


@asynccontextmanager
async def daemon_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[tuple[Head, NodeDaemon, asyncio.Task[None]]]:
    """A daemon with stub workers in this process, and its head node."""
    Stub.made = []
    monkeypatch.setattr(daemon_module, "HostedWorker", Stub)
    run_dir = run_dir_of(tmp_path)
    head = Head(run_dir, **options)
    link = SidecarLink(head.address, credentials(run_dir.keys, PeerKind.SIDECAR))
    settings = HostSettings(f"node-{os.getpid()}-{tmp_path.name}", "n1", tmp_path, tmp_path, "key", None)  # type: ignore[arg-type]
    daemon = NodeDaemon("n1", 1, {"node": "n1"}, link, settings)
    task = asyncio.create_task(daemon.run())
    try:
        yield head, daemon, task
    finally:
        daemon.leaving.set()
        await asyncio.gather(task, return_exceptions=True)
        link.close()
        await head.close()


def args_of(worker_id: str = "m/replica-0#0", generation: int = 1, **more: Any) -> dict[str, Any]:
    return {"worker_id": worker_id, "generation": generation} | more


def test_hello_welcome_beat_command_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            hello = await head.wait("hello")
            assert (hello["node"], hello["attempt"], hello["workers"]) == ("n1", 1, [])
            first = await head.wait("beat")
            assert first["epoch"] == EPOCH
            assert (await head.wait("beat", 2))["seq"] > first["seq"]
            assert await head.ask("1", "start_worker", args_of()) == {
                "kind": "result", "node": "n1", "incarnation": daemon.incarnation, "epoch": EPOCH,
                "id": "1", "ok": True, "value": {"base_url": "http://h:1", "pid": 1},
            }  # fmt: skip
            after = head.heard[head.heard.index(head.of("result")[0]) :]
            async with asyncio.timeout(5):
                while len(after) < 2:
                    await asyncio.sleep(0.005)
                    after = head.heard[head.heard.index(head.of("result")[0]) :]
            assert after[1]["kind"] == "beat"
            assert after[1]["workers"][0]["state"] == "up"

    run(scenario)


def test_a_beat_follows_every_result_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            await head.wait("beat")
            daemon._beat_seconds = 60.0
            await asyncio.sleep(0.1)
            await head.ask("1", "start_worker", args_of())
            await head.ask("2", "open_admission", args_of())
            async with asyncio.timeout(2):
                while not (head.heard[-1]["kind"] == "beat" and head.heard[-1]["workers"]):
                    await asyncio.sleep(0.005)
            assert head.heard[-1]["workers"][0]["admission_open"]
            assert "measured" in Stub.made[0].calls

    run(scenario)


def test_a_command_that_comes_again_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, _):
            await head.wait("beat")
            for _ in range(3):
                await head.command("1", "start_worker", args_of())
            third = await head.wait("result", 3, id="1")
            assert third == head.of("result")[0]
            assert len(Stub.made) == 1
            again = await head.ask("1b", "open_admission", args_of())
            assert again["ok"]
            await head.command("1b", "close_admission", args_of())
            reused = await head.wait("result", 2, id="1b")
            assert reused["error"]["code"] == "id_reused"
            assert Stub.made[0].is_open

    run(scenario)


@pytest.mark.parametrize(
    ("method", "args", "code"),
    [
        ("open_admission", args_of("who#0"), "protocol"),
        ("dance", args_of(), "protocol"),
        ("offload", args_of(), "internal"),  # its deadline is missing
        ("close_admission", args_of(drain_seconds="soon"), "internal"),
        ("start_worker", {"worker_id": "x#0", "generation": "new"}, "internal"),
        ("offload", args_of(generation=7, deadline_seconds=1.0), "stale_generation"),
        ("start_worker", args_of(generation=1), "stale_generation"),
    ],
)
def test_every_command_gets_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, args: dict[str, Any], code: str
) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, _):
            await head.wait("beat")
            assert (await head.ask("0", "start_worker", args_of()))["ok"]
            answer = await head.ask("1", method, args)
            assert not answer["ok"]
            assert answer["error"]["code"] == code
            assert (await head.ask("2", "offload", args_of(deadline_seconds=2.0)))["value"] == {"deadline": 2.0}

    run(scenario)


def test_a_stop_overtakes_a_start_and_a_later_start_of_the_same_generation_never_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, _):
            await head.wait("beat")
            assert (await head.ask("0", "start_worker", args_of()))["ok"]
            first = Stub.made[0]
            first.gate.clear()
            monkeypatch.setattr(first, "offload", lambda args: first.gate.wait())
            await head.command("1", "offload", args_of(deadline_seconds=1.0))
            await head.command("2", "start_worker", args_of(generation=2))  # waits for the offload
            answer = await head.ask("3", "stop_worker", args_of(generation=2, drain_seconds=0.5))
            assert answer["ok"]
            assert first.calls.count("stop 0.5") == 1
            overtaken = await head.wait("result", id="2")
            assert overtaken["error"]["code"] == "stale_generation"
            assert len(Stub.made) == 1
            assert (await head.ask("4", "start_worker", args_of(generation=3)))["ok"]

    run(scenario)


def test_a_stop_that_is_late_does_not_end_the_successor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of(generation=1))
            await head.ask("2", "stop_worker", args_of(generation=1))
            await head.ask("3", "start_worker", args_of(generation=2))
            assert (await head.ask("4", "stop_worker", args_of(generation=1)))["ok"]
            assert daemon.workers["m/replica-0#0"].state is WorkerState.UP

    run(scenario)


def test_a_restart_ends_the_predecessor_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, _):
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of(generation=1))
            await head.ask("2", "start_worker", args_of(generation=2))
            assert "stop 0" in Stub.made[0].calls
            assert Stub.made[1].state is WorkerState.UP

    run(scenario)


def test_silence_holds_every_door_until_there_is_a_welcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            head.silence_seconds = 0.4
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of())
            await head.ask("2", "open_admission", args_of())
            head.acking = head.welcoming = False
            hellos = len(head.of("hello"))
            async with asyncio.timeout(3):
                while not Stub.made[0].held:
                    await asyncio.sleep(0.005)
            assert not Stub.made[0].is_open
            assert Stub.made[0].state is WorkerState.UP  # what runs goes on
            hello = await head.wait("hello", hellos + 1)
            assert hello["workers"][0]["admission_open"] is False
            beats = len(head.of("beat"))
            await asyncio.sleep(0.2)
            assert len(head.of("beat")) == beats
            head.acking = head.welcoming = True
            await head.wait("beat", beats + 1)
            assert not daemon.leaving.is_set()
            await head.ask("3", "open_admission", args_of())
            assert Stub.made[0].is_open

    run(scenario)


def test_another_coordinator_is_greeted_and_an_old_one_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of())
            # One that was replaced: neither its commands nor its refusals count.
            await head.command("2", "stop_worker", args_of(), epoch=EARLIER)
            await head.send("refused", code="stale_incarnation", message="go", epoch=EARLIER)
            await head.send("refused", code="stale_incarnation", message="go", epoch="")
            await asyncio.sleep(0.1)
            assert Stub.made[0].state is WorkerState.UP
            assert not daemon.leaving.is_set()
            # A newer one, which does not know us yet: hello first, then commands.
            hellos = len(head.of("hello"))
            head.epoch = LATER
            await head.command("3", "stop_worker", args_of())
            hello = await head.wait("hello", hellos + 1)
            assert [status["worker_id"] for status in hello["workers"]] == ["m/replica-0#0"]
            await head.wait("beat", epoch=LATER)
            assert not head.of("result", id="3")
            assert daemon.epoch == LATER
            assert (await head.ask("4", "open_admission", args_of()))["epoch"] == LATER

    run(scenario)


def test_a_stale_epoch_means_hello_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, _):
            await head.wait("beat")
            hellos = len(head.of("hello"))
            head.epoch = LATER
            await head.send("refused", code="stale_epoch", message="another one")
            await head.wait("hello", hellos + 1)
            await head.wait("beat", epoch=LATER)

    run(scenario)


@pytest.mark.parametrize("code", ["stale_incarnation", "stale_attempt", "unknown_node", "not_as_bound"])
def test_who_is_not_wanted_leaves_with_its_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, task):
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of())
            await head.send("refused", code=code, message="somebody else is here")
            async with asyncio.timeout(5):
                await task
            assert Stub.made[0].state is WorkerState.EXITED
            async with asyncio.timeout(5):  # the last word is the proof
                while head.of("beat")[-1]["workers"][0]["state"] != "exited":
                    await asyncio.sleep(0.005)

    run(scenario)


@pytest.mark.parametrize("code", ["ill_formed", "forbidden", "internal", "unknown_kind"])
def test_other_refusals_are_no_reason_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            await head.wait("beat")
            await head.send("refused", code=code, message="?")
            for frames in ([b"", b"RLX1", b"\xc1"], [b"x"]):
                await head.server._control.send_multipart([head.identity, *frames])  # type: ignore[union-attr]
            await head.send("no_such_kind")
            beats = len(head.of("beat"))
            await head.wait("beat", beats + 3)
            assert not daemon.leaving.is_set()
            assert len(head.of("hello")) == 1

    run(scenario)


def test_shutdown_ends_everything_says_what_is_in_doubt_and_starts_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, _, task):
            await head.wait("beat")
            for number in (0, 1):
                await head.ask(f"s{number}", "start_worker", args_of(f"m/replica-{number}#0"))
            Stub.made[1].unconfirmed = True
            await head.command("end", "shutdown")
            await head.command("late", "start_worker", args_of("m/replica-2#0"))
            answer = await head.wait("result", id="end")
            assert answer["value"] == {"unconfirmed": ["m/replica-1#0"]}
            async with asyncio.timeout(5):
                await task
            assert len(Stub.made) == 2

    run(scenario)


def test_a_loop_that_fails_takes_the_sidecar_and_its_engines_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, task):
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of())
            monkeypatch.setattr(daemon, "_statuses", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(asyncio.shield(task), 5)
            assert Stub.made[0].state is WorkerState.EXITED

    run(scenario)


def test_a_link_that_is_cut_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head node that is away for a moment and comes back as another one on the same port."""

    async def scenario() -> None:
        async with daemon_of(tmp_path, monkeypatch) as (head, daemon, _):
            await head.wait("beat")
            await head.ask("1", "start_worker", args_of())
            await head.close()
            await asyncio.sleep(0.5)
            again = Head(head.run_dir, head.ports, LATER)
            try:
                beat = await again.wait("beat")
                # What was said while nobody was there is not said now: it would only be refused.
                await again.send("refused", code="stale_epoch", message="say hello")
                hello = await again.wait("hello")
                assert hello["workers"][0]["worker_id"] == "m/replica-0#0"
                assert beat["seq"] >= daemon._sequence - 5 - len(again.of("beat"))
                await again.wait("beat", epoch=LATER)
            finally:
                await again.close()

    run(scenario)


# --- the real thing -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def process_of(tmp_path: Path, **env: str) -> AsyncIterator[tuple[Head, subprocess.Popen[bytes]]]:
    """`python -m sidecars.node` as a virtual node with two GPUs."""
    config = config_of(ports={"first": 23000 + os.getpid() % 40 * 150, "last": 23000 + os.getpid() % 40 * 150 + 2999})
    plan = plan_of(config)
    run_dir = run_dir_of(tmp_path)
    run_dir.write_secret(run_dir.engine_key_file)
    head = Head(run_dir)
    run_dir.write_json("endpoint.json", {"epoch": EPOCH, "control": head.address})
    prepare(run_dir, to_json(plan))
    log = open(run_dir.logs / "n1_sidecar.log", "wb")  # noqa: ASYNC230, SIM115
    child = subprocess.Popen(  # noqa: ASYNC220
        [
            *(sys.executable, "-m", "sidecars.node", "--run-dir", str(run_dir.path), "--node", "p-0"),
            *("--virtual", json.dumps({"name": "p-0", "gpus": [0, 1]})),
        ],
        env=os.environ | {"RELAX_RUN_TAG": run_dir.tag} | env,
        stdout=log,
        stderr=log,
    )
    try:
        yield head, child
    finally:
        child.kill()
        child.wait()
        log.close()
        await head.close()


def prepare(run_dir: RunDir, plan: str) -> None:
    (run_dir.path / "plan.json").write_text(plan)


def start_args(tmp_path: Path, generation: int = 1, **changes: Any) -> dict[str, Any]:
    spec = worker(tmp_path, **changes).to_wire()
    port = spec["ports"]["bootstrap"]
    guard = {"host": "127.0.0.1", "port": port, "generation": generation}
    return {"worker_id": spec["worker_id"], "generation": generation, "spec": spec, "guard": guard}


async def ended(child: subprocess.Popen[bytes], seconds: float = 20.0) -> int:
    async with asyncio.timeout(seconds):
        while child.poll() is None:
            await asyncio.sleep(0.02)
    return int(child.returncode)


def test_a_real_node_reports_and_ends_its_engines_on_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with process_of(tmp_path) as (head, child):
            hello = await head.wait("hello")
            assert hello["node"] == "p-0"
            assert hello["report"]["virtual_gpus"] == [0, 1]
            assert hello["report"]["port_block"]["start"] >= 20000
            answer = await head.ask("1", "start_worker", start_args(tmp_path))
            assert answer["ok"], answer
            engine = answer["value"]["pid"]
            async with asyncio.timeout(10):
                while not any(body["workers"] and body["workers"][0]["memory_bytes"] for body in head.of("beat")):
                    await asyncio.sleep(0.02)
            child.send_signal(signal.SIGTERM)
            assert await ended(child) == 0
            assert proc.info(engine) is None
            last = head.of("beat")[-1]["workers"][0]
            assert (last["state"], last["generation"]) == ("exited", 1)

    run(scenario)


def test_a_real_engine_ends_with_its_killed_sidecar_and_the_next_one_sweeps(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with process_of(tmp_path) as (head, child):
            await head.wait("hello")
            answer = await head.ask("1", "start_worker", start_args(tmp_path))
            engine = answer["value"]["pid"]
            os.kill(engine, signal.SIGSTOP)  # not even able to notice its parent's death by itself
            child.kill()
            await ended(child)
            async with asyncio.timeout(10):
                while proc.info(engine) is not None:
                    await asyncio.sleep(0.02)

    run(scenario)


def test_a_node_that_cannot_start_says_why_and_goes(tmp_path: Path) -> None:
    run_dir = run_dir_of(tmp_path)
    (run_dir.path / "endpoint.json").write_text(json.dumps({"epoch": EPOCH, "control": "tcp://127.0.0.1:1"}))
    argv = [sys.executable, "-m", "sidecars.node", "--run-dir", str(run_dir.path)]
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(argv, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert "plan.json" in done.stderr
    assert "Traceback" not in done.stderr
    (run_dir.path / "plan.json").write_text(to_json(plan_of(config_of())))
    done = subprocess.run(argv, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert "SLURMD_NODENAME is not set" in done.stderr
