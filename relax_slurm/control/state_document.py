"""The state document: what `status --json`, `launch --json` and `top` show, made from the coordinator's state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_slurm.core.discovery import to_json
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import State

if TYPE_CHECKING:
    from relax_slurm.control.coordinator import Coordinator


def state_document(coordinator: Coordinator) -> dict[str, Any]:
    """One JSON-able document; the keys of docs/operations.md, Status."""
    run_dir, registry = coordinator.run_dir, coordinator.registry
    snapshots = {role.role: registry.snapshot(role.role) for role in coordinator.plan.roles}
    now = coordinator.clock()
    return {
        "run": run_dir.run,
        "attempt": run_dir.attempt,
        "epoch": coordinator.epoch,
        "state": str(coordinator.run.state),
        "reason": coordinator.run.reason,
        "gateway_url": coordinator.gateway_url,
        "token_file": str(run_dir.token_file),
        "run_dir": str(run_dir.path),
        "backend": str(coordinator.allocation.backend),
        "job_ids": list(coordinator.allocation.job_ids),
        "roles": {str(role): to_json(snapshot) for role, snapshot in snapshots.items() if snapshot is not None},
        **coordinator.leases.state(),
        "nodes": [
            {
                "node": link.name,
                "state": _node_state(link.identity is not None, link.silent, link.step_ended, link.incarnation),
                "heard_seconds_ago": round(now - link.last_heard, 2) if link.last_heard else None,
                "workers": [dict(vars(status)) for status in link.workers.values()],
            }
            for link in coordinator.links.nodes.values()
        ],
        "replicas": [
            {
                "replica": replica.engine_id,
                "role": str(manager.model.role),
                "model": manager.model.name,
                "state": _replica_state(replica),
                "generation": replica.generation,
                "base_url": replica.base_url,
                "reason": replica.why,
                "nodes": manager.nodes_of(replica.engine_id),
                "release_proven": replica.release_proven,
            }
            for manager in coordinator.managers.values()
            for replica in manager.replicas
        ],
        "routers": [
            {
                "role": str(router.role),
                "model": router.model,
                "url": router.url,
                "pid": router.pid,
                "workers": router.registered,
            }
            for router in coordinator.routers.all
        ],
        "moves": coordinator.moves.as_json(),
        "externals": coordinator.externals.rows(),
        "wire": {
            "garbage": coordinator.server.counters.garbage,
            "denied": coordinator.server.counters.denied,
            "undeliverable": coordinator.server.counters.undeliverable,
            "faults": coordinator.server.counters.faults,
            "events_lost": coordinator.events.lost,
        },
    }


def _replica_state(replica: Replica) -> str:
    """As the machine has it, and as discovery shows it when it is READY by the book only."""
    return str(replica.published().state if replica.state is State.READY else replica.state)


def _node_state(connected: bool, silent: bool, step_ended: str | None, incarnation: str) -> str:
    if step_ended is not None:
        return "ENDED"
    if not incarnation:
        return "AWAITED"
    return "SILENT" if silent or not connected else "UP"
