"""Rules that a plan must keep before its nodes are looked at, and questions about who sits where in it.

The planner keeps these rules too. They are checked again here because a plan is a file: it may have been
edited, or written by another version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from relax_slurm.core.binding_types import Problem
from relax_slurm.core.plan import InferencePlacementPlan, PoolPlan, ReplicaPlan, RolePlan, WorkerPlan

PORT_FIELDS = ("guard", "http", "nccl", "rendezvous", "bootstrap", "second_guard")


def replicas(plan: InferencePlacementPlan) -> Iterator[tuple[RolePlan, ReplicaPlan]]:
    """Every replica of the plan with its role."""
    for role in plan.roles:
        for model in role.models:
            for replica in model.replicas:
                yield role, replica


def workers_of(plan: InferencePlacementPlan, pool: str, node: int) -> list[tuple[ReplicaPlan, WorkerPlan]]:
    """The workers of one node of a pool."""
    return [
        (replica, worker)
        for _, replica in replicas(plan)
        for worker in replica.workers
        if (worker.pool, worker.node) == (pool, node)
    ]


def port_owners(plan: InferencePlacementPlan, pool: str, node: int) -> dict[int, str]:
    """Who uses which offset of a node's port block, as `replica_id field`, for messages about a busy port."""
    return {
        getattr(worker.ports, field): f"{replica.replica_id} {field}"
        for replica, worker in workers_of(plan, pool, node)
        for field in PORT_FIELDS
    }


def check_plan(plan: InferencePlacementPlan) -> list[Problem]:
    """Bundles, slices, workers and port offsets."""
    problems: list[Problem] = []
    pools = {pool.name: pool for pool in plan.pools}
    taken: dict[tuple[str, int, int], str] = {}
    for role in plan.roles:
        if not any(model.replicas for model in role.models):
            continue  # engines of others use no GPU of the plan
        pool = pools.get(role.pool)
        if pool is None:
            problems.append(_plan_problem(role.role, "the role's pool is not in the plan", role.pool, ", ".join(pools)))
            continue
        capacity = pool.nodes * pool.gpus_per_node
        if role.offset < 0 or role.offset + role.gpus > capacity:
            seen = f"bundles {role.offset}-{role.offset + role.gpus - 1}"
            problems.append(_plan_problem(role.role, "slice out of bounds", seen, f"0-{capacity - 1}"))
    for role, replica in replicas(plan):
        if role.pool in pools:
            problems += _check_bundles(role, replica, pools[role.pool], taken)
            problems += _check_workers(replica, pools[role.pool])
    return [*problems, *_check_offsets(plan)]


def _plan_problem(what: str, problem: str, seen: str, wanted: str) -> Problem:
    return Problem("(plan)", f"{what}: {problem}", source="plan", seen=seen, wanted=wanted)


def _check_bundles(
    role: RolePlan, replica: ReplicaPlan, pool: PoolPlan, taken: dict[tuple[str, int, int], str]
) -> Iterator[Problem]:
    capacity = pool.nodes * pool.gpus_per_node
    first, last = role.offset, role.offset + role.gpus - 1
    for bundle in replica.bundles:
        if not 0 <= bundle < capacity:
            yield _plan_problem(replica.replica_id, "unknown bundle", str(bundle), f"0-{capacity - 1}")
        elif not first <= bundle <= last:
            yield _plan_problem(replica.replica_id, "bundle outside the role's slice", str(bundle), f"{first}-{last}")
        other = taken.setdefault((role.pool, role.phase, bundle), replica.replica_id)
        if other != replica.replica_id:
            yield _plan_problem(
                replica.replica_id,
                f"bundle is also held by {other} in phase {role.phase}",
                str(bundle),
                "one holder",
            )
    for bundle, count in Counter(replica.bundles).items():
        if count > 1:
            yield _plan_problem(replica.replica_id, "duplicate bundle", f"{bundle} ({count} times)", "once")


def _check_workers(replica: ReplicaPlan, pool: PoolPlan) -> Iterator[Problem]:
    for worker in replica.workers:
        who = f"{replica.replica_id} worker {worker.node_rank}"
        seen = ",".join(map(str, worker.gpus))
        if worker.pool != pool.name or not 0 <= worker.node < pool.nodes:
            yield _plan_problem(
                who, "unknown node", f"{worker.pool}[{worker.node}]", f"{pool.name}[0-{pool.nodes - 1}]"
            )
        if not worker.gpus or list(worker.gpus) != list(range(worker.gpus[0], worker.gpus[0] + len(worker.gpus))):
            yield _plan_problem(who, "local GPU ids are not ascending and contiguous", seen, "such as 0,1,2")
        if any(not 0 <= slot < pool.gpus_per_node for slot in worker.gpus):
            yield _plan_problem(who, "the worker's GPUs are on two nodes", seen, f"within 0-{pool.gpus_per_node - 1}")
    if not replica.workers:
        return  # a placeholder holds bundles and starts nothing
    for node, count in Counter(worker.node for worker in replica.workers).items():
        if count > 1:
            yield _plan_problem(
                replica.replica_id, "the replica uses a node twice", f"{pool.name}[{node}]", "distinct nodes"
            )
    ranks = [worker.node_rank for worker in replica.workers]
    if ranks != list(range(len(ranks))):
        yield _plan_problem(replica.replica_id, "node ranks are not 0..n-1", str(ranks), str(list(range(len(ranks)))))
    used = sorted(worker.node * pool.gpus_per_node + slot for worker in replica.workers for slot in worker.gpus)
    if used != sorted(replica.bundles):
        yield _plan_problem(replica.replica_id, "workers and bundles disagree", str(used), str(sorted(replica.bundles)))


def _check_offsets(plan: InferencePlacementPlan) -> Iterator[Problem]:
    owner: dict[tuple[str, int, int], str] = {}
    for _, replica in replicas(plan):
        for worker in replica.workers:
            for field in PORT_FIELDS:
                offset = getattr(worker.ports, field)
                who = f"{replica.replica_id} worker {worker.node_rank} {field}"
                if not 1 <= offset < plan.ports.span:
                    yield _plan_problem(who, "port offset outside the block", str(offset), f"1-{plan.ports.span - 1}")
                other = owner.setdefault((worker.pool, worker.node, offset), who)
                if other != who:
                    yield _plan_problem(who, f"port offset is also used by {other}", str(offset), "one owner")
