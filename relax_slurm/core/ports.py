"""Port plan: where each worker's ports lie inside its node's block, and which window the block may come from.

The block's first port is held by the node's sidecar itself, so that two sidecars on one host never share a
block (docs/protocol.md, Ports). Then comes one stride per worker, in the order of the plan. All roles of a
node get strides, also those of different phases, because a sleeping engine keeps its ports.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from relax_slurm.core.placement_errors import PortEphemeral, PortOverflow, PortSpan
from relax_slurm.core.plan import PortWindow, WorkerPorts

MAX_PORT = 65_535
MIN_PORT = 1_024
DEFAULT_FIRST, DEFAULT_LAST = 20_000, 29_999
RESERVED = 1
"""Ports at the start of a block that no worker uses."""
ABOVE_RENDEZVOUS = 8
"""With DP attention SGLang takes dist_init_addr's port + 1 … + 5, and one more per data-parallel rank."""
_RENDEZVOUS = 5
_ROUND = 16


def stride(dp_size: int = 1) -> int:
    """Ports set aside for one worker whose engine has `dp_size` data-parallel ranks; a multiple of 16."""
    needed = _RENDEZVOUS + 1 + ABOVE_RENDEZVOUS + dp_size
    return -(-needed // _ROUND) * _ROUND


@cache
def worker_ports(start: int) -> WorkerPorts:
    """The named ports of the stride that begins at offset `start` of the block."""
    return WorkerPorts(
        guard=start,
        http=start + 1,
        nccl=start + 2,
        bootstrap=start + 3,
        second_guard=start + 4,
        rendezvous=start + _RENDEZVOUS,
    )


class NodePorts:
    """Hands out strides, node by node. Keeps who got which, so that an overflow can name the replica."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}
        self._taken: list[tuple[int, str, str, int]] = []
        self.span = RESERVED

    def take(self, pool: str, node: int, dp_size: int, replica_id: str) -> WorkerPorts:
        """Ports for one more worker on that node."""
        start = self._next.get((pool, node), RESERVED)
        end = start + stride(dp_size)
        self._next[pool, node] = end
        if end > self.span:
            self.span = end
            self._taken.append((end, replica_id, pool, node))
        return worker_ports(start)

    def first_beyond(self, offset: int) -> tuple[int, str, str, int]:
        """The worker whose stride is the first to reach past `offset`: (end of stride, replica, pool,
        node)."""
        return min(entry for entry in self._taken if entry[0] - 1 > offset)


def window(taken: NodePorts, first: int | None, last: int | None, ephemeral: tuple[int, int] | None) -> PortWindow:
    """The window of the plan, or a refusal.

    `first` and `last` are the run file's (both or neither); `ephemeral` is the kernel's range, both ends
    included, or None when it is not known.
    """
    if first is None or last is None:
        first, last = _choose(taken.span, ephemeral)
    elif first < MIN_PORT:
        raise PortEphemeral(
            f"ports.first is {first}, below {MIN_PORT}: the system reserves those ports; "
            f"choose one from {MIN_PORT} to {MAX_PORT}"
        )
    elif ephemeral and first <= ephemeral[1] and last >= ephemeral[0]:
        raise PortEphemeral(
            f"ports {first}-{last} overlap the ephemeral range {ephemeral[0]}-{ephemeral[1]}, from "
            "which the kernel "
            f"hands out ports to anybody; {_advice(taken.span, ephemeral)}"
        )
    if first + taken.span - 1 > MAX_PORT:
        end, replica, pool, node = taken.first_beyond(MAX_PORT - first)
        raise PortOverflow(
            f"port {first + end - 1} > {MAX_PORT} for replica {replica} on node {node} of pool {pool}: "
            "with ports.first "
            f"{first} a node needs {taken.span} ports; set ports.first to {MAX_PORT + 1 - taken.span} "
            "or lower"
        )
    if first + taken.span - 1 > last:
        end, replica, pool, node = taken.first_beyond(last - first)
        raise PortSpan(
            f"port {first + end - 1} > ports.last {last} for replica {replica} on node {node} of pool "
            f"{pool}: a node "
            f"needs {taken.span} ports and the window has {last - first + 1}; set ports.last to "
            f"{first + taken.span - 1} or higher"
        )
    return PortWindow(first=first, last=last, span=taken.span)


def _choose(span: int, ephemeral: tuple[int, int] | None) -> tuple[int, int]:
    clear = not ephemeral or ephemeral[0] > DEFAULT_LAST or ephemeral[1] < DEFAULT_FIRST
    if clear:
        return DEFAULT_FIRST, DEFAULT_LAST
    assert ephemeral is not None
    stretches = list(_outside(ephemeral))
    best = max(stretches, key=lambda pair: pair[1] - pair[0], default=None)
    if best is None or best[1] - best[0] + 1 < span:
        room = best[1] - best[0] + 1 if best else 0
        raise PortEphemeral(
            f"the ephemeral range {ephemeral[0]}-{ephemeral[1]} leaves at most {room} ports in a row "
            "and a node needs "
            f"{span}; ask for a narrower net.ipv4.ip_local_port_range or use fewer engines per node"
        )
    return best


def _advice(span: int, ephemeral: tuple[int, int]) -> str:
    fits = [f"{low}-{high}" for low, high in _outside(ephemeral) if high - low + 1 >= span]
    return f"use ports inside {' or '.join(fits)}" if fits else f"no stretch of {span} ports is left outside it"


def _outside(ephemeral: tuple[int, int]) -> Iterable[tuple[int, int]]:
    low, high = ephemeral
    if low - 1 >= MIN_PORT:
        yield MIN_PORT, low - 1
    if high + 1 <= MAX_PORT:
        yield max(high + 1, MIN_PORT), MAX_PORT
