"""Start sglang-router: `ROUTER_PYTHON router_starter.py PARENT_PID ARGUMENT…`, run as a file, not as a module.

Two things that its own command line cannot do. The key comes out of the environment, which the kernel shows to the
same user only, and not out of the arguments, which every user of the machine can read. And the process is tied to its
parent's life: a coordinator that is killed leaves no router behind. Standard library and sglang_router only, because
the interpreter need not have anything of ours.
"""

import ctypes
import importlib
import os
import signal
import sys

KEY_VARIABLE = "RELAX_ROUTER_KEY"
NOT_INSTALLED = 69
"""Exit code when the interpreter has no sglang_router (EX_UNAVAILABLE)."""
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, then become the router."""
    parent, arguments = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("router_starter: the parent was gone before the router could be tied to it")
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if entry != here]  # our file names must not hide other packages
    # Where sglang is installed too, the router's Python part would import all of it, torch included, for a tracing
    # helper that it can do without: twenty seconds, and not possible on every head node.
    sys.modules["sglang"] = None  # type: ignore[assignment]
    try:
        launcher = importlib.import_module("sglang_router.launch_router")
    except ImportError as error:
        sys.stderr.write(f"router_starter: {sys.executable} has no sglang_router: {error}\n")
        sys.exit(NOT_INSTALLED)
    key = os.environ.pop(KEY_VARIABLE)
    launcher.launch_router(launcher.parse_router_args([*arguments, f"--api-key={key}"]))


if __name__ == "__main__":
    main()
