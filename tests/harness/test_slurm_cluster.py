"""The harness itself: several clusters at once, and nothing left when one goes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.fixtures import require_slurm
from tests.harness.slurm_cluster import SlurmCluster
from tests.harness.slurm_proc import Proc, processes, wait_gone

pytestmark = pytest.mark.slurm


@pytest.fixture(autouse=True)
def _slurm() -> None:
    require_slurm()


@pytest.fixture
def short() -> Iterator[Path]:
    """A short folder: munge's socket is inside."""
    folder = Path(tempfile.mkdtemp(prefix="sh-"))
    yield folder
    shutil.rmtree(folder)


def of_cluster(conf: Path) -> list[Proc]:
    return [proc for proc in processes() if proc.environ().get("SLURM_CONF") == str(conf)]


def test_two_clusters_at_once_leave_nothing() -> None:
    with SlurmCluster(2, gpus=2) as one, SlurmCluster(1, gpus=0, cpus=2) as two:
        assert one.run("sinfo", "-h", "-N", "-p", "main", "-o", "%N").out.split() == ["node1", "node2"]
        assert two.run("srun", "-N1", "bash", "-c", "echo $SLURMD_NODENAME").out.split() == ["node1"]
        # A daemon that leaves its session outlives scancel under linuxproc; the harness must find it all the same.
        one.run("sbatch", "-N2", "-o", "/dev/null", "--wrap", "setsid --fork sleep 600; srun sleep 600")
        deadline = time.monotonic() + 20
        while sum(proc.comm() == "sleep" for proc in one.job_processes()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        bases = [(one.base, one.conf), (two.base, two.conf)]
    for base, conf in bases:
        assert not base.exists()
        assert of_cluster(conf) == []


def test_by_hand_up_and_down(short: Path) -> None:
    harness = [sys.executable, "-m", "tests.harness.slurm_cluster"]
    root = Path(__file__).resolve().parents[2]
    base = short / "c"
    up = subprocess.run(
        [*harness, "up", "1", "--base", str(base)], cwd=root, capture_output=True, text=True, check=True
    )
    conf = base / "etc" / "slurm.conf"
    assert up.stdout.splitlines()[-1] == f"export SLURM_CONF={conf}"
    assert of_cluster(conf)
    subprocess.run([*harness, "down", "--base", str(base)], cwd=root, check=True)
    assert of_cluster(conf) == []


def test_a_daemon_that_dies_at_start_is_reported_with_its_log(short: Path) -> None:
    with (
        pytest.raises(RuntimeError, match=r"NoSuchOption|slurm\.conf"),
        SlurmCluster(1, base=short, extra=["NoSuchOption=1"]),
    ):
        pass
    assert of_cluster(short / "etc" / "slurm.conf") == []


@pytest.mark.parametrize("kind", ["cgroup", "linuxproc"])
def test_what_the_end_of_a_step_proves(kind: str, short: Path) -> None:
    """cgroup: no process outlives its step. linuxproc: one that left its session does."""
    if kind == "cgroup" and not Path("/sys/fs/cgroup/freezer").is_dir():
        pytest.skip("no cgroup v1 freezer on this machine")
    with SlurmCluster(1, gpus=0, cpus=2, proctrack=f"proctrack/{kind}", kill_wait=1) as cluster:
        mark = short / "pid"
        leave = f"setsid --fork bash -c 'echo $$ > {mark}; exec sleep 600'; while [ ! -s {mark} ]; do sleep 0.05; done"
        step = subprocess.Popen(["srun", "-N1", "bash", "-c", leave], env=cluster.env, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not (mark.exists() and mark.read_text().strip()):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        daemon = Proc.of(int(mark.read_text()))
        if kind == "cgroup":
            assert step.wait(20) == 0
            assert daemon is None or wait_gone([daemon], 5.0) == []
        else:
            assert daemon is not None
            with pytest.raises(subprocess.TimeoutExpired):
                step.wait(1.0)
            cluster.run("scancel", "--user=root", check=False)
            step.wait(30)
            assert daemon.alive
    assert not list(Path("/sys/fs/cgroup").glob(f"*/slurm_{cluster.nodes[0]}"))


def test_a_task_prolog_can_change_what_a_task_sees() -> None:
    """How tests make a node report other GPUs than Slurm gave it."""
    prolog = "#!/bin/bash\n[ \"$SLURMD_NODENAME\" = node2 ] && echo 'export SLURM_STEP_GPUS=6,7'\nexit 0\n"
    with SlurmCluster(2, task_prolog=prolog) as cluster:
        command = ["srun", "-N2", "--gpus-per-node=2", "bash", "-c", "echo $SLURMD_NODENAME $SLURM_STEP_GPUS"]
        begin = time.monotonic()
        assert sorted(cluster.run(*command).out.splitlines()) == ["node1 0,1", "node2 6,7"]
        assert time.monotonic() - begin < 20
