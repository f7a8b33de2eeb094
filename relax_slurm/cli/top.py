"""`relax-slurm top [RUN]`: the state document once a second, over the control protocol."""

from __future__ import annotations

import argparse
import contextlib
import json
import time

from relax_slurm.cli.common import add_run_argument, state_of, the_run
from relax_slurm.cli.view import view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("--once", action="store_true", help="one look, without clearing the screen")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="pause between two looks")


def run(args: argparse.Namespace) -> int:
    """Exit 0, when the run is over or at Ctrl-C."""
    run_dir = the_run(args)
    if args.json or args.once:
        state = state_of(run_dir)
        print(json.dumps(state, indent=2) if args.json else view(state))
        return 0
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    state = state_of(run_dir)
    with contextlib.suppress(KeyboardInterrupt), Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(Text(view(state)), refresh=True)
            if state["state"] in ("STOPPED", "FAILED", "JOB_GONE", "JOB_ENDED"):
                break
            time.sleep(max(args.every, 0.2))
            state = state_of(run_dir)
    print(view(state))
    return 0
