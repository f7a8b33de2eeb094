"""The Slurm room against a real Slurm: what the fakes of the unit tests pretend is checked here."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.config.models import RunConfig
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan, Mode, PortWindow
from relax_slurm.errors import SubmissionRefused
from relax_slurm.slurm import scontrol, steps
from relax_slurm.slurm.backend import SlurmBackend
from relax_slurm.slurm.environment import nodes_by_component, read_step, step_environment
from relax_slurm.slurm.job import JobRef, JobState, JobView
from relax_slurm.slurm.script import ScriptPaths, render
from relax_slurm.slurm.submit import Submission, search
from tests.harness.slurm_cluster import SlurmCluster
from tests.harness.slurm_host import slurm_version

pytestmark = pytest.mark.slurm

HEAD = ComponentPlan(0, "head", 1, 0, cpus_per_node=1, mem="200M")
POLICY = ComponentPlan(1, "policy", 2, 4, "h100", cpus_per_node=4, mem="600M")
JUDGE = ComponentPlan(2, "judge", 1, 2, "h100", cpus_per_node=2, mem="300M")

DUMP = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


def plan_of(*components: ComponentPlan, shape: str = "het") -> InferencePlacementPlan:
    return InferencePlacementPlan(
        version=1,
        run="room",
        mode=Mode.DECOUPLED,
        job_shape=shape,
        head_component=None,
        components=components,
        pools=(),
        roles=(),
        training=None,
        ports=PortWindow(20_000, 20_100, 10),
        engine="sim",
    )


def config_of(**slurm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "room",
            "placement": "decoupled",
            "pools": {"p": {"nodes": 1, "gpus_per_node": 1}},
            "roles": {"rollout": {"pool": "p", "models": {"m": {"model_path": "x", "gpus": 1}}}},
            "slurm": {"time": "10", **slurm},
        }
    )


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.05)
    return value


class Job:
    """A submitted job whose batch step runs a bash text; cancelled at the end."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *, seconds: float = 20.0) -> None:
        self.cluster = cluster
        self.folder = folder
        self.backend = SlurmBackend(seconds=seconds, environ=cluster.env)
        self.tag = f"room-{folder.stat().st_ino}-{time.time_ns()}"
        self.ref: JobRef | None = None

    def submit(self, body: str, *components: ComponentPlan, shape: str = "het", **slurm: Any) -> JobRef:
        command = ("bash", "-c", body)
        paths = ScriptPaths(command, self.folder / "batch.log", self.tag)
        script = render(plan_of(*components, shape=shape), config_of(**slurm), paths)
        self.ref = self.backend.submit(Submission("room", 1, self.tag, self.folder, script, command))
        return self.ref

    def view(self) -> JobView:
        assert self.ref is not None
        return self.backend.poll(self.ref)

    def is_in(self, state: JobState) -> bool:
        return self.view().state is state

    def batch_environment(self) -> dict[str, str]:
        """The batch step's environment, written by the body through DUMP."""
        return until(lambda: read(self.folder / "batch.json"))

    def step(self, node: str, group: int | None, command: list[str], **more: Any) -> dict[str, str]:
        """Start a step from outside with the batch environment, as the supervisor does from inside."""
        target = self.folder / f"step-{node}-{time.monotonic_ns()}.json"
        argv = steps.node_step(node, [*command, str(target)], het_group=group, **more)
        env = step_environment(self.batch_environment())
        done = self.cluster.run(*argv, env=env)
        assert target.exists(), done
        return json.loads(target.read_text())


def read(path: Path) -> dict[str, str] | None:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


@pytest.fixture
def job(slurm4: SlurmCluster, tmp_path: Path) -> Any:
    folder = tmp_path / "run dir 100% 'x'"
    folder.mkdir()
    job = Job(slurm4, folder)
    yield job
    slurm4.run("scancel", "--user=root", "--full", check=False)
    slurm4.run("scancel", "--user=root", check=False)
    slurm4.wait_jobs_gone()


def dump_and_wait(folder: Path) -> str:
    target = shlex.quote(str(folder / "batch.json"))
    return f"{sys.executable} -c {shlex.quote(DUMP)} {target}; exec sleep 600"


DUMP_STEP = [sys.executable, "-c", DUMP]


