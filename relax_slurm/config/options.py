"""Further options of sbatch and srun in the run file: which ones the tool writes itself, however they are spelt.

Both programs read options with getopt_long: a long one may be cut to any unique prefix (`--job-na=x` is `--job-name`),
short ones may be joined (`-QW`), and one line may hold several. Comparing whole names would let all of that through.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_ONE_TASK = "nothing: one task per node is started"
_NO_ARRAY = "nothing: a heterogeneous job cannot be an array"
_GPUS = "pools.POOL.gpus_per_node"
_SUBMITS = "nothing: it changes what submitting means, and the job would not be followed"
_STEP = "nothing: every node gets one step of its own"
_ALL_GPUS = "nothing: a step gets all GPUs of its node"


@dataclass(frozen=True, slots=True)
class Program:
    """What a program's options are checked with."""

    owned: Mapping[str, str]
    """Options that may not be given, and what to use instead."""
    flags: str
    """Letters of short options without a value: others may follow them in one word."""


SBATCH = Program(
    owned={
        **dict.fromkeys(("--job-name", "-J"), "name"),
        **dict.fromkeys(("--nodes", "-N"), "pools.POOL.nodes"),
        **dict.fromkeys(("--gpus", "-G", "--gpus-per-node", "--gres"), _GPUS),
        **dict.fromkeys(("--gpus-per-task", "--gpus-per-socket", "--ntasks-per-gpu", "--tres-per-task"), _GPUS),
        **dict.fromkeys(("--ntasks", "-n", "--ntasks-per-node"), _ONE_TASK),
        **dict.fromkeys(("--output", "-o", "--error", "-e", "--chdir", "-D", "--open-mode"), "runs_root"),
        **dict.fromkeys(("--array", "-a"), _NO_ARRAY),
        **dict.fromkeys(("--time", "-t"), "slurm.time"),
        **dict.fromkeys(("--partition", "-p"), "slurm.partition"),
        **dict.fromkeys(("--account", "-A"), "slurm.account"),
        **dict.fromkeys(("--qos", "-q"), "slurm.qos"),
        **dict.fromkeys(("--constraint", "-C"), "slurm.constraint"),
        **dict.fromkeys(("--requeue", "--no-requeue"), "slurm.requeue"),
        **dict.fromkeys(("--cpus-per-task", "-c"), "pools.POOL.cpus_per_node"),
        **dict.fromkeys(("--test-only", "--wait", "-W", "--parsable"), _SUBMITS),
        **dict.fromkeys(("--help", "-h", "--usage", "--version", "-V"), _SUBMITS),
        "--reservation": "slurm.reservation",
        "--exclusive": "slurm.exclusive",
        "--comment": "slurm.comment",
        "--signal": "slurm.signal_seconds",
        "--mem": "pools.POOL.mem",
        "--wrap": "slurm.setup",
    },
    flags="HhIkOQsvVW",
)
SRUN = Program(
    owned={
        **dict.fromkeys(("--nodes", "-N", "--ntasks", "-n", "--ntasks-per-node", "--nodelist", "-w"), _STEP),
        **dict.fromkeys(
            ("--het-group", "--relative", "-r", "--jobid", "--multi-prog", "--exclusive", "--exact"), _STEP
        ),
        **dict.fromkeys(("--job-name", "-J", "--overlap", "--disable-status", "-X"), _STEP),
        **dict.fromkeys(("--output", "-o", "--error", "-e", "--open-mode", "--chdir", "-D"), "runs_root"),
        **dict.fromkeys(("--input", "-i", "--pty"), "nothing: a step has no terminal"),
        **dict.fromkeys(
            ("--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "--gres"), _ALL_GPUS
        ),
        **dict.fromkeys(("--ntasks-per-gpu", "--tres-per-task"), _ALL_GPUS),
        **dict.fromkeys(("--test-only", "--no-allocate", "-Z", "--wait", "-W"), _SUBMITS),
        **dict.fromkeys(("--help", "-h", "--usage", "--version", "-V"), _SUBMITS),
        "--export": "slurm.setup, or engine.env for variables of the engines",
    },
    flags="EHhIklOQsuvVXZ",
)


def owned(line: str, program: Program) -> tuple[str, str] | None:
    """The first option of a line that the tool owns and what to use instead; None when the line is fine."""
    for option in _options(line, program):
        name, _, value = option.partition("=")
        found = _full_name(name, program)
        if found is None or (found == "--gres" and "gpu" not in (value or line)):
            continue  # generic resources without GPUs are the site's business
        return found, program.owned[found]
    return None


def is_option(name: str, wanted: str) -> bool:
    """Whether `name`, perhaps cut short, is the option `wanted`."""
    return name == wanted or (name.startswith("--") and len(name) > len("--") and wanted.startswith(name))


def _full_name(name: str, program: Program) -> str | None:
    """The owned option that a name means or, cut short, may mean: what is ambiguous is refused by Slurm anyway."""
    if name in program.owned:
        return name
    return next((option for option in program.owned if is_option(name, option)), None)


def _options(line: str, program: Program) -> Iterator[str]:
    """Every option word in a line: long ones as they stand, joined short ones one by one."""
    for word in _words(line):
        if re.match(r"--[A-Za-z]", word):
            yield word
        elif re.match(r"-[A-Za-z]", word):
            for at, letter in enumerate(word[1:], start=1):
                yield f"-{letter}={word[at + 1 :]}"
                if letter not in program.flags:
                    break  # the rest is its value


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError:  # an open quote, which sbatch reads in its own way
        return line.split()
