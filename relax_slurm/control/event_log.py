"""events.jsonl as the coordinator writes it: never in the way of the loop, and never without a bound.

The run directory is on a shared file system, where one write may take as long as a beat. Lines are therefore collected
and written by a thread, many at a time. A log that cannot be written costs its lines and nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)
FILE = "events.jsonl"
EARLIER = "events.1.jsonl"
MAX_BYTES = 64 * 2**20
MAX_WAITING = 65_536


def line_of(event: Mapping[str, Any]) -> bytes:
    """One event with its time (Unix, milliseconds kept) as one line."""
    return json.dumps({"time": round(time.time(), 3), **event}, sort_keys=True).encode() + b"\n"


def append(folder: Path, lines: bytes) -> None:
    """Add whole lines to the file; OSError when that is not possible. What is appended does not mix with others."""
    descriptor = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        while lines:
            lines = lines[os.write(descriptor, lines) :]
    finally:
        os.close(descriptor)


class EventLog:
    """The writer inside an event loop. `add` never blocks; `run` is the task that writes."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES, max_waiting: int = MAX_WAITING) -> None:
        self.lost = 0
        """Lines that could not be kept or written."""
        self._folder, self._max_bytes, self._max_waiting = folder, max_bytes, max_waiting
        self._waiting: deque[bytes] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._wanted = asyncio.Event()

    def add(self, event: Mapping[str, Any]) -> None:
        """Take one event; it gets its time now and its place in the file soon."""
        if len(self._waiting) >= self._max_waiting:
            self.lost += 1
            return
        self._waiting.append(line_of(event))
        self._wanted.set()

    async def run(self) -> None:
        """Write what comes, until cancelled."""
        while True:
            await self._wanted.wait()
            await self.flush()

    async def flush(self) -> None:
        """Return when everything taken so far is written. One batch after the other, whoever asks."""
        while True:
            if self._writing is None or self._writing.done():
                if not self._waiting:
                    return
                lines = list(self._waiting)
                self._waiting.clear()
                self._wanted.clear()
                self._writing = asyncio.create_task(asyncio.to_thread(self._write, lines))
            # Shielded: a batch that a thread writes already cannot be taken back.
            await asyncio.shield(self._writing)

    def _write(self, lines: list[bytes]) -> None:
        try:
            path = self._folder / FILE
            if path.exists() and path.stat().st_size > self._max_bytes:
                path.replace(self._folder / EARLIER)
            append(self._folder, b"".join(lines))
        except OSError as error:
            if not self.lost:
                log.warning("events are lost: %s: %s", self._folder / FILE, error.strerror)
            self.lost += len(lines)
