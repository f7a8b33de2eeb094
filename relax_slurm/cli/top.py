"""`relax-slurm top [RUN]`: the state document once a second, over the control protocol."""

from __future__ import annotations

import argparse
import json
import time

from relax_slurm.cli.common import add_run_argument, state_of, the_run
from relax_slurm.cli.interrupted import told
from relax_slurm.cli.status import OVER
from relax_slurm.cli.view import view


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("--once", action="store_true", help="one look, without clearing the screen")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="pause between two looks")


def run(args: argparse.Namespace) -> int:
    """Exit 0 when the run is over; 130 at Ctrl-C, after the last look was printed."""
    run_dir = the_run(args)
    if args.json or args.once:
        state = state_of(run_dir)
        print(json.dumps(state, indent=2) if args.json else view(state))
        return 0
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    state = state_of(run_dir)
    try:
        with (
            told(lambda: f"run {run_dir.run} was {state['state']} and is left alone"),
            Live(console=Console(), screen=True, auto_refresh=False) as live,
        ):
            while True:
                live.update(Text(view(state)), refresh=True)
                if state["state"] in OVER:
                    break
                time.sleep(max(args.every, 0.2))
                state = state_of(run_dir)
    finally:
        print(view(state))
    return 0
