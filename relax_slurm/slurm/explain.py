"""What Slurm's words mean and what to do about them: refusals of sbatch and srun, reasons of pending jobs."""

from __future__ import annotations

import re

_SHAPE = (
    "no node has that many GPUs of that type, CPUs or that much memory at once, or there are not that many nodes; "
    "lower pools.POOL.gpus_per_node, nodes, cpus_per_node or mem, or correct gpu_type "
    "(`sinfo -o '%P %D %G %c %m'` shows what there is)"
)
_GRES = "Slurm does not know that GPU type or count; correct gpu_type, or switch slurm.gpu_request"
_STEP_GRES = "the step asks for other GPUs than its component holds; remove GPU options from slurm.extra_srun"
_EXCLUDE = "two options exclude each other; remove one from slurm.extra_sbatch or from the environment"
_LIMIT = "the request is above a limit of the account or QOS; ask for less or change slurm.account, slurm.qos"
_HET = "this site may forbid heterogeneous jobs; set slurm.het_jobs: false or job_shape: single"
_ACCOUNT = "correct slurm.account or the partition; `sacctmgr show assoc user=$USER` lists what you may use"

_REFUSALS: tuple[tuple[str, str], ...] = (
    (r"Memory specification can not be satisfied", "lower pools.POOL.mem; no node has that much"),
    (r"Requested node configuration is not available", _SHAPE),
    (r"Step requested GRES", _STEP_GRES),
    (r"Invalid generic resource|Invalid GRES|Invalid Trackable RESource", _GRES),
    (r"[Ii]nvalid partition", "correct slurm.partition; `sinfo -s` lists the partitions"),
    (r"Invalid account", _ACCOUNT),
    (r"Invalid qos", "correct slurm.qos; `sacctmgr show assoc user=$USER format=qos` lists yours"),
    (r"reservation is (?:invalid|not)", "correct slurm.reservation; `scontrol show reservation` lists them"),
    (r"Invalid feature", "no node has that feature; correct slurm.constraint"),
    (r"Invalid --time|time limit is invalid", "correct slurm.time; the partition may have a lower limit"),
    (r"Invalid license", "correct the licence in slurm.extra_sbatch"),
    (r"unrecognized option|invalid option", "this Slurm lacks that option; correct slurm.extra_sbatch"),
    (r"mutually exclusive", _EXCLUDE),
    (r"violates accounting/QOS policy|AssocMax|QOSMax", _LIMIT),
    (r"(?i)heterogeneous|het ?job", _HET),
    (r"(?i)access denied|permission denied|group not permitted", _ACCOUNT),
    (r"cannot run s\w+", "Slurm's commands are not on the PATH; use a login node, or --backend local"),
    (
        r"Unable to process configuration|cannot stat file|ClusterName needs",
        "set SLURM_CONF or use a login node",
    ),
)

_PENDING: tuple[tuple[str, str], ...] = (
    ("PartitionConfig", "the partition can never give that many nodes, CPUs or GPUs at once; ask for less"),
    ("PartitionNodeLimit", "the partition does not allow that many nodes; ask for fewer or use another one"),
    ("PartitionTimeLimit", "slurm.time is above the partition's limit; lower it"),
    ("PartitionDown", "the partition is down; use another one"),
    ("PartitionInactive", "the partition is inactive; use another one"),
    ("BadConstraints", "no node matches slurm.constraint with these resources; change it"),
    ("AccountNotAllowed", "slurm.account may not use this partition; change one of them"),
    ("QOSNotAllowed", "slurm.qos may not be used here; change it"),
    ("InvalidAccount", "slurm.account is not known to Slurm; correct it"),
    ("InvalidQOS", "slurm.qos is not known to Slurm; correct it"),
    ("JobHeldUser", "the job is held; release it with `scontrol release`"),
    ("JobHeldAdmin", "an administrator holds the job; ask them"),
    ("DependencyNeverSatisfied", "the job depends on one that failed; see slurm.extra_sbatch"),
    ("ReqNodeNotAvail", "nodes that the job asks for are down, drained or reserved"),
    ("launch failed requeued held", "Slurm could not start the job and holds it; see `scontrol show job`"),
)


def refusal(words: str) -> str | None:
    """What to do about a complaint of sbatch or srun; None for one that is not known."""
    return next((advice for pattern, advice in _REFUSALS if re.search(pattern, words)), None)


def pending(reason: str) -> str | None:
    """What to do about a pending job's reason that does not pass by waiting; None for all others."""
    return next((advice for word, advice in _PENDING if reason.startswith(word)), None)
