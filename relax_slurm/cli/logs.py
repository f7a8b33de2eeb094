"""`relax-slurm logs [RUN]`: the run's log files, one per process, named `{node}_{role}_{replica}_w{n}.log`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from relax_slurm.cli.common import add_run_argument, the_run
from relax_slurm.errors import ConfigError

MAX_BYTES = 1 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("--role", default=None, help="head, sidecar, rollout, genrm or teacher")
    parser.add_argument("--lines", type=int, default=20, metavar="N", help="last lines of each file")
    parser.add_argument("--follow", action="store_true", help="go on until the run is over")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 2 when no file matches."""
    run_dir = the_run(args)
    files = [path for path in sorted(run_dir.logs.glob("*.log")) if args.role is None or _is_of(path, args.role)]
    if not files:
        roles = ", ".join(sorted({_role(path) for path in run_dir.logs.glob("*.log")})) or "none yet"
        raise ConfigError(f"run {run_dir.run!r} has no log of role {args.role!r}; there are {roles}")
    if args.json:
        print(json.dumps({str(path): _last(path, args.lines) for path in files}, indent=2))
        return 0
    places = {}
    for path in files:
        places[path] = path.stat().st_size
        for line in _last(path, args.lines):
            print(f"{path.stem}: {line}")
    while args.follow:
        over = run_dir.read("outcome.json") is not None
        for path in files:
            for line in _after(path, places):
                print(f"{path.stem}: {line}", flush=True)
        if over:
            break
        time.sleep(0.2)
    return 0


def _role(path: Path) -> str:
    """The role in a log's name: what stands behind the node, or `head`."""
    parts = path.stem.split("_")
    return "head" if parts[0] == "head" else next((p for p in parts if p in _ROLES), parts[-1])


_ROLES = frozenset({"rollout", "genrm", "teacher", "sidecar"})


def _is_of(path: Path, role: str) -> bool:
    return _role(path) == role


def _last(path: Path, lines: int) -> list[str]:
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - MAX_BYTES))
        return stream.read().decode(errors="replace").splitlines()[-lines:] if lines > 0 else []


def _after(path: Path, places: dict[Path, int]) -> Iterator[str]:
    with path.open("rb") as stream:
        stream.seek(places[path])
        data = stream.read(MAX_BYTES)
    whole, newline, _ = data.rpartition(b"\n")
    if newline:
        places[path] += len(whole) + 1
        yield from whole.decode(errors="replace").splitlines()
