"""One connection pool per event loop: connections die with their loop, so loops must not share them."""

from __future__ import annotations

import asyncio

from relax_slurm.forward.upstream import Upstream, UpstreamLimits


class LoopPools:
    """Hands every running loop its own `Upstream`. Pools of closed loops are forgotten."""

    def __init__(self, limits: UpstreamLimits | None = None) -> None:
        self._limits = limits
        self._pools: dict[int, tuple[asyncio.AbstractEventLoop, Upstream]] = {}

    def here(self) -> Upstream:
        """The running loop's pool."""
        loop = asyncio.get_running_loop()
        held = self._pools.get(id(loop))
        if held is None or held[0] is not loop:
            for key in [key for key, (other, _) in list(self._pools.items()) if other.is_closed()]:
                self._pools.pop(key, None)
            held = self._pools[id(loop)] = (loop, Upstream(self._limits))
        return held[1]

    async def close(self) -> None:
        """Close the running loop's pool; a later `here` makes a new one."""
        held = self._pools.pop(id(asyncio.get_running_loop()), None)
        if held is not None:
            await held[1].close()
