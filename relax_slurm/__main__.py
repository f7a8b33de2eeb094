"""`relax-slurm VERB …` and `python -m relax_slurm VERB …`: arguments in, exit code out, errors as one sentence.

Only the module of the verb that was asked for is imported, so that `--version` and `--help` answer at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

VERBS = {
    "plan": "validate a run file and show everything a launch would do",
    "launch": "start a run and wait until it is READY",
    "status": "state of a run, its nodes, replicas and leases",
    "top": "live view of a run",
    "logs": "log files of a run",
    "stop": "end a run in good order",
    "drain": "let requests finish, then end the run",
    "doctor": "what is wrong and what to do next",
    "bench": "measure this installation",
    "batch": "closed batches end to end",
}
_ROWS = {
    "drain": "row L6, lifetime; `relax-slurm stop` lets requests finish and ends the run",
    "doctor": "rows R1 and L5, recovery and site checks; docs/operations.md, Failures, says what to do by hand",
    "bench": "`make bench` runs what there is",
}
"""Verbs of the contract that this version answers with the row it does not have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; answers its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("--version", "-V"):
        from relax_slurm import __version__

        print(f"relax-slurm {__version__}")  # noqa: T201
        return 0
    if not words or words[0] in ("--help", "-h", "help"):
        print(_usage())  # noqa: T201
        return 0 if words else 2
    return _run(words[0], words[1:])


def _usage() -> str:
    lines = ["usage: relax-slurm VERB [options]", "", "verbs:"]
    lines += [f"  {verb:8} {what}" for verb, what in VERBS.items() if verb not in _ROWS]
    lines += ["", "Every verb takes --json and --debug; `relax-slurm VERB --help` shows the rest."]
    return "\n".join(lines)


def _run(verb: str, words: list[str]) -> int:
    from relax_slurm.cli.common import say_error
    from relax_slurm.cli.interrupted import exit_code, say, term_interrupts
    from relax_slurm.errors import ConfigError, NotBuilt, RelaxError

    debug, as_json = "--debug" in words, "--json" in words
    try:
        if verb in _ROWS:
            raise NotBuilt(f"relax-slurm {verb} is not built in this version ({_ROWS[verb]})")
        if verb not in VERBS:
            from difflib import get_close_matches

            near = get_close_matches(verb, VERBS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown verb {verb!r}, wanted one of {', '.join(VERBS)}{hint}")
        import argparse
        from importlib import import_module

        module = import_module(f"relax_slurm.cli.{verb}")
        parser = argparse.ArgumentParser(prog=f"relax-slurm {verb}", description=VERBS[verb])
        module.add_arguments(parser)
        parser.add_argument("--json", action="store_true", help="one JSON document on stdout, messages on stderr")
        parser.add_argument("--debug", action="store_true", help="show tracebacks")
        with term_interrupts():
            return int(module.run(parser.parse_args(words)))
    except RelaxError as error:
        if debug:
            raise
        say_error(error, as_json=as_json)
        return error.exit_code
    except BrokenPipeError:  # the reader (head, less) has gone; what Python still has to write goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt as interrupt:
        say(interrupt)
        return exit_code(interrupt)
    except Exception as fault:  # the edge to the user: one sentence, and the traceback on request
        if debug:
            raise
        reason = f"{type(fault).__name__}: {fault}"
        say_error(RelaxError(f"relax-slurm {verb} failed ({reason}); --debug shows where"), as_json=as_json)
        return RelaxError.exit_code


if __name__ == "__main__":
    sys.exit(main())
