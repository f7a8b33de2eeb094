"""What ties the workers of one replica together: one TCP connection per follower to the head's rendezvous
port.

A worker that loses the connection knows that a peer is dead, as a real collective does after its timeout.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

Lost = Callable[[str], None]
Order = Callable[[str, Sequence[str]], None]
"""What a follower does with a memory call of the head: (call, tags)."""
_RETRY_SECONDS = 0.05
_HELLO_SECONDS = 10.0


class Collective:
    """Joins the workers of a replica. Keep it as long as the replica lives."""

    def __init__(self, address: str, nnodes: int, node_rank: int, lost: Lost, order: Order) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._nnodes = nnodes
        self._rank = node_rank
        self._lost = lost
        self._order = order
        self._writers: list[asyncio.StreamWriter] = []
        self._answers = asyncio.Semaphore(0)
        self._server: asyncio.Server | None = None
        self._ranks: set[int] = set()
        self._complete = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Return when every worker has joined. OSError when the head's port is taken."""
        if self._rank == 0:
            self._server = await asyncio.start_server(self._follower, self._host, self._port)
            await self._complete.wait()
        else:
            reader, writer = await self._connect()
            writer.write(b"%d\n" % self._rank)
            if await reader.readline() != b"joined\n":
                self._lost("the head of the replica refused this rank")
            self._watching = asyncio.create_task(self._obey(reader, writer))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_connection(self._host, self._port)
            except OSError:
                # The head starts at its own pace; whoever started us ends us when that takes too long.
                await asyncio.sleep(_RETRY_SECONDS)

    async def _follower(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HELLO_SECONDS):
                rank = int(await reader.readline())
            accepted = 0 < rank < self._nnodes and rank not in self._ranks
        except (TimeoutError, ValueError, OSError):
            accepted = False
        if not accepted:
            writer.close()
            return
        self._ranks.add(rank)
        self._writers.append(writer)
        writer.write(b"joined\n")
        if len(self._ranks) == self._nnodes - 1:
            self._complete.set()
        await self._watch(reader, f"worker of rank {rank}")

    async def tell(self, call: str, tags: Sequence[str]) -> None:
        """Make every follower do a memory call too; returns when all have, as a collective does."""
        line = json.dumps([call, list(tags)]).encode() + b"\n"
        for writer in self._writers:
            writer.write(line)
        for _ in self._writers:
            await self._answers.acquire()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A follower's side: do what the head says, until the head is gone."""
        try:
            while line := await reader.readline():
                call, tags = json.loads(line)
                self._order(call, tags)
                writer.write(b"done\n")
        except OSError:
            pass
        self._lost("collective: the head of the replica is gone")

    async def _watch(self, reader: asyncio.StreamReader, who: str) -> None:
        try:
            while await reader.readline():
                self._answers.release()
        except OSError:
            pass
        self._lost(f"collective: {who} is gone")
