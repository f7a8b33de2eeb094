"""A pure view of a Slurm environment: which job is this, which nodes has each component, who is this task.

Everything takes a mapping, so that it can be asked about another process's environment too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from relax_slurm.errors import StartupFailed, shown
from relax_slurm.slurm.hostlist import HostListError, expand

MAX_COMPONENTS = 128
"""Slurm's own limit of components in one heterogeneous job."""

_JOB_PREFIXES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI_", "PMI2_", "PMIX_")
_GPU_MASKS = frozenset({"CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"})
_SITE = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT"})
"""About the installation, not about a job."""
_WISHES = frozenset({"SBATCH_ACCOUNT", "SBATCH_QOS", "SBATCH_RESERVATION", "SBATCH_CLUSTERS", "SBATCH_WCKEY"})
"""What a user sets once in a profile. They win over the script's directives (sbatch's own rule)."""
_STEP_KEEPS = re.compile(
    r"SLURM_(CONF|CONF_SERVER|CLUSTERS|CLUSTER_NAME|JWT|WORKING_CLUSTER|RESTART_COUNT|HET_SIZE|JOBID|NODE_ALIASES"
    r"|JOB_.*|SUBMIT_.*|TOPOLOGY_.*)"
)


@dataclass(frozen=True, slots=True)
class JobEnvironment:
    """A job as its batch step sees it."""

    job_id: str
    """Id of the job, which is that of its first component (the leader)."""
    component_ids: tuple[str, ...]
    """Own job id of every component; only these name a component's steps."""
    nodes: tuple[tuple[str, ...], ...]
    """Node names of every component, in Slurm's order."""
    het: bool
    """True for a heterogeneous job; then steps need `--het-group`."""
    restart_count: int
    """How often Slurm has requeued the job."""
    end_time: int | None
    """Unix time at which Slurm ends the job; None when it does not say (before 22.05)."""
    cluster: str | None

    def component_of(self, node: str) -> int | None:
        """Index of the component that has a node of this name."""
        return next((index for index, names in enumerate(self.nodes) if node in names), None)


@dataclass(frozen=True, slots=True)
class StepIdentity:
    """Who a task is. The GPU fields are the variables as they stand; None when unset.

    `step_gpus` holds the task's own physical indexes. `job_gpus` is exported by srun from the batch step: on
    another node, and in another component, it speaks of GPUs that are not this task's.
    """

    job_id: str | None
    step_id: str | None
    node: str | None
    step_gpus: str | None
    job_gpus: str | None
    gpus_on_node: str | None
    cuda_visible_devices: str | None


@dataclass(frozen=True, slots=True)
class Scrubbed:
    """An environment for a nested submission, with the names of what was dropped and of user wishes kept."""

    env: dict[str, str]
    dropped: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def note(self) -> str | None:
        """One sentence for the user when a setting of the shell decides something; None otherwise."""
        if not self.kept:
            return None
        shown = ", ".join(f"{name}={self.env[name]}" for name in self.kept)
        return f"sbatch takes {shown} from the environment, over what the run file says"


def inside_job(env: Mapping[str, str]) -> bool:
    """True inside an allocation."""
    return bool(env.get("SLURM_JOB_ID"))


def read_job(env: Mapping[str, str]) -> JobEnvironment:
    """The job that this environment belongs to. StartupFailed, naming the variable, when it is missing or wrong."""
    job_id = _want(env, "SLURM_JOB_ID")
    ids: tuple[str, ...]
    het = "SLURM_HET_SIZE" in env
    if het:
        size = _number(env, "SLURM_HET_SIZE", 1, MAX_COMPONENTS)
        ids = tuple(_want(env, f"SLURM_JOB_ID_HET_GROUP_{index}") for index in range(size))
        nodes = tuple(_hosts(env, f"SLURM_JOB_NODELIST_HET_GROUP_{index}") for index in range(size))
        job_id = ids[0]
    else:
        ids = (job_id,)
        nodes = (_hosts(env, "SLURM_JOB_NODELIST"),)
    restarts = _number(env, "SLURM_RESTART_COUNT", 0, 2**31) if "SLURM_RESTART_COUNT" in env else 0
    end = _number(env, "SLURM_JOB_END_TIME", 0, 2**63) if "SLURM_JOB_END_TIME" in env else None
    return JobEnvironment(job_id, ids, nodes, het, restarts, end, env.get("SLURM_CLUSTER_NAME"))


def nodes_by_component(env: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Node names per component; one component for an ordinary job. StartupFailed as in `read_job`."""
    return read_job(env).nodes


def read_step(env: Mapping[str, str]) -> StepIdentity:
    """Who the task with this environment is. Never fails: judging is `core.binding`'s business."""
    return StepIdentity(
        job_id=env.get("SLURM_JOB_ID"),
        step_id=env.get("SLURM_STEP_ID"),
        node=env.get("SLURMD_NODENAME"),
        step_gpus=env.get("SLURM_STEP_GPUS"),
        job_gpus=env.get("SLURM_JOB_GPUS"),
        gpus_on_node=env.get("SLURM_GPUS_ON_NODE"),
        cuda_visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
    )


def scrubbed(env: Mapping[str, str]) -> Scrubbed:
    """The environment for a submission from inside a job: without that job's variables, which sbatch reads as
    options.

    Kept: where Slurm is (SLURM_CONF and the like) and the user's account, QOS, reservation, cluster and
    wckey.
    """
    nested = inside_job(env)
    kept: dict[str, str] = {}
    dropped: list[str] = []
    for name, value in env.items():
        of_a_job = name.startswith(_JOB_PREFIXES) and name not in _SITE and name not in _WISHES
        if of_a_job or (nested and name in _GPU_MASKS):
            dropped.append(name)
        else:
            kept[name] = value
    return Scrubbed(kept, tuple(sorted(dropped)), tuple(sorted(_WISHES & kept.keys())))


def step_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for srun inside a job: without variables that srun reads as options.

    The batch shell's SLURM_NTASKS, SLURM_MEM_PER_NODE, SLURM_GPUS_PER_NODE, SLURM_GRES and so on describe
    component 0 and would shape the steps of every other component; what a step needs is in its command line
    instead.
    """
    return {
        name: value
        for name, value in env.items()
        if not name.startswith(("SLURM_", "SRUN_", "SBATCH_")) or _STEP_KEEPS.fullmatch(name)
    }


def _want(env: Mapping[str, str], name: str) -> str:
    value = env.get(name, "")
    if not value:
        raise StartupFailed(f"{name} is {'empty' if name in env else 'not set'}, so this is not a complete Slurm job")
    return value


def _number(env: Mapping[str, str], name: str, low: int, high: int) -> int:
    value = _want(env, name)
    if not re.fullmatch(r"[0-9]{1,19}", value) or not low <= int(value) <= high:
        raise StartupFailed(f"{name} is {shown(value)}, wanted a number from {low} to {high}")
    return int(value)


def _hosts(env: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        return expand(_want(env, name))
    except HostListError as error:
        raise StartupFailed(f"{name} is not usable: {error.message}") from None
