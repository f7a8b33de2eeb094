"""The reports of all nodes put together with plan and allocation: `core.binding.bind` with what the config says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_slurm.config.models import RunConfig
from relax_slurm.control.allocation import Allocation
from relax_slurm.core.binding import BoundPlan, bind
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.core.report import NodeReport
from relax_slurm.errors import ProtocolError


def bind_nodes(
    plan: InferencePlacementPlan,
    allocation: Allocation,
    config: RunConfig,
    reports: Mapping[str, dict[str, Any] | None],
    record: Callable[..., None],
) -> BoundPlan:
    """Bind the plan to what the nodes reported; `BindingMismatch` has the table.

    A report that cannot be read is recorded and counts as none.
    """
    read: dict[str, NodeReport] = {}
    for node, report in reports.items():
        if report is not None:
            try:
                read[node] = NodeReport.from_wire(report)
            except ProtocolError as error:
                record("bad_report", node=node, reason=error.message)
    return bind(
        plan,
        allocation.facts(interface=config.slurm.interface),
        read,
        allow_unverified=config.control.allow_unverified,
        memory_limit=int(config.control.foreign_memory_mb * 2**20),
    )
