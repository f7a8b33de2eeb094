"""The supervisor with its real children on virtual nodes: what it restarts, what it reports, what it takes down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.config.load import from_mapping
from relax_slurm.config.models import RunConfig
from relax_slurm.control import restarts as restarts_module
from relax_slurm.control.allocation import FILE
from relax_slurm.control.backends import BackendKind
from relax_slurm.control.local import _tied_to
from relax_slurm.control.prepare import prepare
from relax_slurm.control.restarts import Restarts
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.supervisor import attempt_of
from relax_slurm.wire.client import ControlClient
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind
from tests.harness.wait import until
from tests.unit.control.stage import config_of, plan_of

SLOT = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 4
WINDOW = {"first": 10_000 + SLOT * 2500, "last": 10_000 + SLOT * 2500 + 2499}


def small(**changes: Any) -> RunConfig:
    model = {"model_path": "x", "gpus": 1}
    base = {
        "pools": {"p": {"nodes": 1, "gpus_per_node": 1}},
        "roles": {"rollout": {"pool": "p", "models": {"m": model}}},
        "ports": WINDOW,
        "control": {"drain_seconds": 0.5, "operation_seconds": 20.0},
        "engine": {"program": "sim", "startup_seconds": 20.0, "sim": {"startup_seconds": 0.0}},
    }
    return config_of(**(base | changes))


class Run:
    """A supervisor's process and its run directory."""

    def __init__(self, root: Path, config: RunConfig) -> None:
        self.run_dir, submission = prepare(root, config, plan_of(config), BackendKind.LOCAL)
        with (self.run_dir.logs / "head_supervisor.log").open("ab") as log:
            self.process = subprocess.Popen(submission.command, stdout=log, stderr=log, start_new_session=True)

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        endpoint = self.run_dir.read("endpoint.json")
        assert endpoint is not None

        async def once() -> dict[str, Any]:
            async with ControlClient(endpoint["control"], credentials(self.run_dir.keys, PeerKind.CLIENT)) as client:
                return await client.request(kind, **fields)

        return asyncio.run(once())

    def ready(self) -> None:
        def up() -> bool:
            endpoint = self.run_dir.read("endpoint.json")
            return bool(endpoint and endpoint.get("gateway_url")) and self.ask("ping")["state"] == "READY"

        until(up, 40, self.said)

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.run_dir.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def child(self, *words: str) -> int:
        """Pid of the child of this supervisor whose command line has these words."""
        for pid in _tied_to(self.process.pid):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if all(word in line for word in words):
                return pid
        return 0

    def said(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in self.run_dir.logs.glob("*.log"))

    def outcome(self) -> dict[str, Any]:
        outcome = self.run_dir.read("outcome.json")
        assert outcome is not None, self.said()
        return outcome


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        if run.process.poll() is None:
            run.process.kill()
            run.process.wait()
        for pid in _tied_to(run.process.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_signal_ends_everything_in_order(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, small())
    runs.append(run)
    run.ready()
    run.process.send_signal(signal.SIGUSR2)
    assert run.process.wait(40) == 0
    outcome = run.outcome()
    assert (outcome["state"], outcome["reason"], outcome["unproven"]) == ("STOPPED", "signal SIGUSR2", [])
    assert _tied_to(run.process.pid) == []
    assert [event["code"] for event in run.events("step_over")] == [0]  # left by itself, nobody had to insist


@pytest.mark.parametrize("when", ["allocation.json", "coordinator.lock", "endpoint.json"])
def test_a_stop_that_comes_before_anything_is_up_is_no_failure(tmp_path: Path, runs: list[Run], when: str) -> None:
    run = Run(tmp_path, small())
    runs.append(run)
    until((run.run_dir.path / when).exists, 20, run.said)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(40) == 0
    assert (run.outcome()["state"], run.outcome()["exit_code"]) == ("STOPPED", 0)
    assert _tied_to(run.process.pid) == []


def test_a_killed_supervisor_is_no_good_end(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, small())
    runs.append(run)
    run.ready()
    run.process.kill()
    run.process.wait()
    until(lambda: run.run_dir.read("outcome.json") is not None and not _tied_to(run.process.pid), 40, run.said)
    assert (run.outcome()["state"], run.outcome()["exit_code"]) == ("FAILED", 7)
    assert "the supervisor ended" in run.outcome()["error"]["message"]


def test_gateway_and_sidecar_come_back(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, small())
    runs.append(run)
    run.ready()
    before = run.run_dir.read("endpoint.json")
    os.kill(run.child("gateway_process"), signal.SIGKILL)
    os.kill(run.child("sidecars.node"), signal.SIGKILL)
    until(lambda: len(run.events("gateway_up")) >= 2 or run.child("gateway_process"), 20, run.said)
    until(
        lambda: (state := run.ask("get_state"))["state"] == "READY" and state["replicas"][0]["generation"] == 2,
        40,
        run.said,
    )
    assert before is not None
    assert run.ask("get_state")["gateway_url"] == before["gateway_url"]
    run.ask("stop", reason="enough")
    assert run.process.wait(40) == 0


def test_an_absent_node_is_a_binding_mismatch(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, small(local={"absent": ["p-0"]}))
    runs.append(run)
    assert run.process.wait(40) == 5
    assert run.outcome()["error"]["detail"]["rows"][0]["node"] == "p-0"
    assert run.events("step_ended")[0]["again"] is False


def test_a_coordinator_that_dies_leaves_an_outcome_and_no_process(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, small())
    runs.append(run)
    run.ready()
    os.kill(run.child("control.head"), signal.SIGKILL)
    assert run.process.wait(60) == 6
    assert "code -9" in run.outcome()["error"]["message"]
    assert _tied_to(run.process.pid) == []


def test_a_coordinator_that_hangs_is_ended(tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import sys; from relax_slurm.control import supervisor as s\n"
        "s.STOP_SECONDS, s.GRACE_SECONDS = 0.5, 3.0\n"
        "sys.exit(s.main(sys.argv[1:]))\n"
    )
    config = small()
    run = Run.__new__(Run)
    run.run_dir, submission = prepare(tmp_path, config, plan_of(config), BackendKind.LOCAL)
    with (run.run_dir.logs / "head_supervisor.log").open("ab") as log:
        run.process = subprocess.Popen(
            [sys.executable, "-c", program, *submission.command[3:]], stdout=log, stderr=log, start_new_session=True
        )
    runs.append(run)
    run.ready()
    os.kill(run.child("control.head"), signal.SIGSTOP)
    run.process.send_signal(signal.SIGTERM)
    assert run.process.wait(60) == 6
    assert _tied_to(run.process.pid) == []


def test_a_gateway_port_that_is_taken_fails_the_run_before_anything_starts(tmp_path: Path, runs: list[Run]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = _supervised(tmp_path, small(gateway={"port": taken.getsockname()[1]}))
        runs.append(run)
        assert run.process.wait(60) == 6
    assert "the gateway found no port" in run.outcome()["error"]["message"]
    assert run.events("hello") == []


def test_a_gateway_that_keeps_dying_fails_the_run(tmp_path: Path, runs: list[Run]) -> None:
    run = _supervised(tmp_path, small(), lambda run_dir: run_dir.token_file.unlink())
    runs.append(run)
    assert run.process.wait(60) in (6, 7)
    assert "the gateway ended 2 times with code 1" in run.outcome()["error"]["message"]
    assert _tied_to(run.process.pid) == []


def _supervised(tmp_path: Path, config: RunConfig, before: Callable[[RunDir], object] = lambda _: None) -> Run:
    """A supervisor of its own process that starts a gateway twice at most; `before` may spoil the run directory."""
    program = (
        "import sys; from relax_slurm.control import supervisor as s\n"
        "s.GATEWAY_RESTARTS = 1\n"
        "sys.exit(s.main(sys.argv[1:]))\n"
    )
    run = Run.__new__(Run)
    run.run_dir, submission = prepare(tmp_path, config, plan_of(config), BackendKind.LOCAL)
    before(run.run_dir)
    with (run.run_dir.logs / "head_supervisor.log").open("ab") as log:
        run.process = subprocess.Popen(
            [sys.executable, "-c", program, *submission.command[3:]], stdout=log, stderr=log, start_new_session=True
        )
    return run


# --- small pieces ---------------------------------------------------------------------------------------------------


def test_restarts_are_counted_paused_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], []
    monkeypatch.setattr(restarts_module.time, "monotonic", lambda: now[0])

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(restarts_module.asyncio, "sleep", sleep)

    async def scenario() -> None:
        restarts = Restarts(3)
        for _ in range(3):
            assert not restarts.last
            await restarts.again()
        assert restarts.last
        assert slept == [0.2, 0.4]
        now[0] += restarts_module.SETTLED_SECONDS
        assert not restarts.last
        await restarts.again()
        assert slept == [0.2, 0.4]
        assert not restarts.last
        assert Restarts(0).last

    asyncio.run(scenario())


def test_a_job_that_is_started_again_gets_a_new_attempt_once_the_first_was_used(tmp_path: Path) -> None:
    config = from_mapping(json.loads(small().resolved_json()))
    run_dir, _ = prepare(tmp_path, config, plan_of(config), BackendKind.SLURM)
    assert attempt_of(run_dir, {}) == run_dir
    assert attempt_of(run_dir, {"SLURM_RESTART_COUNT": "1"}) == run_dir  # borrowed: the job's restart is not ours
    run_dir.write_json(FILE, {})
    assert attempt_of(run_dir, {"SLURM_RESTART_COUNT": "0"}) == run_dir
    again = attempt_of(run_dir, {"SLURM_RESTART_COUNT": "1"})
    assert again.attempt == 2
    assert not (again.path / FILE).exists()
    assert RunDir((tmp_path / "r" / "latest").resolve()) == again
    assert (again.path / "plan.json").read_text() == (run_dir.path / "plan.json").read_text()
    assert time.time() - (again.path / "plan.json").stat().st_mtime < 60
