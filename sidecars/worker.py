"""One engine process as the sidecar is told about it: everything that its command line is made of."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from relax_slurm.config.container import ContainerConfig
from relax_slurm.config.engine_args import normalise
from relax_slurm.core.engine_spec import spec_for
from relax_slurm.core.plan import Role, WeightSource, WorkerType
from relax_slurm.errors import ProtocolError

PROGRAMS = ("sglang", "sim")


@dataclass(frozen=True, slots=True)
class EnginePorts:
    """Absolute TCP ports of one worker; the node's block and the plan's offsets are already added up."""

    http: int
    nccl: int
    rendezvous: int
    """`dist_init_addr` of the replica; only rank 0 binds it (and, with DP attention, the seven above it)."""
    bootstrap: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One engine process. `from_wire` makes it out of a `start_worker` command, `to_wire` is its reverse."""

    worker_id: str
    """`{replica_id}#{node_rank}`, unique in the run: `policy/replica-0#0`."""
    replica_id: str
    role: Role
    model: str
    program: str
    """`sglang` or `sim`."""
    model_path: str
    served_model_name: str
    host: str
    """Address that the engine binds: loopback for a replica on one node, else an address its peers can
    reach.
    """
    ports: EnginePorts
    log_path: str
    run_tag: str
    """Carried in the environment of the engine and of everything it starts."""
    weight_source: WeightSource = WeightSource.STATIC
    worker_type: WorkerType = WorkerType.REGULAR
    nnodes: int = 1
    node_rank: int = 0
    rendezvous_host: str = "127.0.0.1"
    gpus: tuple[str, ...] = ()
    """What the engine may see, as CUDA_VISIBLE_DEVICES takes it: ordinals or UUIDs. Empty: a CPU engine."""
    gpu_indexes: tuple[int, ...] = ()
    """The same GPUs by physical index on the node; what memory meters and the ledger are asked about."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of the run file; what the tool sets itself wins over them."""
    memory_saver: bool = False
    api_key: str | None = field(default=None, repr=False)
    admin_key: str | None = field(default=None, repr=False)
    startup_seconds: float = 600.0
    sim: dict[str, Any] = field(default_factory=dict)
    """Options of the simulated engine; `sidecars.sim.options` is their schema."""
    python: str = sys.executable
    container: ContainerConfig | None = None
    """The image around the engine; None on the host. `python` is then the interpreter inside."""

    @property
    def base_url(self) -> str:
        """Where the engine's HTTP answers, for the sidecar beside it."""
        host = "127.0.0.1" if self.host in {"0.0.0.0", "::"} else self.host
        return f"http://[{host}]:{self.ports.http}" if ":" in host else f"http://{host}:{self.ports.http}"

    @property
    def has_weights_backup(self) -> bool:
        """Whether a released model keeps its weights in host memory and has them again after a resume.

        Static engines get the backup unless the run file says otherwise (`core.engine_spec`).
        """
        default = spec_for(self.role, self.weight_source).overrides.get("enable_weights_cpu_backup", False)
        return bool(normalise(self.engine_args).get("enable_weights_cpu_backup", default))

    @property
    def is_head(self) -> bool:
        """Whether this worker is the one that serves the replica's HTTP."""
        return self.node_rank == 0

    def to_wire(self) -> dict[str, Any]:
        """The spec as a map that msgpack and JSON can carry."""
        container = None if self.container is None else self.container.model_dump(mode="json")
        return {**asdict(self), "container": container}

    @classmethod
    def from_wire(cls, value: Mapping[str, Any]) -> WorkerSpec:
        """The spec in `value`; unknown fields are ignored, `ProtocolError` names what is missing or
        ill-typed.
        """
        known = {entry.name for entry in fields(cls)}
        data = {key: item for key, item in value.items() if key in known}
        who = str(data.get("worker_id", "?"))
        try:
            ports = {entry.name: int(data["ports"][entry.name]) for entry in fields(EnginePorts)}
            data["ports"] = EnginePorts(**ports)
            data["role"] = Role(data["role"])
            data["gpus"] = tuple(str(item) for item in data.get("gpus", ()))
            data["gpu_indexes"] = tuple(int(item) for item in data.get("gpu_indexes", ()))
            data["weight_source"] = WeightSource(data.get("weight_source", WeightSource.STATIC))
            data["worker_type"] = WorkerType(data.get("worker_type", WorkerType.REGULAR))
            if data.get("container") is not None:
                data["container"] = ContainerConfig.model_validate_json(json.dumps(data["container"]))
            spec = cls(**data)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(
                f"worker {who}: the start command is not usable ({error!r}); send every field of WorkerSpec"
            ) from error
        spec.validate()
        return spec

    def validate(self) -> None:
        """Raise `ProtocolError` when the fields contradict each other."""
        problems = [
            (
                self.program not in PROGRAMS,
                f"program is {self.program!r}, wanted one of {', '.join(PROGRAMS)}",
            ),
            (self.nnodes < 1, f"nnodes is {self.nnodes}, wanted 1 or more"),
            (
                not 0 <= self.node_rank < max(self.nnodes, 1),
                f"node_rank is {self.node_rank}, wanted 0 to {self.nnodes - 1}",
            ),
            (
                len(self.gpus) != len(self.gpu_indexes),
                f"{len(self.gpus)} visible GPUs but {len(self.gpu_indexes)} physical indexes",
            ),
            (len(set(self.gpu_indexes)) != len(self.gpu_indexes), f"a GPU twice in {self.gpu_indexes}"),
        ]
        for wrong, message in problems:
            if wrong:
                raise ProtocolError(f"worker {self.worker_id}: {message}; correct the start command")
