from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import StartupFailed
from relax_slurm.slurm.environment import (
    inside_job,
    nodes_by_component,
    read_job,
    read_step,
    scrubbed,
    step_environment,
)

HET = {
    "SLURM_JOB_ID": "17",
    "SLURM_HET_SIZE": "3",
    "SLURM_JOB_ID_HET_GROUP_0": "17",
    "SLURM_JOB_ID_HET_GROUP_1": "18",
    "SLURM_JOB_ID_HET_GROUP_2": "19",
    "SLURM_JOB_NODELIST": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]",
    "SLURM_JOB_NODELIST_HET_GROUP_2": "node4",
    "SLURM_CLUSTER_NAME": "harness",
    "SLURM_RESTART_COUNT": "2",
    "SLURM_JOB_END_TIME": "1800000000",
}
SHAPE = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_MEM_PER_NODE",
    "SLURM_GPUS_PER_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_GRES",
    "SLURM_CPU_BIND",
    "SLURM_EXPORT_ENV",
    "SLURM_STEP_ID",
    "SLURM_EXACT",
    "SLURM_CPUS_PER_TASK",
    "SRUN_DEBUG",
)


def test_a_het_job() -> None:
    job = read_job(HET)
    assert job.het
    assert job.job_id == "17"
    assert job.component_ids == ("17", "18", "19")
    assert job.nodes == (("node1",), ("node2", "node3"), ("node4",))
    assert job.restart_count == 2
    assert job.end_time == 1_800_000_000
    assert job.cluster == "harness"
    assert job.component_of("node3") == 1
    assert job.component_of("node9") is None


def test_an_ordinary_job_is_one_component() -> None:
    env = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[01-02]"}
    job = read_job(env)
    assert not job.het
    assert job.component_ids == ("5",)
    assert nodes_by_component(env) == (("n01", "n02"),)
    assert (job.restart_count, job.end_time, job.cluster) == (0, None, None)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"SLURM_JOB_ID": None}, "SLURM_JOB_ID"),
        ({"SLURM_HET_SIZE": "three"}, "SLURM_HET_SIZE"),
        ({"SLURM_HET_SIZE": "0"}, "SLURM_HET_SIZE"),
        ({"SLURM_HET_SIZE": "٣"}, "SLURM_HET_SIZE"),
        ({"SLURM_HET_SIZE": "9999999"}, "SLURM_HET_SIZE"),
        ({"SLURM_HET_SIZE": "4"}, "SLURM_JOB_ID_HET_GROUP_3"),
        ({"SLURM_JOB_NODELIST_HET_GROUP_1": ""}, "SLURM_JOB_NODELIST_HET_GROUP_1"),
        ({"SLURM_JOB_NODELIST_HET_GROUP_1": "node[3-2]"}, "SLURM_JOB_NODELIST_HET_GROUP_1"),
        ({"SLURM_RESTART_COUNT": "-1"}, "SLURM_RESTART_COUNT"),
        ({"SLURM_JOB_END_TIME": "soon"}, "SLURM_JOB_END_TIME"),
    ],
)
def test_what_is_missing_or_wrong_is_named(change: dict[str, str | None], name: str) -> None:
    env = {key: value for key, value in (HET | change).items() if value is not None}
    with pytest.raises(StartupFailed, match=name):
        read_job(env)


def test_who_a_task_is() -> None:
    me = read_step(
        HET
        | {
            "SLURM_STEP_ID": "7",
            "SLURMD_NODENAME": "node3",
            "SLURM_STEP_GPUS": "2,3",
            "SLURM_JOB_GPUS": "0,1,2,3",
            "SLURM_GPUS_ON_NODE": "2",
            "CUDA_VISIBLE_DEVICES": "0,1",
        }
    )
    assert (me.job_id, me.step_id, me.node) == ("17", "7", "node3")
    assert (me.step_gpus, me.job_gpus, me.gpus_on_node) == ("2,3", "0,1,2,3", "2")
    assert me.cuda_visible_devices == "0,1"
    assert read_step({}).step_gpus is None


def test_a_nested_submission_loses_the_job_and_keeps_the_site_and_the_account() -> None:
    env = HET | {
        "SLURM_MEM_PER_CPU": "10",
        "SLURM_MEM_PER_NODE": "20",
        "SLURM_CPU_BIND": "quiet",
        "SLURM_STEP_GPUS": "0",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_MEM_PER_CPU": "1G",
        "SBATCH_TIMELIMIT": "5",
        "SBATCH_ACCOUNT": "rl",
        "SLURMD_NODENAME": "node1",
        "PMIX_RANK": "0",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "HOME": "/h",
    }
    clean = scrubbed(env)
    assert clean.env == {
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "rl",
        "PATH": "/bin",
        "HOME": "/h",
    }
    assert set(clean.dropped) == set(env) - set(clean.env)
    assert clean.kept == ("SBATCH_ACCOUNT",)
    assert clean.note is not None
    assert "SBATCH_ACCOUNT=rl" in clean.note
    assert inside_job(env)
    assert not inside_job(clean.env)


def test_outside_a_job_the_gpu_mask_is_the_users_own() -> None:
    clean = scrubbed({"CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin"})
    assert clean.env == {"CUDA_VISIBLE_DEVICES": "1", "PATH": "/bin"}
    assert clean.note is None


def test_a_step_keeps_the_job_and_loses_what_srun_reads_as_options() -> None:
    shape = dict.fromkeys(SHAPE, "1")
    env = HET | shape | {"PATH": "/bin", "SLURM_CONF": "/c", "SLURM_JOB_GPUS": "0"}
    kept = step_environment(env)
    assert kept == {key: value for key, value in env.items() if key not in shape}


@given(
    st.dictionaries(
        st.sampled_from(
            [
                *HET,
                "SLURM_CONF",
                "SBATCH_QOS",
                "PATH",
                "SLURM_X",
                "SBATCH_Y",
                "CUDA_VISIBLE_DEVICES",
                "SLURM_JOBID",
            ]
        ),
        st.text(max_size=12),
    )
)
def test_any_environment_is_read_or_refused_and_split_without_loss(env: dict[str, str]) -> None:
    with contextlib.suppress(StartupFailed):
        read_job(env)
    read_step(env)
    clean = scrubbed(env)
    assert set(clean.dropped) | set(clean.env) == set(env)
    assert not set(clean.dropped) & set(clean.env)
    assert scrubbed(clean.env).dropped == ()
    assert step_environment(env).items() <= env.items()
