"""`relax-slurm batch RUN PROMPTS.jsonl`: closed batches end to end on a run that is up."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_slurm.cli.common import add_run_argument, the_run
from relax_slurm.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from relax_slurm.control.run_dir import RunDir
    from relax_slurm.workload.lifecycle import Lifecycle
    from relax_slurm.workload.run import Event
    from relax_slurm.workload.source import PromptSource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments."""
    add_run_argument(parser)
    parser.add_argument("prompts", metavar="PROMPTS.jsonl", help="one JSON object per line, with prompt and label")
    parser.add_argument("--batches", type=int, default=None, metavar="N", help="how many (default: until all are used)")


def run(args: argparse.Namespace) -> int:
    """Exit 0 when every batch is committed."""
    from relax_slurm.workload.source import PromptSource

    if args.batches is not None and args.batches < 1:
        raise ConfigError(f"--batches is {args.batches}, wanted 1 or more")
    source = PromptSource.of(Path(args.prompts).expanduser())
    run_dir = the_run(args).newest()
    summary = asyncio.run(make(run_dir, source, args.batches))
    print(json.dumps(summary, indent=2) if args.json else text(summary))
    return 0


async def lifecycle_of(run_dir: RunDir) -> Lifecycle:
    """The coordinator of the run, as a workload sees it."""
    from relax_slurm.client.lifecycle import LifecycleClient

    client: Lifecycle = await LifecycleClient.of(run_dir.path)
    return client


async def make(run_dir: RunDir, source: PromptSource, batches: int | None) -> dict[str, Any]:
    """Make the batches of the run in `run_dir`; the summary."""
    from relax_slurm.config.batch import BatchConfig
    from relax_slurm.config.load import from_resolved
    from relax_slurm.core.placement_json import from_json
    from relax_slurm.workload.making import Access, partitions_root
    from relax_slurm.workload.run import run_batches

    config = from_resolved((run_dir.path / "config.json").read_text(), str(run_dir.path / "config.json"))
    plan = from_json((run_dir.path / "plan.json").read_text())
    endpoint = run_dir.read("endpoint.json")
    if endpoint is None or not endpoint.get("gateway_url"):
        raise Unavailable(f"run {run_dir.run!r} has no gateway (yet); wait with `relax-slurm status --wait READY`")
    access = Access(
        endpoint["gateway_url"], run_dir.token_file.read_text().strip(), run_dir.engine_key_file.read_text().strip()
    )
    batch = config.batch or BatchConfig()
    count = batches if batches is not None else -(-len(source) // batch.batch_size)
    lifecycle = await lifecycle_of(run_dir)
    try:
        with Bar(count) as bar:
            return await run_batches(
                lifecycle,
                config,
                plan,
                source,
                access,
                partitions_root(batch, run_dir.path),
                batches=count,
                progress=bar.show,
            )
    finally:
        close = getattr(lifecycle, "close", None)
        if close is not None:
            closing = close()
            if asyncio.iscoroutine(closing):
                await closing


class Bar:
    """A progress bar on stderr; without a terminal one line per batch."""

    def __init__(self, batches: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._batches = batches
        self._done = 0
        self._all = self._bar.add_task("batches", total=batches)
        self._one = self._bar.add_task("samples", total=None)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, event: Event) -> None:
        """What is going on now."""
        self._bar.update(
            self._one, description=f"batch {event.batch}: {event.phase}", completed=event.samples, total=event.of
        )
        if event.phase == "committed":
            self._done += 1
            self._bar.update(self._all, completed=self._done)
            if not self._console.is_terminal:
                self._console.print(f"batch {event.batch} committed ({self._done} of {self._batches})", highlight=False)


def text(summary: dict[str, Any]) -> str:
    """The summary for a reader."""
    handovers = summary["handovers"]
    lines = [
        f"{summary['batches']} batches committed, {summary['samples']} samples in {summary['groups']} groups, "
        f"{summary['response_tokens']} response tokens",
        f"reward mean {_number(summary['reward_mean'])}, teacher coverage {_number(summary['teacher_coverage'])}, "
        f"truncated {summary['truncated']}, removed {summary['removed']}",
        f"{handovers['count']} handovers in {handovers['seconds']:.2f} s, {_number(handovers['mean_seconds'])} s each",
        "seconds: " + ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in summary["seconds"].items()),
    ]
    if summary["partitions_root"] and summary["partitions"]:
        first, last = summary["partitions"][0], summary["partitions"][-1]
        lines.append(f"partitions {first} to {last} in {summary['partitions_root']}")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
