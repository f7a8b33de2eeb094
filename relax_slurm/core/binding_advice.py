"""What to do about a refused binding: one row per rule, by how the rule's problem text reads (docs/binding.md)."""

from __future__ import annotations

import re

_TAKE_OUT = "take the node out with slurm.extra_sbatch: ['--exclude=NODE'] and launch again"
_EDITED = "the plan file was edited or written by another version: launch again from the run file"
_MASK = (
    "something between Slurm and our step rewrites the variable: remove it from slurm.setup, module files, prologs and "
    "slurm.extra_srun, so that it stays as Slurm set it"
)
_SHAPE = "compare pools.POOL.nodes and gpus_per_node with `scontrol show job -d JOB`; correct the run file"
_PORTS = "end what holds the ports on the node, or give another window with ports.first and ports.last"

ADVICE: tuple[tuple[str, str], ...] = (
    (r"node list is not as planned", f"the job has another shape than the plan; {_SHAPE}"),
    (r"the node is in two components with GPUs", "set slurm.exclusive: true, or job_shape: single"),
    (
        r"the node reported nothing",
        f"look at logs/NODE_sidecar.log and whether the node sees the run folder; raise control.bind_seconds where "
        f"nodes are slow, or {_TAKE_OUT}",
    ),
    (
        r"a node that is not in the plan reported|the report is another (node|job)'s|the step runs on another node",
        "a sidecar of another job or attempt uses this run folder: stop that run, then launch again",
    ),
    (r"GPU type is not as planned", "correct pools.POOL.gpu_type, or ask for that type with it"),
    (r"GPUs of different types on one node", f"set pools.POOL.gpu_type so that all are of one type, or {_TAKE_OUT}"),
    (r"GPU memory is already in use", f"end that process, raise control.foreign_memory_mb, or {_TAKE_OUT}"),
    (r"no free block of|the port block|port block overlaps", _PORTS),
    (
        r"two bundles on one physical GPU",
        f"Slurm or the driver gave one card twice: look at gres.conf and at `nvidia-smi -L` there, or {_TAKE_OUT}",
    ),
    (r"MIG slices cannot talk", "ask for whole GPUs with pools.POOL.gpu_type, or set gpus_per_engine: 1"),
    (
        r"bundle|slice out of bounds|pool is not in the plan|unknown node|the worker's GPUs|uses a node twice"
        r"|node ranks|workers and bundles|port offset|not ascending and contiguous",
        _EDITED,
    ),
    (
        r"claims GPUs that the job does not have",
        f"two sources of Slurm contradict each other: compare `scontrol show job -d JOB` with the step, or {_TAKE_OUT}",
    ),
    (
        r"NVML does not see every GPU",
        f"run `nvidia-smi -L` on the node: a GPU has fallen off or is hidden; {_TAKE_OUT}",
    ),
    (r"task sees \S+ of \S+", "remove GPU options from slurm.extra_sbatch, slurm.extra_srun and the environment"),
    (r"GPU count is not as planned", f"{_SHAPE}, or {_TAKE_OUT}"),
    (r"the count differs from the list", f"Slurm contradicts itself on that node: report it, or {_TAKE_OUT}"),
    (
        r"no GPUs requested from Slurm|no GPU is visible|nothing tells which GPUs",
        "look whether job.sbatch asks for GPUs, try the other slurm.gpu_request; a borrowed allocation must hold them",
    ),
    (
        r"cannot verify",
        "make a second source speak (NVML: install nvidia-ml-py on the nodes), or launch with --allow-unverified",
    ),
    (
        r"cgroups show \S+ devices|all \S+ devices are visible",
        f"ConstrainDevices of cgroup.conf does not fit the mask: {_MASK}",
    ),
    (
        r"not ascending|the mask|the UUID in this place|entr(y|ies)\b|named twice|are mixed|descends|is a word for",
        _MASK,
    ),
    (
        r"no address that other machines can reach",
        "name the cluster's interface with slurm.interface (such as ib0), or repair the node's network",
    ),
)


def advice(problem: str) -> str:
    """What to do about a problem text of the binding; empty for one that no rule has."""
    return next((text for pattern, text in ADVICE if re.search(pattern, problem)), "")
