"""All managers of a run, found by role and model, by node, or by worker: a beat must not search through the run."""

from __future__ import annotations

from collections.abc import ItemsView, ValuesView

from relax_slurm.control.manager import InferenceManager
from relax_slurm.core.plan import Role
from relax_slurm.wire.messages import WorkerStatus


class Managers:
    """Managers with the indexes that messages need. Filled once, when the run is bound."""

    def __init__(self) -> None:
        self._by_model: dict[tuple[Role, str], InferenceManager] = {}
        self._by_node: dict[str, list[InferenceManager]] = {}
        self._by_worker: dict[tuple[str, str], tuple[InferenceManager, str, int]] = {}

    def add(self, manager: InferenceManager) -> None:
        """Take in a manager."""
        self._by_model[manager.model.role, manager.model.name] = manager
        for worker_id, node, replica_id, rank in manager.worker_ids():
            self._by_worker[node, worker_id] = (manager, replica_id, rank)
            beside = self._by_node.setdefault(node, [])
            if manager not in beside:
                beside.append(manager)

    def __getitem__(self, key: tuple[Role, str]) -> InferenceManager:
        return self._by_model[key]

    def __len__(self) -> int:
        return len(self._by_model)

    def items(self) -> ItemsView[tuple[Role, str], InferenceManager]:
        """Role and model with their manager, in the plan's order."""
        return self._by_model.items()

    def values(self) -> ValuesView[InferenceManager]:
        """All managers, in the plan's order."""
        return self._by_model.values()

    def on_node(self, node: str) -> list[InferenceManager]:
        """Those that have a worker on the node."""
        return self._by_node.get(node, [])

    def on_status(self, node: str, status: WorkerStatus) -> None:
        """Hand a worker's status to its manager; one of a worker that the plan does not have there is ignored."""
        found = self._by_worker.get((node, status.worker_id))
        if found is not None:
            manager, replica_id, rank = found
            manager.on_status(replica_id, rank, status)