def test_a_het_job_with_a_head_and_two_kinds_of_gpu_nodes(job: Job) -> None:
    # Somebody else has GPUs 0 and 1 of every node, so that indexes start at 2.
    other = ("sbatch", "-N4", "--gpus-per-node=h100:2", "--mem=10", "-o", "/dev/null", "--wrap", "sleep 600")
    job.cluster.run(*other)
    until(lambda: job.cluster.run("squeue", "-h", "-o", "%t").out.strip() == "R")
    ref = job.submit(dump_and_wait(job.folder), HEAD, POLICY, JUDGE)

    until(lambda: job.is_in(JobState.RUNNING))
    view = job.view()
    assert [component.index for component in view.components] == [0, 1, 2]

    env = job.batch_environment()
    nodes = nodes_by_component(env)
    assert [len(group) for group in nodes] == [1, 2, 1]
    assert {name for group in nodes for name in group} <= set(job.cluster.nodes)

    records = scontrol.parse_jobs(job.cluster.run(*scontrol.show_job(ref.job_id)).out)
    assert [record.offset for record in records] == [0, 1, 2]
    assert [record.nodes for record in records] == list(nodes)
    assert {record.leader for record in records} == {ref.job_id}
    assert records[0].comment == job.tag
    end = scontrol.end_time(records[0])
    assert end is not None
    assert 0 < end - time.time() <= 600
    assert records[0].gpus == dict.fromkeys(nodes[0], ())

    for group, names in enumerate(nodes):
        for name in names:
            seen = job.step(name, group, DUMP_STEP)
            me = read_step(seen)
            assert me.node == name
            assert me.job_id == ref.job_id, "inside a task the job id is the leader's"
            expected = records[group].gpus[name]
            assert expected is not None
            if not expected:
                assert me.step_gpus is None
                continue
            assert expected[0] == 2
            assert me.step_gpus == ",".join(str(index) for index in expected)
            assert me.gpus_on_node == str(len(expected))
            assert seen["SLURM_CPUS_ON_NODE"] == str((HEAD, POLICY, JUDGE)[group].cpus_per_node)


def test_steps_do_not_inherit_the_shape_of_component_0(job: Job) -> None:
    big = replace(JUDGE, index=0, gpus_per_node=8, mem="900M", cpus_per_node=8)
    small = replace(POLICY, nodes=1, gpus_per_node=1, mem="100M", cpus_per_node=1)
    bare = replace(HEAD, index=2)
    job.submit(dump_and_wait(job.folder), big, small, bare, gpu_request="gres")
    nodes = nodes_by_component(job.batch_environment())
    assert job.step(nodes[0][0], 0, DUMP_STEP)["SLURM_STEP_GPUS"] == "0,1,2,3,4,5,6,7"
    one = job.step(nodes[1][0], 1, DUMP_STEP)
    assert one["SLURM_STEP_GPUS"] == "0"
    assert one["SLURM_JOB_GPUS"] == "0,1,2,3,4,5,6,7", "the batch host's GPUs, exported by srun"
    none = job.step(nodes[2][0], 2, DUMP_STEP)
    assert "SLURM_STEP_GPUS" not in none
    assert none["SLURM_CPUS_ON_NODE"] == "1"


def test_a_single_job_over_two_nodes(job: Job) -> None:
    whole = replace(POLICY, index=0, gpus_per_node=8, gpu_type=None)
    job.submit(dump_and_wait(job.folder), whole, shape="single", exclusive=True)
    nodes = nodes_by_component(job.batch_environment())
    assert len(nodes) == 1
    assert len(nodes[0]) == 2
    for name in nodes[0]:
        assert job.step(name, None, DUMP_STEP)["SLURM_STEP_GPUS"] == "0,1,2,3,4,5,6,7"
    assert job.view().state is JobState.RUNNING


