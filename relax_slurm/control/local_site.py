"""This machine as a cluster: every planned node is a virtual node with GPUs of its own that nobody else has."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence

from relax_slurm.config.models import RunConfig
from relax_slurm.control.allocation import Allocation
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.slurm_site import LOOPBACK, gpu_components
from relax_slurm.control.steps import LocalSteps, StepRunner
from relax_slurm.core.binding import Backend
from relax_slurm.core.evidence import Proctrack
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan
from relax_slurm.errors import ConfigError
from relax_slurm.wire.host import boot_id, interface_addresses, net_ns


def node_names(component: ComponentPlan) -> tuple[str, ...]:
    """Names of a component's virtual nodes: `{component}-{n}`, n from 0."""
    return tuple(f"{component.name}-{number}" for number in range(component.nodes))


class LocalSite:
    """Virtual nodes on the machine that we run on."""

    def __init__(self, run_dir: RunDir, config: RunConfig, plan: InferencePlacementPlan) -> None:
        self.absent = frozenset(config.local.absent)
        self._config, self._plan, self._run_dir = config, plan, run_dir
        self._nodes = {name: component for component in plan.components for name in node_names(component)}
        for name in (*config.local.gpus, *config.local.absent):
            if name not in self._nodes:
                known = ", ".join(self._nodes)
                raise ConfigError(f"local names the node {name!r}, which this plan does not have; it has {known}")

    async def allocate(self) -> Allocation:
        """See `Site.allocate`."""
        return Allocation(
            backend=Backend.LOCAL,
            nodes=tuple(node_names(component) for component in self._plan.components),
            batch_host=None,
            gpu_indexes={name: tuple(range(component.gpus_per_node)) for name, component in self._nodes.items()},
            proctrack=Proctrack.LOCAL,
            head_hostname=socket.gethostname(),
            head_boot_id=boot_id(),
            head_net_ns=net_ns(),
            head_address=LOOPBACK,
            head_addresses=interface_addresses(),
            gpu_components=gpu_components(self._plan),
        )

    def runner(self, environ: Mapping[str, str], command: Sequence[str]) -> StepRunner:
        """See `Site.runner`."""
        virtual = {name: self._pretence(name) for name in self._nodes}
        return LocalSteps(command=command, environ=environ, virtual=virtual)

    async def node_answers(self, node: str) -> bool:
        """A virtual node is this machine, which answers by definition."""
        return True

    def _pretence(self, name: str) -> dict[str, object]:
        told = self._config.local.gpus.get(name)
        gpus = tuple(range(self._nodes[name].gpus_per_node))
        if told is None:
            return {"name": name, "gpus": gpus, "mask": None}
        if isinstance(told, str):
            return {"name": name, "gpus": gpus, "mask": told}
        return {"name": name, "gpus": told, "mask": None}
