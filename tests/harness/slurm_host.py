"""What the harness needs to know about this machine: programs, free ports, Slurm's version, cgroup folders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path


def missing_programs() -> list[str]:
    """The Slurm programs that this machine lacks (Debian: packages slurm-wlm and munge)."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    wanted = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")
    return [name for name in wanted if shutil.which(name, path=path) is None]


@contextlib.contextmanager
def port_lock() -> Iterator[None]:
    """Only one cluster of this user chooses ports at a time; held until its daemons listen."""
    path = Path(tempfile.gettempdir()) / f"slurm-harness-ports.{os.getuid()}.lock"
    with path.open("w", encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def free_ports(count: int) -> list[int]:
    """Ports on which nobody listens, outside the range the kernel hands out to clients."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as stream:
        low, high = (int(word) for word in stream.read().split())
    spread = os.getpid() % 97 * 16
    candidates = [port for port in [*range(12_000, 30_000), *range(61_001, 65_000)] if not low <= port <= high]
    found: list[int] = []
    for port in candidates[spread:] + candidates[:spread]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports outside the ephemeral range {low}-{high}")


def slurm_version() -> tuple[int, int]:
    text = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, timeout=10, check=False).stdout
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def remove_cgroups(nodes: Iterable[str]) -> None:
    """Remove the empty cgroup v1 folders that slurmd leaves behind, innermost first."""
    for node in nodes:
        for top in Path("/sys/fs/cgroup").glob(f"*/slurm_{node}"):
            for folder in sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            with contextlib.suppress(OSError):
                top.rmdir()
