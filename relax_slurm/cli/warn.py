"""What is allowed and probably not meant: sentences that `plan` and `launch` show."""

from __future__ import annotations

from relax_slurm.config.models import RunConfig
from relax_slurm.core.plan import InferencePlacementPlan


def warnings(plan: InferencePlacementPlan, config: RunConfig) -> tuple[str, ...]:
    """One sentence per doubt, none for most plans."""
    return tuple(filter(None, (_few_cpus(plan, config),)))


def _few_cpus(plan: InferencePlacementPlan, config: RunConfig) -> str | None:
    """Slurm gives a task one CPU unless somebody says otherwise, and all engines of a node share it."""
    asked = " ".join(config.slurm.extra_sbatch)
    if config.slurm.exclusive or "--cpus-per-gpu" in asked:
        return None
    bare = [entry.name for entry in plan.components if entry.gpus_per_node and entry.cpus_per_node is None]
    if not bare:
        return None
    return (
        f"cpus_per_node is not set for {', '.join(bare)}: Slurm then gives one CPU (core) per node, shared by all its "
        f"engines, unless the partition has a default per GPU (DefCpuPerGPU) or gives whole nodes; set "
        f"pools.POOL.cpus_per_node, or slurm.exclusive: true for all CPUs of the nodes"
    )
