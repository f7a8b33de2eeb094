"""What the supervisor found out about the allocation, written once as `allocation.json` for the coordinator."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from relax_slurm.core.binding import AllocationFacts, Backend, HeadFacts
from relax_slurm.core.evidence import Proctrack
from relax_slurm.core.report import InterfaceAddress

FILE = "allocation.json"


class Allocation(BaseModel):
    """Nodes by component, the backend's own word on their GPUs, and the machine that we run on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Backend
    nodes: tuple[tuple[str, ...], ...]
    """Node names per component; a CPU-only head component is one of them."""
    job_ids: tuple[str, ...] = ()
    """Slurm job id per component; the first is the leader's."""
    batch_host: str | None = None
    gpu_indexes: dict[str, tuple[int, ...]] = Field(default_factory=dict)
    gpu_types: dict[str, str] = Field(default_factory=dict)
    gpu_counts: dict[str, int] = Field(default_factory=dict)
    """GPUs that a borrowed allocation has per node, where that is more than the plan wants."""
    first_gpu: dict[str, int] = Field(default_factory=dict)
    """Ordinal of the first GPU that this run uses, by node of a borrowed allocation."""
    proctrack: Proctrack = Proctrack.UNKNOWN
    head_hostname: str = ""
    head_boot_id: str = ""
    head_net_ns: str = ""
    head_address: str = "127.0.0.1"
    """What the head's sockets bind and what sidecars and clients connect to."""
    head_addresses: tuple[InterfaceAddress, ...] = ()
    gpu_components: tuple[int, ...] = ()
    """Components that carry pools: the ones whose nodes have a sidecar."""

    @property
    def node_names(self) -> tuple[str, ...]:
        """Every node that has a sidecar, in component order."""
        return tuple(name for index in self.gpu_components for name in self.nodes[index])

    def facts(self, interface: str | None = None) -> AllocationFacts:
        """The same for `core.binding.bind`; `interface` is the one that the user wants advertised."""
        return AllocationFacts(
            backend=self.backend,
            nodes=self.nodes,
            gpu_indexes=self.gpu_indexes,
            gpu_types=self.gpu_types,
            gpu_counts=self.gpu_counts,
            first_gpu=self.first_gpu,
            batch_host=self.batch_host,
            job_ids=frozenset(self.job_ids),
            interface=interface,
            head=HeadFacts(self.head_hostname, self.head_boot_id, self.head_net_ns, self.head_addresses),
        )
