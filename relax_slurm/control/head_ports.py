"""Which ports the head node's own sockets choose from: control, discovery, gateway, routers."""

from __future__ import annotations

from collections.abc import Iterable

HEAD_PORTS = 64
"""How many ports at the end of the window the head's sockets choose from."""


def head_ports(first: int, last: int, preferred: Iterable[int] = ()) -> list[int]:
    """Ports for the head's own sockets: those of an earlier start, then the window from its far end.

    Sidecars take their blocks from the near end, so the two rarely meet.
    """
    return [*preferred, *range(last, max(first, last - HEAD_PORTS), -1)]
