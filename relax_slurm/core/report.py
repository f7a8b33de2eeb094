"""What a node says about itself before any engine starts: the binding report.

It crosses the wire as a plain map, so it is pydantic. Fields that are not known here are ignored, so a
newer sidecar can talk to an older coordinator. A report holds observations only; what they mean is decided
in `core.binding`.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from relax_slurm.errors import ProtocolError

REPORTED_VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "SLURMD_NODENAME",
    "SLURM_GPUS_ON_NODE",
    "SLURM_GPUS_PER_TASK",
    "SLURM_JOB_GPUS",
    "SLURM_JOB_ID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_STEP_GPUS",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_TASKS_PER_NODE",
)
"""The only environment variables that leave a node; anything else may hold a secret."""

Short = Annotated[str, Field(max_length=1024)]
Named = Annotated[str, Field(min_length=1, max_length=255)]
Bytes = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=1, le=65535)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)


class InterfaceAddress(_Part):
    """One address of one interface. `prefix` is the length of its network, None when it is not known."""

    interface: Named
    address: Short
    prefix: int | None = Field(default=None, ge=0, le=128)

    @field_validator("address")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return str(ip_address(value))


class ForeignProcess(_Part):
    """A process on a GPU that is not ours. `memory` is in bytes, None when NVML would not tell."""

    pid: int
    memory: Bytes | None = None


class GpuDevice(_Part):
    """One GPU (or MIG slice) as NVML enumerates it on the node."""

    ordinal: int = Field(ge=0)
    """Position in NVML's enumeration, which is PCI order; counts from 0 again when cgroups hide devices."""
    uuid: Short = Field(min_length=1)
    name: Short
    memory_total: Bytes
    memory_used: Bytes
    """Bytes in use by anybody, without what the driver reserves for itself where NVML can tell."""
    own_memory: Bytes = 0
    """Part of `memory_used` that our own engines hold; non-zero when a node reports again while it serves."""
    foreign: tuple[ForeignProcess, ...] = Field(default=(), strict=False, max_length=256)
    index: int | None = Field(default=None, ge=0)
    """Physical index, when the reporter knows it. NVML does not; `binding_node` matches Slurm's."""
    mig_parent: Short | None = None
    """UUID of the card a MIG slice is cut from; None for a whole GPU."""


class PortBlockReport(_Part):
    """The ports this node holds: `span` ports from `start` on."""

    start: Port
    span: int = Field(ge=1, le=65535)


class NodeReport(_Part):
    """Everything one node reports. `devices` is None where there is no NVML, empty where NVML sees no GPU."""

    node: Named
    """SLURMD_NODENAME, or the name of a virtual node."""
    hostname: Named
    boot_id: Short = ""
    """The kernel's boot id; empty when the node would not tell."""
    net_ns: Short = ""
    """Which network stack of that kernel: the inode of the process's network namespace."""
    pid: int = Field(ge=1)
    addresses: tuple[InterfaceAddress, ...] = Field(default=(), strict=False, max_length=256)
    towards_head: Short | None = None
    """The address the node's kernel uses to reach the head node."""
    environ: dict[Named, Annotated[str, Field(max_length=65536)]] = Field(default_factory=dict, max_length=64)
    """The variables of `REPORTED_VARIABLES` that are set."""
    virtual_gpus: tuple[int, ...] | None = Field(default=None, strict=False, max_length=1024)
    """Physical indexes that the local backend handed to this virtual node; None under Slurm."""
    devices: tuple[GpuDevice, ...] | None = Field(default=None, strict=False, max_length=1024)
    devices_note: Short = ""
    """Why `devices` is None."""
    port_block: PortBlockReport | None = None
    busy_ports: tuple[Port, ...] = Field(default=(), strict=False, max_length=256)
    """Ports that stood in the way while the block was looked for."""
    ephemeral_range: tuple[int, int] | None = Field(default=None, strict=False)
    """First and last port of the kernel's own range (`ip_local_port_range`)."""
    versions: dict[Named, Short] = Field(default_factory=dict, max_length=32)

    @field_validator("towards_head")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        return None if value is None else str(ip_address(value))

    @property
    def host(self) -> tuple[str, str, str]:
        """Which machine this is, as far as ports and addresses go; virtual nodes of one machine are equal."""
        return self.hostname, self.boot_id, self.net_ns

    @classmethod
    def from_wire(cls, body: dict[str, Any]) -> NodeReport:
        """Read the `report` of a `hello`; raises `ProtocolError` that names the first wrong field."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "report"
            raise ProtocolError(f"binding report of {body.get('node', '?')!r}: {where}: {first['msg']}") from None

    def to_wire(self) -> dict[str, Any]:
        """The map that goes into a `hello`; `from_wire` reads it back."""
        return self.model_dump(mode="json")