def test_two_steps_run_beside_each_other_and_one_can_be_signalled(job: Job) -> None:
    ref = job.submit(dump_and_wait(job.folder), HEAD, replace(POLICY, nodes=1))
    env = job.batch_environment()
    (node,) = nodes_by_component(env)[1]
    component = env["SLURM_JOB_ID_HET_GROUP_1"]
    mark = shlex.quote(str(job.folder))
    traps = f"end() {{ touch {mark}/$1-$0; exit 7; }}; trap 'end TERM' TERM; trap 'end INT' INT"
    body = f"{traps}; touch {mark}/up-$0; while :; do sleep 0.05; done"
    running = [
        subprocess.Popen(
            steps.node_step(node, ["bash", "-c", body, name], het_group=1, name=name),
            env=job.cluster.env | step_environment(env),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for name in ("first", "second")
    ]
    try:
        until(lambda: (job.folder / "up-first").exists() and (job.folder / "up-second").exists())
        ids = [ref.job_id, component]
        rows = steps.parse_steps(job.cluster.run(*steps.list_steps(ids)).out)
        by_name = {row.name: row for row in rows}
        assert by_name["first"].job_id == component
        assert by_name["first"].nodes == node
        assert by_name["batch"].job_id == ref.job_id

        row = by_name["first"]
        job.cluster.run(*steps.signal_step(row.job_id, row.step_id), check=False)
        assert running[0].wait(10) == 7
        assert (job.folder / "TERM-first").exists()
        assert running[1].poll() is None
        left = steps.parse_steps(job.cluster.run(*steps.list_steps(ids)).out)
        assert "first" not in {row.name for row in left}

        running[1].send_signal(signal.SIGINT)
        assert running[1].wait(10) == 7
        assert (job.folder / "INT-second").exists()
    finally:
        job.cluster.run("scancel", ref.job_id)
        for child in running:
            child.wait(20)


def test_cancel_reaches_the_batch_step_and_the_watcher_sees_the_end(job: Job) -> None:
    mark = shlex.quote(str(job.folder / "term"))
    ref = job.submit(
        f"end() {{ touch {mark}; exit 0; }}; trap end TERM; {dump_and_wait(job.folder).replace('exec sleep 600', '')}"
        "while :; do sleep 0.05; done",
        HEAD,
        JUDGE,
    )
    assert job.view().state in {JobState.PENDING, JobState.RUNNING}
    job.batch_environment()
    assert job.view().state is JobState.RUNNING
    job.backend.cancel(ref)
    until(lambda: job.view().over)
    assert job.is_in(JobState.ENDED)
    assert "CANCELLED" in job.view().reason
    assert (job.folder / "term").exists()
    job.backend.cancel(ref)
    gone = JobRef("99999")
    assert job.backend.poll(gone).state is JobState.GONE
    job.backend.cancel(gone)


def test_a_component_that_ends_alone_degrades_the_job(job: Job) -> None:
    ref = job.submit(dump_and_wait(job.folder), HEAD, JUDGE)
    job.batch_environment()
    job.cluster.run("scancel", f"{ref.job_id}+1")
    until(lambda: job.is_in(JobState.DEGRADED))
    assert next(component.state for component in job.view().components) == "RUNNING"


def test_a_job_that_cannot_run_is_refused_or_stays_pending_with_slurms_reason(job: Job) -> None:
    too_many = replace(POLICY, nodes=9)
    if slurm_version() >= (23, 0):  # newer versions count the nodes of a component at submission
        with pytest.raises(SubmissionRefused, match="not that many nodes; lower") as caught:
            job.submit("true", too_many)
        assert "Requested node configuration" in caught.value.message
        return
    ref = job.submit("true", too_many)
    until(lambda: "PartitionConfig" in job.view().reason)
    assert job.view().state is JobState.PENDING
    found, _ = search(job.tag, env=job.cluster.env)
    assert found == ref


@pytest.mark.parametrize(
    ("component", "slurm", "words", "advice"),
    [
        (replace(JUDGE, gpus_per_node=9), {}, "Requested node configuration", "gpus_per_node"),
        (replace(JUDGE, gpu_type="l40s"), {}, "Requested node configuration", "gpu_type"),
        (replace(JUDGE, gpus_per_node=9), {"gpu_request": "gres"}, "not available", "gpus_per_node"),
        (JUDGE, {"partition": "nope"}, "Invalid partition name specified", "sinfo -s"),
        (JUDGE, {"constraint": "nope"}, "Invalid feature", "slurm.constraint"),
        (JUDGE, {"reservation": "nope"}, "reservation is invalid", "slurm.reservation"),
        (replace(JUDGE, mem="9999G"), {}, "Memory specification", "pools.POOL.mem"),
        (JUDGE, {"extra_sbatch": ("--bogus=1",)}, "unrecognized option", "slurm.extra_sbatch"),
        (JUDGE, {"extra_sbatch": ("--licenses=nope",)}, "Invalid license", "licence"),
    ],
)
def test_refusals_carry_slurms_words_and_advice(
    job: Job, component: ComponentPlan, slurm: dict[str, Any], words: str, advice: str
) -> None:
    with pytest.raises(SubmissionRefused) as caught:
        job.submit("true", HEAD, component, **slurm)
    assert words in caught.value.message
    assert advice in caught.value.message
    assert search(job.tag, env=job.cluster.env)[0] is None


def test_launching_from_inside_an_allocation_is_not_shaped_by_it(job: Job, tmp_path: Path) -> None:
    outer = job.cluster.env | {
        "SLURM_JOB_ID": "1",
        "SLURM_MEM_PER_CPU": "10",
        "SLURM_MEM_PER_NODE": "20",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_STEP_GPUS": "0",
        "SBATCH_GRES": "gpu:9",
        "SBATCH_MEM_PER_CPU": "77G",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    job.backend = SlurmBackend(environ=outer)
    job.submit(dump_and_wait(job.folder), HEAD, JUDGE)
    seen = job.batch_environment()
    assert seen["SLURM_MEM_PER_NODE"] == "200"
    assert "CUDA_VISIBLE_DEVICES" not in seen


def test_the_controllers_configuration_tells_what_a_step_end_proves(slurm4: SlurmCluster) -> None:
    config = scontrol.parse_config(slurm4.run(*scontrol.show_config()).out)
    assert config["ProctrackType"] == "proctrack/linuxproc"
    assert scontrol.step_end_is_proof(config) is False
    assert config["SLURM_VERSION"][:1].isdigit()
