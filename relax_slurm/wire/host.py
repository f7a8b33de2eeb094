"""What this machine says about itself: identity, addresses, the kernel's port range (Linux, IPv4).

Used on both ends: the coordinator describes the head node with it, a sidecar its own.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
from pathlib import Path

from relax_slurm.core.binding_types import HeadFacts
from relax_slurm.core.report import InterfaceAddress

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
NET_NS = Path("/proc/self/ns/net")

OPEN_FILES = 65_536

_SIOCGIFFLAGS, _SIOCGIFADDR, _SIOCGIFNETMASK = 0x8913, 0x8915, 0x891B
_IFF_UP = 1


def allow_many_files(wanted: int = OPEN_FILES) -> int:
    """Raise this process's limit of open files as far as it may, up to `wanted`; the limit that holds now.

    Every connection is one. The usual limit of 1,024 is a number of nodes, and of requests, that a run can have.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        return limit
    return soft


def boot_id(path: Path = BOOT_ID) -> str:
    """The kernel's id of this boot; empty where it is hidden."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def net_ns(path: Path = NET_NS) -> str:
    """The inode of our network namespace; empty where it is hidden."""
    try:
        return str(path.stat().st_ino)
    except OSError:
        return ""


def ephemeral_range(path: Path = PORT_RANGE) -> tuple[int, int] | None:
    """First and last port the kernel gives to outgoing connections; None where it is hidden."""
    try:
        first, last = path.read_text(encoding="ascii").split()
        return int(first), int(last)
    except (OSError, ValueError):
        return None


def interface_addresses() -> tuple[InterfaceAddress, ...]:
    """The IPv4 address of every interface that is up and has one."""
    found: list[InterfaceAddress] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", os.fsencode(name)[:15])

            def ask(code: int, request: bytes = request) -> bytes:
                return fcntl.ioctl(probe.fileno(), code, request)

            try:
                (flags,) = struct.unpack_from("H", ask(_SIOCGIFFLAGS), 16)
                address = socket.inet_ntoa(ask(_SIOCGIFADDR)[20:24])
                (mask,) = struct.unpack("!I", ask(_SIOCGIFNETMASK)[20:24])
            except OSError:
                continue  # no IPv4 address, or the interface went away meanwhile
            if flags & _IFF_UP:
                found.append(InterfaceAddress(interface=name, address=address, prefix=mask.bit_count()))
    return tuple(found)


def address_towards(host: str, port: int) -> str | None:
    """Our address on the way to `host`, as the kernel picks it; nothing is sent. None without a route."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind | socket.SOCK_CLOEXEC, protocol) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None


def head_facts() -> HeadFacts:
    """This machine as the head node, for `core.binding`."""
    return HeadFacts(hostname=socket.gethostname(), boot_id=boot_id(), net_ns=net_ns(), addresses=interface_addresses())
