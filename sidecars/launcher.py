"""Start a program that dies with its parent: `python -I -S launcher.py PARENT_PID PROGRAM ARGUMENT…`.

The kernel can send a signal to a process when its parent ends (PR_SET_PDEATHSIG). It must be asked for by the
child itself, between fork and exec. Running Python there (`preexec_fn`) can deadlock as soon as the parent
has a second thread, so this file is executed instead: it asks, makes sure that the parent was still alive
when it did, and becomes the program. Same pid, nothing left behind; a few milliseconds. Only the standard
library, no site packages.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for SIGKILL on the parent's death, then replace this process."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"launcher: prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        sys.exit("launcher: the parent was gone before the program could be tied to it")
    try:
        os.execvp(program[0], program)
    except OSError as error:
        sys.exit(f"launcher: cannot execute {program[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
