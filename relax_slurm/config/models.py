"""The typed run file. Every section is frozen and knows no keys but its own; `load.load()` makes one from
YAML.

Shape only: whether the roles fit the GPUs is `core.placement`'s business. Sections about the site are in
`config.site`.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, JsonValue, field_validator, model_validator

from relax_slurm.config.base import Count, Directive, Name, OptionLine, PathText, Section, Text
from relax_slurm.config.batch import BatchConfig
from relax_slurm.config.engine_args import normalise
from relax_slurm.config.site import (
    ControlConfig,
    EngineConfig,
    GatewayConfig,
    HeadConfig,
    HealthConfig,
    LocalConfig,
    PortsConfig,
    SimConfig,
    SlurmConfig,
)

RoleName = Literal["rollout", "genrm", "teacher"]
TrainingComponent = Literal["actor", "critic", "reference", "actor_fwd"]
ROLE_ORDER: tuple[RoleName, ...] = ("rollout", "genrm", "teacher")
"""Order of the running cursor in a split layout and of the phases in a deferred one."""


class PoolConfig(Section):
    """GPUs of one kind of node."""

    nodes: Count
    """Number of nodes."""
    gpus_per_node: Annotated[int, Field(ge=1, le=64)]
    """GPUs taken on each node."""
    gpu_type: Directive | None = None
    """GPU type as Slurm spells it, such as `h100`."""
    partition: Directive | None = None
    """Partition of this pool; null takes `slurm.partition`."""
    cpus_per_node: Count | None = None
    """CPUs taken on each node. null leaves it to Slurm, which gives one unless the partition has a default per GPU or
    `slurm.exclusive` takes whole nodes; engines need several."""
    mem: Directive | None = None
    """Memory per node in Slurm's form, such as `64G`; null leaves it out."""


