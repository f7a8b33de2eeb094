"""Small facts about processes from /proc: identity by pid and start time, environment, waiting for the end.

A pid alone may be somebody else's by the time it is used, and a dead daemon may linger as a zombie that
`kill -0` calls alive. Everything here therefore compares the start time and reads the state letter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Proc:
    """One process, told apart from a later one with the same pid by its start time (clock ticks since boot)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Proc | None:
        """The living process with this pid, or None when there is none (a zombie is none)."""
        stat = _stat(pid)
        return None if stat is None or stat[0] in "ZX" else cls(pid, stat[1])

    @property
    def alive(self) -> bool:
        """True while this very process runs."""
        return Proc.of(self.pid) == self

    def send(self, sig: int) -> None:
        """Signal the process if it still is the same one."""
        if self.pid > 1 and self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def environ(self) -> dict[str, str]:
        """The environment the process was started with; empty when it may not be read."""
        try:
            with open(f"/proc/{self.pid}/environ", "rb") as stream:
                raw = stream.read()
        except OSError:
            return {}
        pairs = (entry.split(b"=", 1) for entry in raw.split(b"\0") if b"=" in entry)
        return {os.fsdecode(key): os.fsdecode(value) for key, value in pairs}

    def comm(self) -> str:
        """The kernel's short name of the process."""
        try:
            with open(f"/proc/{self.pid}/comm", encoding="utf-8", errors="replace") as stream:
                return stream.read().strip()
        except OSError:
            return ""


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (fields[0], int(fields[19])) if len(fields) > 19 else None


def processes() -> Iterator[Proc]:
    """Every living process but this one."""
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            found = Proc.of(int(name))
            if found is not None:
                yield found


def wait_gone(procs: Iterable[Proc], seconds: float) -> list[Proc]:
    """Wait until all are gone or the time is over; returns the ones that still live."""
    deadline = time.monotonic() + seconds
    left = [proc for proc in procs if _still(proc)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [proc for proc in left if _still(proc)]
    return left


def end(procs: Iterable[Proc], *, term_seconds: float) -> list[Proc]:
    """TERM, wait, KILL, wait; returns what could not be ended."""
    procs = list(procs)
    for proc in procs:
        proc.send(signal.SIGTERM)
    left = wait_gone(procs, term_seconds)
    for proc in left:
        proc.send(signal.SIGKILL)
    return wait_gone(left, 5.0)


def _still(proc: Proc) -> bool:
    with contextlib.suppress(ChildProcessError, OSError):
        os.waitpid(proc.pid, os.WNOHANG)  # reaps it if it is a child of this process
    return proc.alive
