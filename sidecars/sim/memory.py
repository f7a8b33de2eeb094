"""GPU memory of a simulated engine: which tags are resident, and what the ledger says about them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sidecars.ledger import GIB, NodeLedger
from sidecars.sim.options import FaultKind, ServerArgs, SimOptions
from sidecars.sim.protocol import Deadly

ALL_TAGS = ("weights", "kv_cache", "cuda_graph")
CONTEXT = "context"


class CardMemory:
    """Takes memory at the start, gives it back by tag, and keeps SGLang's own idea of what was released.

    The two differ on purpose: without a memory saver a release changes the idea and frees nothing.
    """

    def __init__(self, options: SimOptions, args: ServerArgs, graph_saver: bool) -> None:
        self._owner = options.owner
        self._gpus = options.gpus
        self._saver = args.enable_memory_saver
        self._graph_saver = graph_saver
        self._backup = args.enable_weights_cpu_backup
        slow = options.fault(FaultKind.SLOW_RELEASE)
        self._release_seconds = slow.value if slow else options.release_seconds
        self._stuck = options.fault(FaultKind.STUCK_RELEASE) is not None
        self._released: set[str] = set()
        self._pending: dict[str, asyncio.TimerHandle] = {}
        self._ledger: NodeLedger | None = None
        if options.ledger is not None:
            capacity = int(options.capacity_gib * GIB)
            self._ledger = NodeLedger(Path(options.ledger), options.node, capacity)
        static = options.capacity_gib * args.mem_fraction_static
        if options.fault(FaultKind.OOM_START):
            static = options.capacity_gib * 2
        sizes = {
            CONTEXT: options.context_gib,
            "weights": min(options.weights_gib, static),
            "kv_cache": max(static - options.weights_gib, 0.0),
            "cuda_graph": options.cuda_graph_gib,
        }
        self._sizes = {tag: int(gib * GIB) for tag, gib in sizes.items()}

    @property
    def released(self) -> frozenset[str]:
        """Tags that SGLang believes released, unknown ones included."""
        return frozenset(self._released)

    @property
    def usable(self) -> bool:
        """Whether a forward pass would find its memory."""
        return not (self._saver and self._released.intersection(ALL_TAGS))

    @property
    def has_weights(self) -> bool:
        """Whether weights could be written now."""
        return not (self._saver and "weights" in self._released)

    def start(self) -> None:
        """Take everything. `OutOfMemory` when it does not fit."""
        for tag in (CONTEXT, *ALL_TAGS):
            self._take(tag)

    def release(self, tags: Sequence[str]) -> None:
        """Release `tags` (none: all three). Memory becomes free now or later, as configured."""
        for tag in tags or ALL_TAGS:
            fresh = tag not in self._released
            self._released.add(tag)
            if fresh and self._frees(tag):
                loop = asyncio.get_running_loop()
                self._pending[tag] = loop.call_later(self._release_seconds, self._give, tag)
                if self._release_seconds == 0:
                    self._give(tag)

    def resume(self, tags: Sequence[str]) -> bool:
        """Take `tags` again; whether weights came back without their content.

        `Deadly` for a tag that is not released, `OutOfMemory` when somebody else has the memory now.
        """
        garbled = False
        for tag in tags or ALL_TAGS:
            if tag not in self._released:
                raise Deadly(f"KeyError: {tag!r} (resume_memory_occupation of a tag that is not released)")
            self._released.discard(tag)
            if self._frees(tag):
                self._give(tag)
                self._take(tag)
                garbled = garbled or (tag == "weights" and not self._backup)
        return garbled

    def close(self) -> None:
        """Give everything back; what the end of the process does anyway, without leaving lines in the
        file.
        """
        for handle in self._pending.values():
            handle.cancel()
        if self._ledger is not None:
            self._ledger.give(self._owner)

    def _frees(self, tag: str) -> bool:
        graph = tag != "cuda_graph" or self._graph_saver
        return self._saver and graph and not self._stuck and tag in ALL_TAGS

    def _take(self, tag: str) -> None:
        if self._ledger is not None and self._sizes[tag] > 0:
            self._ledger.take(self._owner, self._gpus, self._sizes[tag], tag)

    def _give(self, tag: str) -> None:
        handle = self._pending.pop(tag, None)
        if handle is not None:
            handle.cancel()
            if self._ledger is not None:
                self._ledger.give(self._owner, [tag])
