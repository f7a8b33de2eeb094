"""Sections that describe the site and the tool itself: Slurm, gateway, control, ports, virtual nodes,
engine program."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue, ValidationInfo, field_validator, model_validator

from relax_slurm.config.base import Count, Directive, OptionLine, Seconds, Section, ShellLine, Text
from relax_slurm.config.hints import nearest
from relax_slurm.config.options import SBATCH, SRUN, owned

TIME_PATTERN = re.compile(r"(\d+-)?\d{1,6}(:\d{1,2}){0,2}")


class SlurmConfig(Section):
    """How the job is asked for. Values land in `#SBATCH` lines, so `hetjob`, `#`, spaces and newlines are
    refused."""

    partition: Directive | None = None
    """Partition of every component that names none itself."""
    account: Directive | None = None
    """Account that is charged."""
    qos: Directive | None = None
    """Quality of service."""
    constraint: Directive | None = None
    """Node feature expression, for instance `ib&nvme`."""
    reservation: Directive | None = None
    """Reservation to run in."""
    time: str = "1:00:00"
    """Time limit in Slurm's forms: minutes, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`. A plain number means
    minutes."""
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    """Which of the two options asks for GPUs; Slurm refuses both together."""
    exclusive: bool = False
    """Ask for whole nodes. GPUs are requested explicitly in any case, because steps do not get implicit
    ones."""
    extra_sbatch: tuple[OptionLine, ...] = ()
    """Further sbatch options, one per entry, such as `--mail-type=END`. Options that the tool writes are refused,
    however they are shortened, and so are those that change what submitting means."""
    extra_srun: tuple[OptionLine, ...] = ()
    """Further options of every node step. Those that say where and how often it runs, or which GPUs it gets, are
    refused."""
    setup: tuple[ShellLine, ...] = ()
    """Shell lines run first on the batch host, such as `module load cuda`."""
    template: Text | None = None
    """Path of a script template that replaces the shipped one."""
    requeue: bool = True
    """Let Slurm start the job again after a node failure or a preemption; each start is a new attempt."""
    comment: Directive | None = None
    """Job comment; the run's unique mark is appended to it."""
    signal_seconds: Annotated[int, Field(ge=30, le=86_400)] = 120
    """How long before the time limit Slurm warns us, so that the run can drain. Slurm may be up to 60 s
    off."""
    het_jobs: bool = True
    """False on sites that forbid heterogeneous jobs: `job_shape: auto` then asks for one homogeneous job."""
    command_seconds: Seconds = 30.0
    """Time limit of one call to sbatch, squeue, scontrol or scancel. A call that takes longer tells
    nothing."""
    interface: Directive | None = None
    """Network interface whose address nodes advertise, such as `ib0`; null takes the one that faces the head
    node."""
    queue_seconds: Seconds | None = None
    """How long `launch` waits for the job to start; null waits as long as the job is pending."""

    @field_validator("time", mode="before")
    @classmethod
    def _minutes(cls, value: Any) -> Any:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @field_validator("time")
    @classmethod
    def _time(cls, value: str) -> str:
        if not TIME_PATTERN.fullmatch(value) or value.strip("0-:") == "":
            raise ValueError("is not a Slurm time; write minutes, H:MM:SS or D-HH:MM:SS")
        return value

    @field_validator("extra_sbatch", "extra_srun")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            if not re.match(r"-[A-Za-z]|--[a-z]", line):
                raise ValueError(f"entry {line!r} is not an option; write it as --option=value")
        return value

    @field_validator("extra_sbatch", "extra_srun")
    @classmethod
    def _owned(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for line in value:
            found = owned(line, SBATCH if info.field_name == "extra_sbatch" else SRUN)
            if found is not None:
                option, instead = found
                why, nothing, reason = instead.partition("nothing: ")
                words = f"is refused: {reason}; remove it" if nothing else f"the tool writes itself; use {why}"
                raise ValueError(f"entry {line!r} sets {option}, which {words}")
        return value


class GatewayConfig(Section):
    """The HTTP gateway on the head node."""

    host: Text | None = None
    """Address to listen on. null listens on the head node's one advertised address (127.0.0.1 with the
    local backend),
    so that trainers on other nodes reach it and networks nobody asked for do not."""
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Port to listen on; null takes a free one and writes it to `endpoint.json`."""
    token: bool = True
    """Ask for a bearer token. False is accepted only when `host` is a loopback address."""
    max_body_mb: Annotated[float, Field(gt=0, le=4096)] = 64.0
    """Largest request body in MiB; larger ones are answered 413 without being read."""
    deadline_seconds: Seconds = 1800.0
    """Longest time one request may take; then 504."""
    doubt_seconds: Seconds = 20.0
    """How long a request may stay at an engine that discovery shows as UNKNOWN or gone; then 502, or a cut."""
    staleness_seconds: Seconds = 10.0
    """How old the last word of the coordinator may be before the gateway stops routing by it."""

    @field_validator("staleness_seconds")
    @classmethod
    def _heartbeats(cls, value: float) -> float:
        if value < 3:
            raise ValueError(
                "is less than three of the coordinator's heartbeats (one a second), so that one lost message would "
                "stop all routing; use 3 or more"
            )
        return value

    @model_validator(mode="after")
    def _open(self) -> GatewayConfig:
        if not self.token and not _is_loopback(self.host):
            raise ValueError(
                f"token is false while host is {self.host or 'null (open to other nodes)'}: anybody on "
                "the cluster could use the engines; set token: true or host: 127.0.0.1"
            )
        return self


def _is_loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return host is not None and ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class ControlConfig(Section):
    """Times of the control plane. Wrong combinations are refused, never adjusted."""

    beat_seconds: Seconds = 1.0
    """Time between two beats of a sidecar."""
    silence_seconds: Seconds = 10.0
    """After this long without a word a sidecar closes admission and the coordinator stops routing to it."""
    lost_seconds: Seconds = 60.0
    """After this long without a word the replicas of a node fail: they are stopped and built again once it is heard
    or its end is proven. Until then its GPUs stay fenced."""
    operation_seconds: Seconds = 180.0
    """Time limit of one onload, offload or other lease operation; when it passes the lease is blocked."""
    drain_seconds: Seconds = 30.0
    """How long requests in flight may go on once admission is closed."""
    bind_seconds: Seconds = 120.0
    """How long the coordinator waits for all binding reports."""
    foreign_memory_mb: Annotated[float, Field(ge=0, le=1_048_576)] = 1024.0
    """MiB that others may hold on a GPU of ours before the binding is refused: room for drivers and monitoring."""
    external_seconds: Seconds = 5.0
    """Time between two looks at an engine that somebody else runs; three failed looks in a row take it out."""
    allow_unverified: bool = False
    """Go on when a node's GPUs can be neither confirmed nor contradicted."""

    @model_validator(mode="after")
    def _inequalities(self) -> ControlConfig:
        if self.silence_seconds < 3 * self.beat_seconds:
            raise ValueError(
                f"silence_seconds is {self.silence_seconds:g} and beat_seconds {self.beat_seconds:g}: "
                f"silence must be at least three beats ({3 * self.beat_seconds:g} s), or one lost message "
                "fences a healthy node"
            )
        if self.lost_seconds <= self.silence_seconds:
            raise ValueError(
                f"lost_seconds is {self.lost_seconds:g} and silence_seconds {self.silence_seconds:g}: a silent node "
                "gets the time in between to come back; make lost_seconds larger"
            )
        if self.operation_seconds <= self.drain_seconds:
            raise ValueError(
                f"operation_seconds is {self.operation_seconds:g} and drain_seconds {self.drain_seconds:g}: "
                "an offload drains first and must then have time left to release; "
                "make operation_seconds larger"
            )
        if self.bind_seconds < self.silence_seconds:
            raise ValueError(
                f"bind_seconds is {self.bind_seconds:g} and silence_seconds {self.silence_seconds:g}: a node "
                "that is starting would be given up before it could count as silent; make bind_seconds larger"
            )
        return self


class PortsConfig(Section):
    """Which ports engines may use. Both null: 20000 to 29999, or the widest stretch outside the ephemeral
    range."""

    first: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """First port of the window."""
    last: Annotated[int, Field(ge=1, le=65_535)] | None = None
    """Last port of the window, included."""

    @model_validator(mode="after")
    def _order(self) -> PortsConfig:
        if (self.first is None) != (self.last is None):
            raise ValueError("names only one end of the window; give both first and last, or neither")
        if self.first is not None and self.last is not None and self.last < self.first:
            raise ValueError(f"last is {self.last} and first {self.first}; last must not be below first")
        return self


class LocalConfig(Section):
    """What the virtual nodes of the local backend pretend, to try out wrong bindings. Ignored on Slurm."""

    gpus: dict[str, tuple[int, ...] | str] = Field(default_factory=dict)
    """Node name to the GPU indexes it shows, or to a literal CUDA_VISIBLE_DEVICES text."""
    absent: tuple[str, ...] = ()
    """Nodes that never start."""


class HeadConfig(Section):
    """A CPU-only component for supervisor, coordinator and gateway; without it they share the first GPU
    node."""

    cpus: Count = 2
    """CPUs of the head component."""
    mem: Directive | None = None
    """Memory in Slurm's form, such as `8G`."""
    partition: Directive | None = None
    """Its partition; null takes `slurm.partition`."""


class SimConfig(Section):
    """The simulated engine. Other keys are handed to it as they are."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, JsonValue] = Field(init=False)

    seed: int = 0
    """Seed of everything it makes up; the same seed and request give the same answer."""
    tokens_per_second: Annotated[float, Field(gt=0)] = 2000.0
    """Speed of one request."""
    startup_seconds: Annotated[float, Field(ge=0)] = 0.2
    """Pretended loading time."""
    faults: tuple[dict[str, JsonValue], ...] = ()
    """Faults to inject, each a mapping that the simulator understands."""

    @model_validator(mode="after")
    def _typos(self) -> SimConfig:
        for key in self.model_extra or {}:
            close = nearest(key, type(self).model_fields, cutoff=0.8)
            if close:
                raise ValueError(f"has a key '{key}' that is probably a misspelt '{close}'; correct it")
        return self


class HealthConfig(Section):
    """When a living engine leaves routing and when it is given up (docs/operations.md, Health)."""

    every_seconds: Annotated[float, Field(ge=0.05, le=60)] = 1.0
    """Time between two looks at an engine that has work or is in doubt."""
    idle_seconds: Annotated[float, Field(ge=0.05, le=600)] = 5.0
    """Time between two looks at an engine that has nothing to do."""
    answer_seconds: Annotated[float, Field(ge=0.05, le=60)] = 2.0
    """How long the engine may take to answer a look."""
    generate_seconds: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """An engine that has had nothing to do for this long generates one token to prove that it can; 0 never asks."""
    mute_suspect: Count = 2
    """Looks in a row without any answer after which nothing new is routed there."""
    mute_failed: Count = 6
    """Looks in a row without any answer after which the replica fails and is built again."""
    stalled_suspect: Count = 5
    """Looks in a row that were answered while the work did not move, after which nothing new is routed there."""
    stalled_failed: Count = 20
    """The same, after which the replica fails and is built again. Raise it for kernels that compile for minutes."""

    @model_validator(mode="after")
    def _order(self) -> HealthConfig:
        for kind in ("mute", "stalled"):
            suspect, failed = getattr(self, f"{kind}_suspect"), getattr(self, f"{kind}_failed")
            if suspect >= failed:
                raise ValueError(
                    f"{kind}_suspect is {suspect} and {kind}_failed {failed}: an engine leaves routing before it is "
                    f"given up; make {kind}_failed larger"
                )
        return self


class EngineConfig(Section):
    """The program behind every replica."""

    program: Literal["sglang", "sim"] = "sglang"
    """`sglang`, or `sim`: a simulated engine that needs neither GPU nor model."""
    startup_seconds: Seconds = 120.0
    """How long an engine may take from start to healthy."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often a replica is built again within `restart_window_seconds` before it is given up."""
    restart_window_seconds: Seconds = 600.0
    """Window in which restarts are counted."""
    python: Text | None = None
    """Python interpreter that has SGLang on the compute nodes; null takes the one that runs the sidecar."""
    router_python: Text | None = None
    """Python interpreter that has sglang-router on the head node; null takes `python`, or the one that runs us."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the engines, on top of those of the node."""
    health: HealthConfig = HealthConfig()
    """Looks at running engines."""
    sim: SimConfig = SimConfig()
    """Settings of the simulated engine."""

    @model_validator(mode="after")
    def _times(self) -> EngineConfig:
        if self.program == "sim" and self.sim.startup_seconds >= self.startup_seconds:
            raise ValueError(
                f"startup_seconds is {self.startup_seconds:g} and sim.startup_seconds "
                f"{self.sim.startup_seconds:g}: the engine would be given up before it is up; "
                "make startup_seconds larger"
            )
        return self

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
                raise ValueError(f"has the key {key!r}, which is not a variable name; correct it")
            if key in {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} or key.startswith(("SLURM_", "RELAX_")):
                raise ValueError(f"sets {key}, which the tool or Slurm sets on every node; remove it")
        return value