class GroupConfig(Section):
    """Engines of one kind inside a model; needed only for prefill/decode disaggregation and for
    placeholders."""

    worker_type: Literal["regular", "prefill", "decode", "placeholder"] = "regular"
    """What the engines of the group do. A placeholder holds its bundles and starts nothing."""
    gpus: Count
    """GPU budget of the group."""
    gpus_per_engine: Count | None = None
    """GPUs of one engine; null takes the model's."""
    engine_args: dict[str, JsonValue] = Field(default_factory=dict)
    """SGLang arguments of this group, on top of the model's."""

    @field_validator("engine_args")
    @classmethod
    def _engine_args(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return normalise(value)


ROUTER_OWNED = {
    **dict.fromkeys(("--host", "--port", "--prometheus-host", "--prometheus-port"), "nothing: ports are planned"),
    **dict.fromkeys(("--worker-urls", "--prefill", "--decode"), "nothing: engines are registered when they are READY"),
    **dict.fromkeys(("--pd-disaggregation", "--mini-lb"), "groups with worker_type prefill and decode"),
    **dict.fromkeys(("--disable-retries", "--disable-circuit-breaker"), "nothing: both are always given"),
    **dict.fromkeys(
        ("--service-discovery", "--dp-aware", "--enable-igw", "--backend"), "nothing: one model per router"
    ),
    **dict.fromkeys(("--api-key", "--control-plane-api-keys"), "nothing: the run's engine key is used"),
    **dict.fromkeys(("--tls-cert-path", "--tls-key-path"), "nothing: the router speaks plain HTTP to the gateway"),
    "--policy": "router.policy",
    "--request-timeout-secs": "gateway.deadline_seconds",
    "--max-payload-size": "gateway.max_body_mb",
}
"""Options of sglang-router that the tool writes itself, and what to use instead."""
ROUTER_OWNED_FAMILIES = ("--retry-", "--cb-")
"""Beginnings of options that could switch repeating or breaking on again."""


class RouterConfig(Section):
    """The sglang-router of a model with route_mode SGLANG_ROUTER."""

    policy: Literal["cache_aware", "round_robin", "random", "power_of_two", "manual"] = "cache_aware"
    """How the router chooses among engines; `manual` keeps requests with the same X-SMG-Routing-Key on one engine."""
    extra_args: tuple[OptionLine, ...] = ()
    """Further options of sglang-router, one per entry, such as `--cache-threshold=0.5`. Options that the tool writes
    are refused."""

    @field_validator("extra_args")
    @classmethod
    def _extra_args(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            if not re.fullmatch(r"--[a-z][a-z0-9-]*(=.*)?", line):
                raise ValueError(f"entry {line!r} is not an option; write it as --option=value")
            option = line.partition("=")[0]
            # The router's parser takes shortened spellings too.
            owned = next((name for name in ROUTER_OWNED if name.startswith(option)), None)
            if owned is not None:
                raise ValueError(
                    f"entry {line!r} sets {owned}, which the tool writes itself; use {ROUTER_OWNED[owned]}"
                )
            if option.startswith(ROUTER_OWNED_FAMILIES):
                raise ValueError(f"entry {line!r} belongs to retries or the circuit breaker, which stay off; remove it")
        return value


_URL = re.compile(r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?(?:/[^\s?#]*)?", re.IGNORECASE)


class ExternalConfig(Section):
    """One engine that somebody else runs. It is asked for its health and for answers, and for nothing else. A plain URL
    may stand for the mapping."""

    url: Text
    """Base URL of its head: http(s), a host, no credentials, query or fragment."""
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = None
    """Environment variable of the head node with the bearer token that the engine wants."""
    api_key_file: PathText | None = None
    """File with that token, readable on the head node; whoever may read it can use the engine."""

    @field_validator("url")
    @classmethod
    def _bare(cls, value: str) -> str:
        try:
            parts = urlsplit(value)
            bad = parts.port == 0 or bool(parts.username or parts.password or parts.query or parts.fragment)
        except ValueError:
            bad = True
        if bad or not _URL.fullmatch(value):
            raise ValueError("is not a bare http(s)://HOST[:PORT]; remove credentials, query and fragment")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_key(self) -> ExternalConfig:
        if self.api_key_env and self.api_key_file:
            raise ValueError("names api_key_env and api_key_file; keep one")
        return self


class ModelConfig(Section):
    """One model of a role."""

    model_path: Text | None = None
    """What SGLang loads: a folder or a hub name. An external model needs none; a judge's messages are then rendered by
    its engine."""
    served_model_name: Text | None = None
    """Name the engine answers to; null takes the logical model name, so that no path is published."""
    gpus: Count | None = None
    """GPU budget. May be left out with one model, and by all models of a teacher, which then share evenly."""
    gpus_per_engine: Count | None = None
    """GPUs of one engine; null takes tp_size x pp_size of `engine_args`."""
    groups: tuple[GroupConfig, ...] = ()
    """Groups of engines; empty means one regular group."""
    route_mode: Literal["DIRECT", "SGLANG_ROUTER"] | None = None
    """How requests reach the model; null means DIRECT, or SGLANG_ROUTER with prefill and decode groups."""
    router: RouterConfig = RouterConfig()
    """The model's sglang-router; only with SGLANG_ROUTER."""
    weight_source: Literal["STATIC", "ACTOR", "DCS"] | None = None
    """Where weights come from; null means ACTOR for rollout and STATIC for the others, which take nothing
    else."""
    engine_args: dict[str, JsonValue] = Field(default_factory=dict)
    """SGLang arguments, passed untouched. `tp_size`, `tp-size` and `--tp-size` are the same key."""
    external: tuple[ExternalConfig, ...] = ()
    """Engines that somebody else runs. Such a model takes no GPUs here."""

    @field_validator("engine_args")
    @classmethod
    def _engine_args(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        return normalise(value)

    @field_validator("external", mode="before")
    @classmethod
    def _external(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        return tuple({"url": entry} if isinstance(entry, str) else entry for entry in value)

    @field_validator("external")
    @classmethod
    def _different(cls, value: tuple[ExternalConfig, ...]) -> tuple[ExternalConfig, ...]:
        if len({entry.url for entry in value}) < len(value):
            raise ValueError("names one URL twice; name every engine once")
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> ModelConfig:
        if self.model_path is None and not self.external:
            raise ValueError("has no model_path; name a folder or a hub name, or external engines")
        if self.external and self.route_mode == "SGLANG_ROUTER":
            raise ValueError(
                "names external engines and route_mode SGLANG_ROUTER; they are published DIRECT, remove it"
            )
        if self.external and (self.gpus or self.gpus_per_engine or self.groups or self.engine_args):
            raise ValueError("names external engines and also gpus, gpus_per_engine, groups or engine_args; keep one")
        disaggregated = any(group.worker_type in {"prefill", "decode"} for group in self.groups)
        routed = self.route_mode == "SGLANG_ROUTER" or (self.route_mode is None and disaggregated)
        if not routed and self.router != RouterConfig():
            raise ValueError("has router settings and no router; add route_mode: SGLANG_ROUTER or remove them")
        return self


class RoutingConfig(Section):
    """How a request of the role finds its model."""

    default_model: Name | None = None
    """Model of requests that name none; null is the only model, or the first one."""
    route_key_map: dict[str, Name] = Field(default_factory=dict)
    """Route key (for instance a data source) to model."""
    aliases: dict[str, Name] = Field(default_factory=dict)
    """Further names of models. An alias may not hide a model."""
    policy: Literal["round_robin", "affinity"] = "round_robin"
    """`affinity` makes the affinity key of a request mandatory."""


class RoleConfig(Section):
    """One inference role."""

    pool: Name | None = None
    """Pool whose bundles the role uses. Needed unless all its models are external."""
    models: dict[Name, ModelConfig]
    """Models by logical name."""
    gpus: Count | None = None
    """GPU budget of the role; null is the sum of its models' budgets."""
    offset: Annotated[int, Field(ge=0)] | None = None
    """First bundle in the pool; null is 0, or the place after the previous role in a split layout."""
    deferred: bool | None = None
    """Whether the role waits for its phase; null is true for genrm and teacher under `placement: defer`."""
    offload: bool | None = None
    """Whether its engines can give their memory back; null is true in shared layouts and false otherwise."""
    routing: RoutingConfig = RoutingConfig()
    """Routing rule."""

    @property
    def managed(self) -> dict[str, ModelConfig]:
        """Models whose engines the run starts itself."""
        return {name: model for name, model in self.models.items() if not model.external}

    @model_validator(mode="after")
    def _targets(self) -> RoleConfig:
        if not self.models:
            raise ValueError("has no models; name at least one under models")
        if self.pool is None and self.managed:
            raise ValueError(f"has no pool for its model {next(iter(self.managed))}; name one of the pools")
        if self.gpus is not None and not self.managed:
            raise ValueError("has gpus, but all its models are external and take none; remove it")
        known = ", ".join(self.models)
        targets = [("default_model", self.routing.default_model)] if self.routing.default_model else []
        targets += [(f"route_key_map.{key}", model) for key, model in self.routing.route_key_map.items()]
        targets += [(f"aliases.{key}", model) for key, model in self.routing.aliases.items()]
        for key, model in targets:
            if key in {"route_key_map.", "aliases."}:
                raise ValueError(f"has an empty key in routing.{key[:-1]}; name it")
            if model not in self.models:
                raise ValueError(f"has routing.{key}: '{model}', which is not one of its models ({known})")
        for alias in self.routing.aliases:
            if alias in self.models:
                raise ValueError(f"has the alias '{alias}', which hides a model of that name; rename it")
        return self


class TrainingConfig(Section):
    """GPUs that training itself uses. Split and deferred layouts share them and therefore need this
    section."""

    pool: Name
    """Pool of the actor."""
    gpus: Count
    """GPU budget of training."""
    components: dict[TrainingComponent, Count] = Field(default_factory=dict)
    """GPU budget per training component; empty means the actor takes all."""
    offload: bool = True
    """Whether training can give its memory back between steps."""


class RunConfig(Section):
    """Top-level keys. `name`, `placement`, `pools` and `roles` are needed."""

    name: Name
    """Name of the run, its folder and its job."""
    placement: Literal["decoupled", "split", "defer"]
    """How the inference roles share GPUs."""
    pools: dict[Name, PoolConfig]
    """Pools by name."""
    roles: dict[RoleName, RoleConfig]
    """Inference roles: rollout, genrm, teacher."""
    job_shape: Literal["auto", "het", "single"] = "auto"
    """One component per pool (`het`) or one homogeneous job (`single`). `auto` takes `single` when all
    pools ask for
    the same kind of node and there is no head component."""
    engine: EngineConfig = EngineConfig()
    """The program behind every replica."""
    head: HeadConfig | None = None
    """CPU-only head component; null shares the first GPU node."""
    training: TrainingConfig | None = None
    """GPUs of training."""
    batch: BatchConfig | None = None
    """How closed batches are made; null takes the defaults when batches are asked for."""
    slurm: SlurmConfig = SlurmConfig()
    """How the job is asked for."""
    gateway: GatewayConfig = GatewayConfig()
    """The HTTP gateway."""
    control: ControlConfig = ControlConfig()
    """Times of the control plane."""
    ports: PortsConfig = PortsConfig()
    """Ports of the engines."""
    local: LocalConfig = LocalConfig()
    """Pretences of the local backend's nodes."""
    cluster: Text | None = None
    """Path of a cluster file with site settings, relative to the run file."""
    runs_root: PathText | None = None
    """Folder of all runs on the shared file system; null is `~/.relax_slurm/runs`."""

    @model_validator(mode="after")
    def _whole(self) -> RunConfig:
        if not self.pools:
            raise ValueError("has no pools; name at least one under pools")
        if not self.roles:
            raise ValueError("has no roles; name at least one of rollout, genrm, teacher under roles")
        for name, role in self.roles.items():
            for model, entry in role.models.items():
                if name != "rollout" and entry.weight_source not in {None, "STATIC"}:
                    raise ValueError(
                        f"has roles.{name}.models.{model}.weight_source: {entry.weight_source}; "
                        f"a {name} never takes new weights, so it must be STATIC"
                    )
        return self

    def resolved_json(self) -> str:
        """The whole config, defaults filled in, as JSON text; `load.from_resolved()` reads it back
        unchanged."""
        return self.model_dump_json(indent=2) + "\n"


__all__ = [
    "ROLE_ORDER",
    "BatchConfig",
    "ControlConfig",
    "EngineConfig",
    "ExternalConfig",
    "GatewayConfig",
    "GroupConfig",
    "HeadConfig",
    "HealthConfig",
    "LocalConfig",
    "ModelConfig",
    "PoolConfig",
    "PortsConfig",
    "RoleConfig",
    "RoleName",
    "RouterConfig",
    "RoutingConfig",
    "RunConfig",
    "SimConfig",
    "SlurmConfig",
    "TrainingComponent",
    "TrainingConfig",
]
