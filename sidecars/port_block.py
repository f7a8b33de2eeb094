"""Takes a block of ports on this machine and keeps others of our kind out of it (docs/protocol.md, Ports).

The block's first port is held as a bound TCP socket that never listens. That alone keeps apart blocks of
one size; blocks of different sizes can overlap without sharing a first port, so one UDP port in every
`PITCH` is held too (and the last one): engines speak TCP only, and any two overlapping blocks of at least
`PITCH` ports then collide on a held port. Holding comes before checking, so of two sidecars that race at
least one sees the other.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from relax_slurm.core.plan import PortWindow
from relax_slurm.errors import StartupFailed

PITCH = 8
EVERYWHERE = "0.0.0.0"  # a port is free only if it is free on every address
MAX_NAMED = 16


@dataclass(slots=True)
class PortBlock:
    """A held block. Worker ports are `start` plus the plan's offsets, which begin at 1. Close it last."""

    start: int
    span: int
    busy_seen: tuple[int, ...] = ()
    """Ports that stood in the way before this block was found."""
    _held: list[socket.socket] = field(default_factory=list, repr=False)

    @property
    def last(self) -> int:
        """The last port of the block."""
        return self.start + self.span - 1

    @property
    def closed(self) -> bool:
        """Whether the block was given back."""
        return not self._held

    def busy_ports(self) -> list[int]:
        """Ports of the block that somebody took meanwhile; ask before our own engines start."""
        return [port for port in range(self.start + 1, self.last + 1) if not _free(port)]

    def close(self) -> None:
        """Give the block back. May be called twice."""
        while self._held:
            self._held.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bound(port: int, kind: socket.SocketKind, *, reuse: bool) -> socket.socket | None:
    """A socket bound to the port, or None if the port is in use."""
    found = socket.socket(socket.AF_INET, kind | socket.SOCK_CLOEXEC)
    try:
        if reuse:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((EVERYWHERE, port))
    except OSError as error:
        found.close()
        if error.errno in {errno.EADDRINUSE, errno.EACCES}:
            return None
        raise
    return found


def _free(port: int) -> bool:
    """Whether a server could listen here; with SO_REUSEADDR, so that TIME_WAIT does not count."""
    found = _bound(port, socket.SOCK_STREAM, reuse=True)
    if found is None:
        return False
    found.close()
    return True


def _unheld(port: int) -> bool:
    """Whether no other block holds this port's UDP twin."""
    found = _bound(port, socket.SOCK_DGRAM, reuse=False)
    if found is None:
        return False
    found.close()
    return True


def _try(start: int, span: int) -> tuple[list[socket.socket], list[int]]:
    """Hold a block and check it: the sockets when it is ours, else none and the ports in the way."""
    held: list[socket.socket] = []
    points = sorted({*range(start, start + span, PITCH), start + span - 1})
    busy: list[int] = []
    first = _bound(start, socket.SOCK_STREAM, reuse=False)
    if first is None:
        return [], [start]
    held.append(first)
    for port in points:
        point = _bound(port, socket.SOCK_DGRAM, reuse=False)
        if point is None:
            busy.append(port)
        else:
            held.append(point)
    if not busy:
        busy = [
            port
            for port in range(start + 1, start + span)
            if not _free(port) or (port not in points and not _unheld(port))
        ]
    if busy:
        for entry in held:
            entry.close()
        return [], busy
    return held, []


def take_port_block(
    window: PortWindow,
    *,
    ephemeral: tuple[int, int] | None = None,
    owners: Mapping[int, str] | None = None,
) -> PortBlock:
    """Take the first free block of the window that does not touch the kernel's ephemeral range.

    `owners` maps an offset to who would use it, for the message. Raises `StartupFailed` (detail: `busy`,
    the ports in the way) when no block is free; at most `(last - first + 1) // span` blocks are tried.
    """
    span = window.span
    seen: list[int] = []
    named: list[str] = []
    skipped = 0
    for start in range(window.first, window.last - span + 2, span):
        if ephemeral is not None and start <= ephemeral[1] and start + span - 1 >= ephemeral[0]:
            skipped += 1
            continue
        held, busy = _try(start, span)
        if held:
            return PortBlock(start, span, tuple(seen[:256]), held)
        seen += busy
        for port in busy[: MAX_NAMED - len(named)]:
            who = (owners or {}).get(port - start)
            named.append(f"{port} ({who})" if who else str(port))
    raise StartupFailed(_sentence(window, ephemeral, skipped, seen, named), detail={"busy": seen[:256]})


def _sentence(
    window: PortWindow, ephemeral: tuple[int, int] | None, skipped: int, seen: list[int], named: list[str]
) -> str:
    blocks = max(0, (window.last - window.first + 1) // window.span)
    text = f"no free block of {window.span} ports in {window.first}-{window.last} on {socket.gethostname()}"
    if ephemeral is not None and skipped:
        text += f", {skipped} of {blocks} blocks lie in the ephemeral range {ephemeral[0]}-{ephemeral[1]}"
    if seen:
        more = f" and {len(seen) - len(named)} more" if len(seen) > len(named) else ""
        text += f", busy: {', '.join(named)}{more}"
    if not blocks:
        text += f", the window holds only {max(0, window.last - window.first + 1)} ports"
    return f"{text}; free those ports or set a wider port window in the run file"
