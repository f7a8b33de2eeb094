"""Processes that must not outlive their supervisor ask the kernel for a signal when it ends."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "RELAX_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Ask for `number` when the parent ends; exit at once when it has ended already. Without a named parent nothing."""
    wanted = os.environ.get(PARENT_VARIABLE)
    if wanted is None:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != int(wanted):
        raise SystemExit(f"the supervisor (pid {wanted}) was gone before this process could be tied to it")


def parent_gone() -> bool:
    """Whether the named parent has ended, so that a signal just now was the kernel's and nobody's wish."""
    wanted = os.environ.get(PARENT_VARIABLE)
    return wanted is not None and os.getppid() != int(wanted)
