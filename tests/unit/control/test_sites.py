"""Where a run's nodes are: virtual ones, and what Slurm's commands say about real ones."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from relax_slurm.config.models import RunConfig
from relax_slurm.control.allocation import Allocation
from relax_slurm.control.local_site import LocalSite, node_names
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.slurm_site import SlurmSite
from relax_slurm.control.steps import LocalSteps, SlurmSteps
from relax_slurm.core.binding import Backend
from relax_slurm.core.evidence import Proctrack
from relax_slurm.errors import ConfigError, StartupFailed
from tests.unit.control.stage import allocation_of, config_of, plan_of


def local_site(tmp_path: Path, config: RunConfig) -> LocalSite:
    return LocalSite(RunDir.create(tmp_path, "r"), config, plan_of(config))


def test_virtual_nodes(tmp_path: Path) -> None:
    config = config_of(local={"gpus": {"p-0": [1, 2], "p-1": "GPU-x"}, "absent": ["p-1"]})
    site = local_site(tmp_path, config)
    allocation = asyncio.run(site.allocate())
    assert allocation.node_names == ("p-0", "p-1")
    assert (allocation.backend, allocation.proctrack) == (Backend.LOCAL, Proctrack.LOCAL)
    assert allocation.gpu_indexes == {"p-0": (0, 1), "p-1": (0, 1)}
    assert site.absent == {"p-1"}
    runner = site.runner({}, ["python"])
    assert isinstance(runner, LocalSteps)
    assert runner.virtual == {
        "p-0": {"name": "p-0", "gpus": (1, 2), "mask": None},
        "p-1": {"name": "p-1", "gpus": (0, 1), "mask": "GPU-x"},
    }
    assert asyncio.run(site.node_answers("p-0"))
    assert node_names(plan_of(config).components[0]) == ("p-0", "p-1")


@pytest.mark.parametrize("local", [{"gpus": {"x-9": [0]}}, {"absent": ["x-9"]}])
def test_a_node_that_the_plan_does_not_have_is_named(tmp_path: Path, local: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="'x-9', which this plan does not have; it has p-0, p-1"):
        local_site(tmp_path, config_of(local=local))


def test_the_allocation_survives_its_file() -> None:
    allocation = allocation_of(plan_of(config_of()))
    again = Allocation.model_validate_json(json.dumps(allocation.model_dump(mode="json")))
    assert again == allocation
    facts = again.facts(interface="ib0")
    assert facts.interface == "ib0"
    assert facts.nodes == (("p-0", "p-1"),)
    assert again.facts().interface is None


# --- Slurm ---------------------------------------------------------------------------------------------------------

JOB = """JobId=77 JobName=r
   NodeList=n[1-2]
     Nodes=n1 CPU_IDs=0-3 Mem=0 GRES=gpu:2(IDX:2-3)
     Nodes=n2 CPU_IDs=0-3 Mem=0 GRES=gpu:2(IDX:0-1)
"""


def slurm(tmp_path: Path, node: str = "NodeAddr=127.0.0.7 State=ALLOCATED", rc: int = 0) -> dict[str, str]:
    script = f"""#!/bin/bash
case "$*" in
  "show config") echo "ProctrackType           = proctrack/cgroup";;
  "show node"*) echo "NodeName=n1 {node}";;
  *) cat <<'END'
{JOB}
END
;;
esac
exit {rc}
"""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / "scontrol").write_text(script)
    (tmp_path / "bin" / "scontrol").chmod(0o755)
    return {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURMD_NODENAME": "n1",
    }


def slurm_site(tmp_path: Path, environ: Mapping[str, str], **changes: object) -> SlurmSite:
    config = config_of(**changes)
    return SlurmSite(RunDir.create(tmp_path / "runs", "r"), config, plan_of(config), environ)


def test_an_allocation_of_slurm(tmp_path: Path) -> None:
    site = slurm_site(tmp_path, slurm(tmp_path))
    with pytest.raises(StartupFailed, match="call allocate"):
        site.runner({}, [])
    allocation = asyncio.run(site.allocate())
    assert allocation.nodes == (("n1", "n2"),)
    assert allocation.gpu_indexes == {"n1": (2, 3), "n2": (0, 1)}
    assert allocation.proctrack is Proctrack.CGROUP
    assert allocation.batch_host == "n1"
    assert allocation.head_address == "127.0.0.7"
    runner = site.runner({}, ["python"])
    assert isinstance(runner, SlurmSteps)
    assert (dict(runner.component_of), list(runner.component_ids), runner.het) == ({"n1": 0, "n2": 0}, ["77"], False)


def test_the_interface_that_the_user_names(tmp_path: Path) -> None:
    site = slurm_site(tmp_path, slurm(tmp_path), slurm={"interface": "lo"})
    allocation = asyncio.run(site.allocate())
    assert allocation.head_address == "127.0.0.1"
    with pytest.raises(StartupFailed, match=r"'ib9', which the head node does not have; it has .*lo"):
        asyncio.run(slurm_site(tmp_path, slurm(tmp_path), slurm={"interface": "ib9"}).allocate())


def test_a_job_of_another_shape_is_refused(tmp_path: Path) -> None:
    environ = slurm(tmp_path) | {"SLURM_JOB_NODELIST": "n[1-3]"}
    with pytest.raises(StartupFailed, match=r"components of \[3\] nodes, the plan wants \[2\]"):
        asyncio.run(slurm_site(tmp_path, environ).allocate())


def test_what_slurm_does_not_say_is_unknown_and_written_down(tmp_path: Path) -> None:
    site = slurm_site(tmp_path, slurm(tmp_path, rc=1))
    allocation = asyncio.run(site.allocate())
    assert allocation.gpu_indexes == {}
    assert allocation.proctrack is Proctrack.UNKNOWN
    events = (site._run_dir.path / "events.jsonl").read_text().splitlines()
    assert len([line for line in events if "slurm_unknown" in line]) == 3
    assert not asyncio.run(site.node_answers("n1"))


@pytest.mark.parametrize(
    ("state", "answers"),
    [
        ("ALLOCATED", True),
        ("MIXED+DRAIN", True),
        ("DOWN", False),
        ("DOWN*+DRAIN", False),
        ("IDLE*", False),
        ("FAIL", False),
    ],
)
def test_a_node_answers_unless_slurm_has_given_it_up(tmp_path: Path, state: str, answers: bool) -> None:
    site = slurm_site(tmp_path, slurm(tmp_path, node=f"State={state} ThreadsPerCore=1"))
    assert asyncio.run(site.node_answers("n1")) is answers
