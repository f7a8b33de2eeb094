"""Job shape: pools to components of one Slurm job."""

from __future__ import annotations

from relax_slurm.config.models import PoolConfig, RunConfig
from relax_slurm.core.placement_errors import HetJobShape, SingleJobShape
from relax_slurm.core.plan import ComponentPlan, PoolPlan

MAX_COMPONENTS = 128
"""Slurm's own limit (MAX_HET_JOB_COMPS)."""


def job_shape(config: RunConfig) -> str:
    """`het` or `single`. `auto` is single when all pools ask for the same kind of node and there is no
    head."""
    differing = _difference(config)
    if config.job_shape == "single" or (config.job_shape == "auto" and config.head is None and not differing):
        if config.head is not None:
            raise SingleJobShape("job_shape is single and there is a head component; remove head, or use het")
        if differing:
            raise SingleJobShape(f"job_shape is single, but {differing}; make the pools alike, or use het")
        return "single"
    components = len(config.pools) + (config.head is not None)
    if not config.slurm.het_jobs:
        why = differing or ("there is a head component" if config.head else "job_shape is het")
        raise HetJobShape(
            f"slurm.het_jobs is false on this site, but {why}; make the pools alike and leave head out, "
            "so that one homogeneous job does"
        )
    if components < 2:
        raise HetJobShape("job_shape is het with 1 component, which Slurm takes as an ordinary job; use single")
    if components > MAX_COMPONENTS:
        raise HetJobShape(f"the job has {components} components and Slurm takes at most {MAX_COMPONENTS}; merge pools")
    return "het"


def components(config: RunConfig, shape: str) -> tuple[tuple[ComponentPlan, ...], tuple[PoolPlan, ...], int | None]:
    """Components, pools and the head component's index.

    The head is component 0, because Slurm runs the batch script on the first node of component 0.
    """
    if shape == "single":
        return _single(config)
    parts: list[ComponentPlan] = []
    head = None
    if config.head is not None:
        head = 0
        parts.append(
            ComponentPlan(
                0,
                "head",
                1,
                0,
                None,
                config.head.partition or config.slurm.partition,
                config.head.cpus,
                config.head.mem,
            )
        )
    pools = []
    for name, pool in config.pools.items():
        index = len(parts)
        parts.append(_component(index, name, pool.nodes, pool, config))
        pools.append(PoolPlan(name, index, pool.nodes, pool.gpus_per_node, pool.gpu_type))
    return tuple(parts), tuple(pools), head


def _single(config: RunConfig) -> tuple[tuple[ComponentPlan, ...], tuple[PoolPlan, ...], int | None]:
    first = 0
    pools = []
    for name, pool in config.pools.items():
        pools.append(PoolPlan(name, 0, pool.nodes, pool.gpus_per_node, pool.gpu_type, first))
        first += pool.nodes
    shape = next(iter(config.pools.values()))
    names = "+".join(config.pools)
    return (_component(0, names, first, shape, config),), tuple(pools), None


def _component(index: int, name: str, nodes: int, pool: PoolConfig, config: RunConfig) -> ComponentPlan:
    return ComponentPlan(
        index=index,
        name=name,
        nodes=nodes,
        gpus_per_node=pool.gpus_per_node,
        gpu_type=pool.gpu_type,
        partition=pool.partition or config.slurm.partition,
        cpus_per_node=pool.cpus_per_node,
        mem=pool.mem,
    )


def _difference(config: RunConfig) -> str:
    """The first way in which two pools ask for different nodes, in words; empty when they do not."""
    (first, reference), *others = config.pools.items()
    for name, pool in others:
        for key in ("gpus_per_node", "gpu_type", "partition", "cpus_per_node", "mem"):
            left, right = getattr(reference, key), getattr(pool, key)
            if left != right:
                return f"pools.{first}.{key} is {_or_null(left)} and pools.{name}.{key} is {_or_null(right)}"
    return ""


def _or_null(value: object) -> str:
    return "null" if value is None else str(value)
