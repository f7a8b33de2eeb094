"""What /proc says about our own processes. Processes of other users are reported by nobody and signalled
by nobody.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

PROC = "/proc"
_PF_KTHREAD = 0x00200000
_EXEC_LOOKS = 4
_EXEC_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """One live process of this user. `(pid, start_ticks)` names it for ever; a pid alone is reused."""

    pid: int
    start_ticks: int
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat."""
    session: int
    state: str
    name: str
    kernel: bool = False
    """A kernel thread: it has no memory of its own, hence no environment."""


def info(pid: int) -> ProcessInfo | None:
    """The process, or None when it is gone (a zombie is still there, with state Z)."""
    try:
        with open(f"{PROC}/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    # The name is in parentheses and may contain any character, so the last one counts.
    head, _, tail = text.rpartition(")")
    values = tail.split()
    return ProcessInfo(
        pid=pid,
        start_ticks=int(values[19]),
        session=int(values[3]),
        state=values[0],
        name=head.partition("(")[2],
        kernel=bool(int(values[6]) & _PF_KTHREAD),
    )


def alive(pid: int, start_ticks: int) -> bool:
    """Whether exactly this process still runs; a zombie holds nothing any more and counts as gone."""
    found = info(pid) if pid > 0 else None
    return found is not None and found.start_ticks == start_ticks and found.state not in "ZX"


def own_processes() -> list[ProcessInfo]:
    """Live processes of this user, without this process itself, zombies and kernel threads."""
    me, uid = os.getpid(), os.getuid()
    out: list[ProcessInfo] = []
    for entry in os.scandir(PROC):
        if not entry.name.isdigit() or int(entry.name) == me:
            continue
        try:
            mine = entry.stat().st_uid == uid
        except OSError:
            continue
        found = info(int(entry.name)) if mine else None
        if found is not None and found.state not in "ZX" and not found.kernel:
            out.append(found)
    return out


def environment(pid: int) -> frozenset[bytes]:
    """The `KEY=value` entries a process was started with; empty when they cannot be read."""
    try:
        with open(f"{PROC}/{pid}/environ", "rb") as file:
            return frozenset(file.read().split(b"\0"))
    except OSError:
        return frozenset()


def find_tagged(*tags: str) -> list[ProcessInfo]:
    """Processes of this user whose environment holds every one of `tags` (each `KEY=value`).

    In the middle of exec a process shows no environment for a moment, so an empty one is looked at again.
    """
    wanted = frozenset(tag.encode() for tag in tags)
    if not wanted:
        return []
    matching: list[ProcessInfo] = []
    unclear = own_processes()
    for _ in range(_EXEC_LOOKS):
        again: list[ProcessInfo] = []
        for found in unclear:
            entries = environment(found.pid)
            if wanted <= entries:
                matching.append(found)
            elif entries <= {b""} and alive(found.pid, found.start_ticks):
                again.append(found)
        if not again:
            break
        unclear = again
        time.sleep(_EXEC_SECONDS)
    return matching


def in_session(session: int) -> list[ProcessInfo]:
    """Processes of this user in a session; the id stays taken as long as one of them lives."""
    return [found for found in own_processes() if session > 0 and found.session == session]


def kill_exactly(target: ProcessInfo, signum: signal.Signals = signal.SIGKILL) -> None:
    """Signal that process and no other: the pidfd is opened first, then the start time is compared."""
    if target.pid <= 0:
        raise ValueError(f"pid {target.pid} is not a process")
    try:
        fd = os.pidfd_open(target.pid)
    except ProcessLookupError:
        return
    try:
        if alive(target.pid, target.start_ticks):
            signal.pidfd_send_signal(fd, signum)
    except ProcessLookupError:
        return
    finally:
        os.close(fd)
