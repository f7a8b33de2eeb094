"""The probe on this machine: only named variables leave, virtual nodes are what they are told to be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from relax_slurm.core.binding import AllocationFacts, Backend, Verdict, bind
from relax_slurm.core.plan import Role
from relax_slurm.core.report import NodeReport
from relax_slurm.errors import StartupFailed
from relax_slurm.wire import host
from sidecars.port_block import PortBlock
from sidecars.probe import VirtualNode, probe
from tests.unit.core.binding_samples import WINDOW, Want, make_plan

STEP = {
    "SLURMD_NODENAME": "node7",
    "SLURM_STEP_GPUS": "2,3",
    "CUDA_VISIBLE_DEVICES": "2,3",
    "SLURM_JOB_ID": "12",
    "AWS_SECRET_ACCESS_KEY": "hunter2",
    "SLURM_SRUN_COMM_HOST": "10.0.0.9",
}


def block(number: int = 0) -> PortBlock:
    """A block that holds nothing, for reports only."""
    return PortBlock(WINDOW.first + number * WINDOW.span, WINDOW.span)


def test_only_named_variables_leave_the_node() -> None:
    report = probe(STEP, port_block=block())
    assert report.node == "node7"
    assert sorted(report.environ) == ["CUDA_VISIBLE_DEVICES", "SLURMD_NODENAME", "SLURM_JOB_ID", "SLURM_STEP_GPUS"]
    assert "hunter2" not in str(report.to_wire())
    assert report.virtual_gpus is None
    assert NodeReport.from_wire(report.to_wire()) == report


def test_what_the_machine_is() -> None:
    report = probe(STEP, head=("127.0.0.1", 9))
    assert report.hostname == socket.gethostname()
    assert report.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert report.pid == os.getpid()
    assert ("lo", "127.0.0.1", 8) in {(item.interface, item.address, item.prefix) for item in report.addresses}
    assert report.towards_head == "127.0.0.1"
    assert report.ephemeral_range is not None
    assert "python" in report.versions
    assert report.host == host.head_facts().host
    assert report.port_block is None


def test_a_virtual_node_ignores_the_job_it_was_started_in() -> None:
    virtual = VirtualNode("local-1", (0, 1), mask="0,1")
    report = probe(STEP, virtual=virtual)
    assert report.node == "local-1"
    assert report.environ == {"CUDA_VISIBLE_DEVICES": "0,1"}
    assert report.virtual_gpus == (0, 1)
    assert (report.devices, report.devices_note) == (None, "simulated GPUs")
    assert probe({"CUDA_VISIBLE_DEVICES": ""}, virtual=VirtualNode("local-0", (0,))).environ == {}


def test_outside_a_step_there_is_no_node() -> None:
    with pytest.raises(StartupFailed, match="SLURMD_NODENAME is not set"):
        probe({"CUDA_VISIBLE_DEVICES": "0"})


def test_busy_ports_are_reported_with_and_without_a_block() -> None:
    assert probe(STEP, busy_ports=[18103, 18121]).busy_ports == (18103, 18121)
    assert probe(STEP, port_block=PortBlock(20000, 8, (18103,))).busy_ports == (18103,)


def test_local_nodes_of_this_machine_bind_through_the_real_probe() -> None:
    plan = make_plan(Want(Role.ROLLOUT, 2, 2, 1, None))
    facts = AllocationFacts(
        backend=Backend.LOCAL,
        nodes=(("local-0", "local-1"),),
        gpu_indexes={"local-0": (0, 1), "local-1": (2, 3)},
        head=host.head_facts(),
    )
    reports = {
        name: probe(os.environ, virtual=VirtualNode(name, gpus, ",".join(map(str, gpus))), port_block=block(number))
        for number, (name, gpus) in enumerate(facts.gpu_indexes.items())
    }
    # This machine may have an ephemeral range of any kind; the block's place is not what is tested here.
    reports = {name: report.model_copy(update={"ephemeral_range": None}) for name, report in reports.items()}
    bound = bind(plan, facts, reports)
    assert [node.verdict for node in bound.nodes] == [Verdict.CONFIRMED, Verdict.CONFIRMED]
    worker = plan.roles[0].models[0].replicas[3].workers[0]
    assert bound.worker_binding(worker).visible == ("3",)
    assert bound.worker_keys(worker) == ("local-1/gpu3",)


def test_unreadable_facts_are_empty_and_not_fatal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = tmp_path / "nothing"
    assert host.boot_id(nowhere) == ""
    assert host.net_ns(nowhere) == ""
    assert host.ephemeral_range(nowhere) is None
    odd = tmp_path / "odd"
    odd.write_text("nonsense\n", encoding="ascii")
    assert host.ephemeral_range(odd) is None
    odd.write_text("9000\t65000\n", encoding="ascii")
    assert host.ephemeral_range(odd) == (9000, 65000)

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert host.address_towards("head", 9) is None
