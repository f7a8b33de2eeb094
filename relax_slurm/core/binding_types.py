"""Values of the physical binding: what goes in beside the plan and the reports, and what comes out.

A GPU has three identities and they are never mixed: the *index* is physical (Slurm's `IDX`, counted over
the whole node), the *ordinal* is local (0..n-1 among the GPUs of our step), the *UUID* belongs to the
silicon. A *slot* is the plan's word for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter, ValidationError

from relax_slurm.core.binding_advice import advice
from relax_slurm.core.plan import ReplicaPlan, WorkerPlan
from relax_slurm.core.report import InterfaceAddress
from relax_slurm.errors import RelaxError

BOUND_VERSION = 1


class Backend(StrEnum):
    """Who gave us the GPUs."""

    SLURM = "slurm"
    """A Slurm job, ours or borrowed."""
    LOCAL = "local"
    """Virtual nodes on this machine."""


class Verdict(StrEnum):
    """What the sources together say about a node's GPUs."""

    CONFIRMED = "confirmed"
    """The step's own claim and at least one independent source agree, and none contradicts."""
    CONTRADICTED = "contradicted"
    """Two sources cannot both be right, or the node does not have what the plan wants."""
    CANNOT_VERIFY = "cannot_verify"
    """Nothing contradicts, but too little was seen; refused unless the user allows it."""


class Says(StrEnum):
    """What one source contributes."""

    CLAIMS = "claims"
    """The value that is being checked."""
    AGREES = "agrees"
    """An independent value that fits the claim."""
    CONTRADICTS = "contradicts"
    """A value that does not fit."""
    ABSENT = "absent"
    """Nothing to compare."""
    INHERITED = "inherited"
    """Copied from another node's environment, so it says nothing about this one."""


@dataclass(frozen=True, slots=True)
class Source:
    """One value that was looked at, as shown to the user."""

    name: str
    seen: str
    says: Says
    note: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """One row of the refusal table. Everything is text; empty means it does not apply."""

    node: str
    problem: str
    gpu: str = ""
    source: str = ""
    seen: str = ""
    wanted: str = ""

    def as_row(self) -> dict[str, str]:
        """The row as `BindingMismatch.rows` carries it."""
        return {
            "node": self.node,
            "gpu": self.gpu,
            "source": self.source,
            "seen": self.seen,
            "wanted": self.wanted,
            "problem": self.problem,
            "do": advice(self.problem),
        }


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """The machine the coordinator runs on, as it sees itself."""

    hostname: str
    boot_id: str = ""
    net_ns: str = ""
    addresses: tuple[InterfaceAddress, ...] = ()

    @property
    def host(self) -> tuple[str, str, str]:
        """Comparable with `NodeReport.host`."""
        return self.hostname, self.boot_id, self.net_ns


@dataclass(frozen=True, slots=True)
class AllocationFacts:
    """What the backend says about the allocation, independently of the nodes."""

    backend: Backend
    nodes: tuple[tuple[str, ...], ...]
    """Node names per component, in the backend's order; index = `ComponentPlan.index`."""
    gpu_indexes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Physical GPU indexes per node (`scontrol show job -d`); a node that is missing is unknown."""
    gpu_types: Mapping[str, str] = field(default_factory=dict)
    """GRES type per node where the allocation has one."""
    gpu_counts: Mapping[str, int] = field(default_factory=dict)
    """GPUs per node of a borrowed allocation, which may have more than the plan wants; a missing node has as many."""
    first_gpu: Mapping[str, int] = field(default_factory=dict)
    """Where the plan's GPUs begin among those of a borrowed node; 0 for a missing node."""
    batch_host: str | None = None
    """The node the batch script runs on: the only one whose SLURM_JOB_GPUS is its own."""
    job_ids: frozenset[str] = frozenset()
    """Ids of all components; empty = not known, then the job id of a report is not compared."""
    head: HeadFacts | None = None
    interface: str | None = None
    """Interface the user told us to advertise."""


@dataclass(frozen=True, slots=True)
class BoundGpu:
    """A slot with its three identities."""

    slot: int
    index: int
    ordinal: int
    uuid: str | None
    visible: str
    """This GPU's entry for CUDA_VISIBLE_DEVICES, in the kind of mask that the node itself was given."""
    number: int | None
    """The same entry as an integer for programs that cannot read UUIDs; None when nothing tells it."""


