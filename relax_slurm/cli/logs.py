"""`relax-slurm logs [RUN]`: the run's log files, one per process, named `{node}_{role}_{replica}_w{n}.log`."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from relax_slurm.cli.common import add_run_argument, the_run
from relax_slurm.cli.interrupted import told
from relax_slurm.control.backends import backend_for
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.runs import JobUnknown, job_of
from relax_slurm.errors import ConfigError

MAX_BYTES = 1 << 20
JOB_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("--role", default=None, help="head, sidecar, rollout, genrm or teacher")
    parser.add_argument("--lines", type=int, default=20, metavar="N", help="last lines of each file")
    parser.add_argument("--follow", action="store_true", help="go on until the run is over")


def run(args: argparse.Namespace) -> int:
    """Exit 0; 2 when no file matches."""
    run_dir = the_run(args)
    files = _files(run_dir, args.role)
    if not files:
        roles = ", ".join(sorted({_role(path) for path in run_dir.logs.glob("*.log")})) or "none yet"
        which = "" if args.role is None else f" of role {args.role!r}"
        raise ConfigError(f"run {run_dir.run!r} has no log{which}; there are {roles}")
    if args.json:
        print(json.dumps({str(path): _last(path, args.lines)[0] for path in files}, indent=2))
        return 0
    places: dict[Path, int] = {}
    for path in files:
        lines, places[path] = _last(path, args.lines, whole=args.follow)
        for line in lines:
            print(f"{path.stem}: {line}")
    if args.follow:
        with told(lambda: f"run {run_dir.run} is left alone; `relax-slurm stop {run_dir.run}` ends it"):
            _follow(run_dir, args.role, places)
    return 0


def _follow(run_dir: RunDir, role: str | None, places: dict[Path, int]) -> None:
    """Print what is added, files that appear later included, until the run or its job is over."""
    try:
        job = job_of(run_dir)
    except JobUnknown:
        job = None  # the outcome will tell
    backend = None if job is None else backend_for(job[0])
    looked = time.monotonic()
    while True:
        over = run_dir.read("outcome.json") is not None
        if not over and backend is not None and job is not None and time.monotonic() - looked > JOB_SECONDS:
            looked = time.monotonic()
            over = backend.poll(job[1]).over
        for path in _files(run_dir, role):
            for line in _after(path, places):
                print(f"{path.stem}: {line}", flush=True)
        if over:
            return
        time.sleep(0.2)


def _files(run_dir: RunDir, role: str | None) -> list[Path]:
    return [path for path in sorted(run_dir.logs.glob("*.log")) if role is None or _role(path) == role]


def _role(path: Path) -> str:
    """The role in a log's name: what stands behind the node, or `head`."""
    parts = path.stem.split("_")
    return "head" if parts[0] == "head" else next((p for p in parts[1:] if p in _ROLES), parts[-1])


_ROLES = frozenset({"rollout", "genrm", "teacher", "sidecar"})


def _last(path: Path, lines: int, *, whole: bool = False) -> tuple[list[str], int]:
    """The last lines and where they end; with `whole` without a line that is still being written."""
    with path.open("rb") as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - MAX_BYTES))
        data = stream.read()
        end = stream.tell()
    if whole:
        kept = data[: data.rfind(b"\n") + 1]
        data, end = kept, end - len(data) + len(kept)
    return data.decode(errors="replace").splitlines()[-lines:] if lines > 0 else [], end


def _after(path: Path, places: dict[Path, int]) -> Iterator[str]:
    with path.open("rb") as stream:
        stream.seek(places.setdefault(path, 0))
        data = stream.read(MAX_BYTES)
    whole, newline, _ = data.rpartition(b"\n")
    if newline:
        places[path] += len(whole) + 1
        yield from whole.decode(errors="replace").splitlines()
