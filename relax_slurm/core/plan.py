"""The vocabulary of a plan: immutable, serialisable values that every other room reads.

Nothing here decides; `core.placement` fills these in, `core.binding` adds what the nodes reported.
All indexes count from 0. A *node* inside a plan is `(pool, node)` with `node` relative to its pool, because
hostnames are known only once Slurm has placed the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

PLAN_VERSION = 1


class Role(StrEnum):
    """An inference role: one set of HTTP routes, one discovery snapshot, one lease."""

    ROLLOUT = "rollout"
    """The policy that is being trained."""
    GENRM = "genrm"
    """A generative reward model (judge)."""
    TEACHER = "teacher"
    """A distillation teacher."""


class Mode(StrEnum):
    """How inference roles share GPUs."""

    DECOUPLED = "decoupled"
    """Each role has a pool of its own."""
    SPLIT = "split"
    """Disjoint slices of the actor pool."""
    DEFER = "defer"
    """The same bundles in different phases, one lease at a time."""


class WorkerType(StrEnum):
    """What one engine process does."""

    REGULAR = "regular"
    """Prefill and decode in one engine."""
    PREFILL = "prefill"
    """Prefill half of a disaggregated pair; never published."""
    DECODE = "decode"
    """Decode half of a disaggregated pair; never published."""
    PLACEHOLDER = "placeholder"
    """Holds bundles, starts nothing."""


class RouteMode(StrEnum):
    """How requests reach a model."""

    DIRECT = "DIRECT"
    """Straight to a replica's head."""
    SGLANG_ROUTER = "SGLANG_ROUTER"
    """Through the model's sglang-router."""


class WeightSource(StrEnum):
    """Where a model's weights come from."""

    STATIC = "STATIC"
    """Loaded once; any update is refused (judges and teachers)."""
    ACTOR = "ACTOR"
    """Updated by the trainer."""
    DCS = "DCS"
    """Updated through a distributed checkpoint service."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """GPUs of one Slurm component. `component` is its het-group index (0 for a single job)."""

    name: str
    component: int
    nodes: int
    gpus_per_node: int
    gpu_type: str | None = None
    first_node: int = 0
    """Offset of the pool's first node inside its component's node list (non-zero for a single job)."""


@dataclass(frozen=True, slots=True)
class ComponentPlan:
    """One component of the job: nodes that look alike. A CPU-only head component has `gpus_per_node == 0`."""

    index: int
    name: str
    nodes: int
    gpus_per_node: int
    gpu_type: str | None = None
    partition: str | None = None
    cpus_per_node: int | None = None
    mem: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerPorts:
    """Offsets into the node's port block; the block's start is chosen on the node (docs/protocol.md,
    Ports)."""

    guard: int
    """The admission guard: the only port that is published."""
    http: int
    """The engine's own HTTP port, bound to loopback for a single-node replica."""
    nccl: int
    rendezvous: int
    """`dist_init_addr` port; SGLang also takes the ports right above it, which the stride leaves free."""
    bootstrap: int
    """PD disaggregation bootstrap port."""
    second_guard: int
    """The guard's port in every second generation: an engine that was built again has another URL, so that nothing
    that was meant for its predecessor reaches it."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One engine process on one node."""

    pool: str
    node: int
    node_rank: int
    """Rank of this worker inside its replica; rank 0 is the head."""
    gpus: tuple[int, ...]
    """GPU slots on the node, ascending and contiguous, 0-based within the pool's share of that node."""
    ports: WorkerPorts


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One logical engine. `replica_id` is stable: `{model}/replica-{index}`."""

    replica_id: str
    role: Role
    model: str
    index: int
    worker_type: WorkerType
    bundles: tuple[int, ...]
    """Bundle indexes in the pool."""
    workers: tuple[WorkerPlan, ...]
    """One per node, rank 0 (the head) first; empty for a placeholder."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Engines of one kind inside a model: replicas `first_replica` to `first_replica + replicas - 1`."""

    worker_type: WorkerType
    gpus: int
    gpus_per_engine: int
    first_replica: int
    replicas: int
    engine_args: dict[str, Any]
    """SGLang arguments of these engines: the model's, with the group's on top."""


@dataclass(frozen=True, slots=True)
class ExternalPlan:
    """One engine that somebody else runs. `engine_id` is stable: `{model}/external-{index}`."""

    engine_id: str
    url: str
    key_env: str | None = None
    """Where its token is; the token itself is in no file of ours."""
    key_file: str | None = None


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model of a role with its replicas; `engine_args` go to SGLang untouched."""

    role: Role
    name: str
    model_path: str
    served_model_name: str
    route_mode: RouteMode
    weight_source: WeightSource
    gpus_per_engine: int
    engine_args: dict[str, Any]
    replicas: tuple[ReplicaPlan, ...]
    groups: tuple[GroupPlan, ...] = ()
    external: tuple[ExternalPlan, ...] = ()
    """Engines of others instead of replicas: such a model has no GPUs, and `model_path` may be empty."""

    def engine_args_of(self, replica: ReplicaPlan) -> dict[str, Any]:
        """SGLang arguments of one replica: those of its group."""
        for group in self.groups:
            if group.first_replica <= replica.index < group.first_replica + group.replicas:
                return group.engine_args
        return self.engine_args


@dataclass(frozen=True, slots=True)
class RolePlan:
    """One role: where it sits, when it may be resident and how requests choose among its models."""

    role: Role
    pool: str
    """Empty when all its models are external."""
    offset: int
    """First bundle of the role in its pool."""
    gpus: int
    phase: int
    """Roles with equal phase may be resident together; in defer each role has its own phase."""
    deferred: bool
    default_model: str
    route_key_map: dict[str, str]
    aliases: dict[str, str]
    policy: str
    models: tuple[ModelPlan, ...]
    offload: bool = False
    """Whether its engines run with the memory saver, so that they can give their memory back."""


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """Bundles that training itself uses; no process of ours runs there."""

    pool: str
    gpus: int
    components: dict[str, int] = field(default_factory=dict)
    """GPU budget per training component: actor, critic, reference, actor_fwd."""


@dataclass(frozen=True, slots=True)
class PortWindow:
    """Ports a node may use: a node takes the first free block of `span` ports inside `[first, last]`."""

    first: int
    last: int
    span: int


@dataclass(frozen=True, slots=True)
class InferencePlacementPlan:
    """The whole plan. `placement.plan()` makes it, `to_json`/`from_json` in `core.placement_json` carry
    it."""

    version: int
    run: str
    mode: Mode
    job_shape: str
    """`het` or `single` (resolved; never `auto`)."""
    head_component: int | None
    """Index of the CPU-only head component; None when the head is the first node of component 0."""
    components: tuple[ComponentPlan, ...]
    pools: tuple[PoolPlan, ...]
    roles: tuple[RolePlan, ...]
    training: TrainingPlan | None
    ports: PortWindow
    engine: str
    """`sglang` or `sim`."""

    def pool(self, name: str) -> PoolPlan:
        """The pool called `name`; KeyError if there is none."""
        for pool in self.pools:
            if pool.name == name:
                return pool
        raise KeyError(name)

    def role(self, role: Role) -> RolePlan | None:
        """The role's plan, or None when the run does not have it."""
        return next((entry for entry in self.roles if entry.role is role), None)

    def model_placement(self, role: Role, model: str) -> ModelPlan:
        """The slice of one model: what an InferenceManager asks for. KeyError if there is none."""
        for entry in self.roles:
            if entry.role is role:
                for candidate in entry.models:
                    if candidate.name == model:
                        return candidate
        raise KeyError(f"{role}/{model}")