@dataclass(frozen=True, slots=True)
class BoundNode:
    """One node of one pool, found in the real world."""

    pool: str
    node: int
    name: str
    hostname: str
    boot_id: str
    address: str
    """What the node advertises to the head node and to its peers."""
    port_block_start: int
    gpus: tuple[BoundGpu, ...]
    verdict: Verdict
    sources: tuple[Source, ...]
    reason: str = ""
    """Why the verdict is not CONFIRMED."""

    def gpu_key(self, slot: int) -> str:
        """Stable name of the physical GPU behind a slot, which fences use: the UUID, else node and index."""
        gpu = self.gpus[slot]
        return gpu.uuid if gpu.uuid is not None else f"{self.name}/gpu{gpu.index}"


@dataclass(frozen=True, slots=True)
class BoundPorts:
    """Absolute ports of one worker; meanings as in `WorkerPorts`."""

    guard: int
    http: int
    nccl: int
    rendezvous: int
    bootstrap: int
    second_guard: int

    def guard_of(self, generation: int) -> int:
        """The guard's port of a generation: the two take turns."""
        return self.guard if generation % 2 else self.second_guard


@dataclass(frozen=True, slots=True)
class WorkerBinding:
    """Everything a node needs to start one engine process on the right GPUs."""

    node_name: str
    address: str
    visible: tuple[str, ...]
    """Entries for the engine's CUDA_VISIBLE_DEVICES, in the node's own kind of mask."""
    numbers: tuple[int, ...] | None
    """`visible` as integers, for engines that cannot parse UUIDs; None when they cannot be known."""
    indexes: tuple[int, ...]
    ordinals: tuple[int, ...]
    uuids: tuple[str | None, ...]
    ports: BoundPorts


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """The plan's nodes and slots, each with the machine and the GPU behind it. Only `bind` makes one."""

    nodes: tuple[BoundNode, ...]
    _by_place: dict[tuple[str, int], BoundNode] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_place", {(entry.pool, entry.node): entry for entry in self.nodes})

    def node(self, pool: str, node: int) -> BoundNode:
        """The node at that place of the plan; KeyError if there is none."""
        return self._by_place[pool, node]

    def worker_binding(self, worker: WorkerPlan) -> WorkerBinding:
        """Where and with which GPUs and ports a worker starts; KeyError for a worker of another plan."""
        place = self.node(worker.pool, worker.node)
        gpus = [place.gpus[slot] for slot in worker.gpus]
        numbers = [gpu.number for gpu in gpus if gpu.number is not None]
        start, ports = place.port_block_start, worker.ports
        return WorkerBinding(
            node_name=place.name,
            address=place.address,
            visible=tuple(gpu.visible for gpu in gpus),
            numbers=tuple(numbers) if len(numbers) == len(gpus) else None,
            indexes=tuple(gpu.index for gpu in gpus),
            ordinals=tuple(gpu.ordinal for gpu in gpus),
            uuids=tuple(gpu.uuid for gpu in gpus),
            ports=BoundPorts(
                guard=start + ports.guard,
                http=start + ports.http,
                nccl=start + ports.nccl,
                rendezvous=start + ports.rendezvous,
                bootstrap=start + ports.bootstrap,
                second_guard=start + ports.second_guard,
            ),
        )

    def rendezvous(self, replica: ReplicaPlan) -> tuple[str, int]:
        """Address and port at which the workers of a replica meet: those of its head."""
        head = self.worker_binding(replica.workers[0])
        return head.address, head.ports.rendezvous

    def worker_keys(self, worker: WorkerPlan) -> tuple[str, ...]:
        """Physical GPUs under a worker, as fence keys."""
        place = self.node(worker.pool, worker.node)
        return tuple(place.gpu_key(slot) for slot in worker.gpus)

    def gpu_keys(self, pool: str, bundles: Iterable[int]) -> tuple[str, ...]:
        """Physical GPUs under bundles of a pool, as fence keys; KeyError for an unknown bundle."""
        per_node = len(self.node(pool, 0).gpus)
        return tuple(self.node(pool, bundle // per_node).gpu_key(bundle % per_node) for bundle in bundles)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `bound.json`; `from_json` reads it back to an equal value."""
        return {"version": BOUND_VERSION, "nodes": _NODES.dump_python(self.nodes, mode="json")}

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> BoundPlan:
        """Read `to_json`; raises `RelaxError` for another version or damaged data."""
        if body.get("version") != BOUND_VERSION:
            raise RelaxError(f"bound plan: version {body.get('version')!r}, this program reads {BOUND_VERSION}")
        try:
            return cls(_NODES.validate_python(body.get("nodes")))
        except ValidationError as error:
            raise RelaxError(f"bound plan: {error.errors(include_url=False)[0]}; write it again") from None


_NODES: TypeAdapter[tuple[BoundNode, ...]] = TypeAdapter(tuple[BoundNode, ...])
