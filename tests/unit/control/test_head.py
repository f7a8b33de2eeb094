"""The coordinator's process: ports, one at a time, an outcome whatever happens, signals."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control import head, logs
from relax_slurm.control.allocation import FILE
from relax_slurm.control.head import failed_outcome
from relax_slurm.control.head_ports import head_ports
from relax_slurm.control.managers import Managers
from relax_slurm.control.run_dir import RunDir, write_atomically
from relax_slurm.control.worker_args import worker_args
from relax_slurm.core.binding import bind
from relax_slurm.core.placement_json import to_json
from relax_slurm.core.weights import Weights
from relax_slurm.errors import BindingMismatch
from relax_slurm.wire.client import ControlClient
from relax_slurm.wire.host import allow_many_files
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind, WorkerStatus
from sidecars.worker import WorkerSpec
from tests.harness.wait import until
from tests.unit.control.stage import FAST, allocation_of, config_of, plan_of, report_of, run_dir_of, wide_config

FIRST = 21_000 + os.getpid() % 50 * 150


def attempt(tmp_path: Path, **changes: Any) -> RunDir:
    # No sidecar ever comes here; how long the coordinator waits for one must not decide a test.
    times = {"control": FAST | {"bind_seconds": 300.0}}
    config = config_of(ports={"first": FIRST, "last": FIRST + 2999}, **(times | changes))
    plan = plan_of(config)
    run_dir = run_dir_of(tmp_path)
    write_atomically(run_dir.path / "config.json", config.resolved_json())
    write_atomically(run_dir.path / "plan.json", to_json(plan))
    run_dir.write_json(FILE, allocation_of(plan).model_dump(mode="json"))
    return run_dir


def start(run_dir: RunDir) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "relax_slurm.control.head", "--run-dir", str(run_dir.path)]
    with (run_dir.logs / "head.log").open("ab") as log:
        return subprocess.Popen(argv, stdout=log, stderr=log)


def test_ports_of_an_earlier_start_come_first_then_the_far_end_of_the_window() -> None:
    assert head_ports(100, 1000, [7, 8])[:4] == [7, 8, 1000, 999]
    assert len(head_ports(100, 1000)) == 64
    assert head_ports(100, 103) == [103, 102, 101]


def test_a_signal_is_an_orderly_end_and_a_second_coordinator_leaves_no_trace(tmp_path: Path) -> None:
    run_dir = attempt(tmp_path)
    first = start(run_dir)
    try:
        endpoint = until(lambda: run_dir.read("endpoint.json"), 20, "no endpoint")
        assert endpoint is not None
        assert endpoint["protocol"] == "RLX1"
        assert FIRST < endpoint["control_port"] <= FIRST + 2999

        async def ping() -> dict[str, Any]:
            async with ControlClient(endpoint["control"], credentials(run_dir.keys, PeerKind.CLIENT)) as client:
                return await client.request("ping")

        assert asyncio.run(ping()) == {"epoch": endpoint["epoch"], "state": "BOOTING"}
        second = start(run_dir)
        assert second.wait(30) == 6
        assert run_dir.read("outcome.json") is None  # it would have been taken for the end of the first
        assert asyncio.run(ping())["epoch"] == endpoint["epoch"]
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == 0
        outcome = run_dir.read("outcome.json")
        assert outcome is not None
        assert (outcome["state"], outcome["reason"]) == ("STOPPED", "the head node was told to end")
        again = start(run_dir)
        try:
            until(lambda: (run_dir.read("endpoint.json") or {})["epoch"] > endpoint["epoch"], 20, "no new epoch")
            after = run_dir.read("endpoint.json")
            assert after is not None
            assert after["control"] == endpoint["control"]  # where everybody looks for it
        finally:
            again.send_signal(signal.SIGTERM)
            assert again.wait(30) == 0
        for path in run_dir.path.rglob("*.json"):
            assert path.stat().st_mode & 0o077 == 0, path
    finally:
        if first.poll() is None:
            first.kill()
            first.wait()


def test_what_cannot_start_leaves_an_outcome(tmp_path: Path) -> None:
    run_dir = attempt(tmp_path)
    (run_dir.keys / "coordinator.key").unlink()
    broken = start(run_dir)
    assert broken.wait(30) == 6
    outcome = run_dir.read("outcome.json")
    assert outcome is not None
    assert outcome["exit_code"] == 6
    assert "coordinator.key" in outcome["error"]["message"]
    for line in (run_dir.logs / "head.log").read_text().splitlines():
        assert "Traceback" not in line


def test_the_outcome_of_a_run_that_never_was(tmp_path: Path) -> None:
    outcome = failed_outcome(run_dir_of(tmp_path), BindingMismatch("no", rows=[{"node": "n"}]))
    assert (outcome["exit_code"], outcome["state"], outcome["unproven"]) == (5, "FAILED", [])
    assert outcome["error"]["detail"] == {"rows": [{"node": "n"}]}


def test_log_lines_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        logs.to_stderr("coordinator")
        logging.getLogger("x").info("hello %s", "you")
        try:
            raise ValueError("oops")
        except ValueError:
            logging.getLogger("x").exception("broken")
    finally:
        for handler in root.handlers[:]:
            root.removeHandler(handler)
        for handler in before:
            root.addHandler(handler)
        root.setLevel(level)
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["process"], first["level"], first["message"]) == ("coordinator", "info", "hello you")
    assert "ValueError: oops" in second["traceback"]
    assert second["time"].endswith("Z")


def test_many_files_may_be_open() -> None:
    program = (
        "import resource; from relax_slurm.wire.host import allow_many_files\n"
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, min(hard, 4096)))\n"
        "print(allow_many_files(), allow_many_files(1000), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    limits = {int(word) for word in done.stdout.split()}
    assert len(limits) == 1
    assert limits.pop() > 256
    assert allow_many_files(1) >= 1


# --- small pieces ---------------------------------------------------------------------------------------------------


def test_what_a_sidecar_is_told_to_start_is_what_it_understands() -> None:
    for config in (config_of(), wide_config()):
        plan = plan_of(config)
        allocation = allocation_of(plan)
        reports = {node: report_of(plan, node, place) for place, node in enumerate(allocation.node_names)}
        bound = bind(plan, allocation.facts(), reports)
        model = plan.roles[0].models[0]
        for replica in model.replicas:
            for rank, worker in enumerate(replica.workers):
                weights = Weights("0", model.model_path)
                args = worker_args(
                    model, weights, replica, rank, bound, config, run_tag="t", memory_saver=False, generation=3
                )
                spec = WorkerSpec.from_wire({**args["spec"], "log_path": "/x"})
                assert spec.gpu_indexes == worker.gpus
                assert args["guard"]["generation"] == 3
                alone = len(replica.workers) == 1
                assert (spec.host == "127.0.0.1") is alone or bound.worker_binding(worker).address == spec.host
                ports = [spec.ports.http, spec.ports.nccl, spec.ports.rendezvous, args["guard"]["port"]]
                block = reports[bound.worker_binding(worker).node_name].port_block
                assert block is not None
                assert all(block.start < port < block.start + block.span for port in (ports[0], ports[1], ports[3]))
                assert spec.nnodes == len(replica.workers)


def test_managers_find_by_node_and_worker_and_ignore_the_rest() -> None:
    class Manager:
        def __init__(self, role: str, name: str, *workers: tuple[str, str, str, int]) -> None:
            self.model = type("Model", (), {"role": role, "name": name})
            self.workers, self.seen = workers, []

        def worker_ids(self) -> Any:
            return self.workers

        def on_status(self, replica: str, rank: int, status: WorkerStatus) -> None:
            self.seen.append((replica, rank))

    managers = Managers()
    one = Manager("rollout", "a", ("a/replica-0#0", "n1", "a/replica-0", 0), ("a/replica-0#1", "n2", "a/replica-0", 1))
    two = Manager("genrm", "b", ("b/replica-0#0", "n2", "b/replica-0", 0))
    managers.add(one)  # type: ignore[arg-type]
    managers.add(two)  # type: ignore[arg-type]
    assert len(managers) == 2
    assert managers["genrm", "b"] is two  # type: ignore[index]
    assert managers.on_node("n2") == [one, two]
    assert managers.on_node("n9") == []
    for node, worker in (("n1", "a/replica-0#0"), ("n2", "a/replica-0#0"), ("n2", "a/replica-0#1"), ("n1", "x")):
        managers.on_status(node, WorkerStatus(worker_id=worker, state="up"))
    assert one.seen == [("a/replica-0", 0), ("a/replica-0", 1)]
    assert two.seen == []
    assert head.PROTOCOL == "RLX1"
