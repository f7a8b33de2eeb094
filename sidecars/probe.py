"""Collects what this node knows about itself into a `NodeReport`. Reads only; decides nothing.

The environment is an argument, so that a test, a virtual node and a real node take the same path.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from relax_slurm.core.report import REPORTED_VARIABLES, GpuDevice, NodeReport, PortBlockReport
from relax_slurm.errors import StartupFailed
from relax_slurm.wire.host import address_towards, boot_id, ephemeral_range, interface_addresses, net_ns
from sidecars.nvml import read_devices
from sidecars.port_block import PortBlock

PACKAGES = ("relax-slurm", "sglang", "torch")


@dataclass(frozen=True, slots=True)
class VirtualNode:
    """What the local backend says a virtual node is; its word replaces Slurm's variables."""

    name: str
    gpus: tuple[int, ...]
    """Physical indexes this node stands for; indexes of nothing when the GPUs are simulated."""
    mask: str | None = None
    """CUDA_VISIBLE_DEVICES of the node; None = not set."""
    simulated: bool = True
    """GPUs that do not exist: NVML is not asked, whatever this machine has."""


def probe(
    environ: Mapping[str, str],
    *,
    virtual: VirtualNode | None = None,
    head: tuple[str, int] | None = None,
    port_block: PortBlock | None = None,
    busy_ports: Sequence[int] = (),
    own_pids: Collection[int] = (),
) -> NodeReport:
    """The report of this node.

    `head` is the coordinator's host and port, to learn which of our addresses faces it. `own_pids` are
    engines that already run here. Raises `StartupFailed` when the environment names no node.
    """
    variables = {name: environ[name] for name in REPORTED_VARIABLES if name in environ}
    if virtual is not None:
        # A local run may be started from inside somebody's job: nothing of that job describes a virtual node.
        variables = {} if virtual.mask is None else {"CUDA_VISIBLE_DEVICES": virtual.mask}
        name = virtual.name
    else:
        name = variables.get("SLURMD_NODENAME", "")
    if not name:
        raise StartupFailed(
            "probe: SLURMD_NODENAME is not set, so this is not a Slurm step; start the sidecar with srun, "
            "or use the local backend"
        )
    devices: tuple[GpuDevice, ...] | None = None
    note = "simulated GPUs"
    if virtual is None or not virtual.simulated:
        devices, note = read_devices(own_pids)
    return NodeReport(
        node=name,
        hostname=socket.gethostname(),
        boot_id=boot_id(),
        net_ns=net_ns(),
        pid=os.getpid(),
        addresses=interface_addresses(),
        towards_head=None if head is None else address_towards(*head),
        environ=variables,
        virtual_gpus=None if virtual is None else virtual.gpus,
        devices=devices,
        devices_note=note[:1024],
        port_block=None if port_block is None else PortBlockReport(start=port_block.start, span=port_block.span),
        busy_ports=tuple(busy_ports or (port_block.busy_seen if port_block is not None else ()))[:256],
        ephemeral_range=ephemeral_range(),
        versions=_versions(),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
