"""What Slurm's words mean and what to do about them: refusals of sbatch and srun, reasons of pending jobs."""

from __future__ import annotations

import re
from enum import StrEnum

_SHAPE = (
    "no node has that many GPUs of that type, CPUs or that much memory at once; lower "
    "pools.POOL.gpus_per_node, cpus_per_node or mem, or correct gpu_type (`sinfo -o '%P %G %c %m'` shows what there is)"
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


class Clears(StrEnum):
    """Whether a pending job's reason can pass without anybody doing something."""

    MAYBE = "maybe"
    """Nodes come back, an administrator acts, somebody releases the job."""
    NEVER = "never"
    """What was asked for is outside a fixed limit or permission: only another request helps."""


_PER_JOB = "the request is above what one job of the account or QOS may have; ask for less or change slurm.qos"

PENDING: tuple[tuple[str, Clears, str], ...] = (
    (
        r"PartitionConfig",
        Clears.MAYBE,
        "the partition cannot give that many nodes, CPUs or GPUs at once; ask for less",
    ),
    (
        r"PartitionNodeLimit",
        Clears.NEVER,
        "the partition does not give that many nodes (`sinfo -p PARTITION`); ask for fewer or use another one",
    ),
    (r"PartitionTimeLimit", Clears.NEVER, "slurm.time is above the partition's limit; lower it"),
    (r"PartitionDown", Clears.MAYBE, "the partition is down; wait, or use another one"),
    (r"PartitionInactive", Clears.MAYBE, "the partition is inactive; wait, or use another one"),
    (r"BadConstraints", Clears.NEVER, "no node matches slurm.constraint with these resources; change it"),
    (r"AccountNotAllowed", Clears.NEVER, "slurm.account may not use this partition; change one of them"),
    (r"QOSNotAllowed", Clears.NEVER, "slurm.qos may not be used here; change it"),
    (r"InvalidAccount", Clears.NEVER, "slurm.account is not known to Slurm; correct it"),
    (r"InvalidQOS", Clears.NEVER, "slurm.qos is not known to Slurm; correct it"),
    (r"(Assoc|QOS)Max\w+Per(Job|Node)", Clears.NEVER, _PER_JOB),
    (r"QOSMin\w+", Clears.NEVER, "the request is below what slurm.qos wants of a job; ask for more or change it"),
    (
        r"ReservationDeleted",
        Clears.NEVER,
        "slurm.reservation is gone; correct it (`scontrol show reservation` lists them)",
    ),
    (r"JobHeldUser", Clears.MAYBE, "the job is held; release it with `scontrol release`"),
    (r"JobHeldAdmin", Clears.MAYBE, "an administrator holds the job; ask them"),
    (r"DependencyNeverSatisfied", Clears.NEVER, "the job depends on one that failed; see slurm.extra_sbatch"),
    (r"ReqNodeNotAvail", Clears.MAYBE, "nodes that the job asks for are down, drained or reserved"),
    (
        r"launch failed requeued held",
        Clears.NEVER,
        "Slurm could not start the job and holds it; see `scontrol show job`",
    ),
)
"""Reasons (as squeue's %r begins) that do not pass by waiting alone, from slurm(1) squeue, JOB REASON CODES."""


def refusal(words: str) -> str | None:
    """What to do about a complaint of sbatch or srun; None for one that is not known."""
    return next((advice for pattern, advice in _REFUSALS if re.search(pattern, words)), None)


def pending(reason: str) -> str | None:
    """What to do about a pending job's reason that does not pass by waiting; None for all others."""
    row = _row(reason)
    return None if row is None else row[2]


def never_starts(reason: str) -> bool:
    """Whether a job that waits for this reason waits for ever, as far as Slurm's own words tell."""
    row = _row(reason)
    return row is not None and row[1] is Clears.NEVER


def _row(reason: str) -> tuple[str, Clears, str] | None:
    """The row of a reason, or of the worst of several (`; ` between those of components)."""
    words = reason.split("; ")
    found = [row for word in words for row in PENDING if re.match(row[0], word)]
    return next((row for row in found if row[1] is Clears.NEVER), found[0] if found else None)
