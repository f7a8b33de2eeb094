"""Ending asyncio's child processes without spoiling what is known about their end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import Process


def signal_child(process: Process, number: signal.Signals) -> None:
    """Signal a child that is not known to have ended; one that has ended meanwhile is no error.

    `Process.send_signal` and `kill` poll the child first. That may reap it before asyncio's watcher does, and the
    watcher then reports 255 instead of the exit code (https://github.com/python/cpython/issues/87744).
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)


async def end_child(process: Process, seconds: float = 10.0) -> None:
    """End a child that is still there: asked first (SIGTERM), killed after `seconds`, waited for as long again."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is None:
            signal_child(process, number)
            waiting = asyncio.create_task(process.wait())
            await asyncio.wait({waiting}, timeout=seconds)
            waiting.cancel()
