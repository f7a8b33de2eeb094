"""Writes docs/state-machines.md from the tables in `relax_slurm.core`: replica, run, lease and batch.

python tools/state_machines.py           writes the page
python tools/state_machines.py --check   exit 1 when the page is not what the tables say
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

from relax_slurm.core import batch, lease, replica, replica_events, run

PAGE = Path(__file__).resolve().parent.parent / "docs" / "state-machines.md"

HEAD = """\
# State machines

<!-- Written by `python tools/state_machines.py`; edit the tables in relax_slurm/core (replica, run, lease, batch)
instead. -->

All machines are literal tables with one mutator. An event that the table does not list for a state raises and changes
nothing. Every change is a line of `events.jsonl` with its cause and its reason.
"""

REPLICA = """\
Drawn are the changes of state; repeated requests, signs of life and answers that come too late leave the state alone.
A shutdown is possible from every state: an operation under way is failed first. FAILED and STOPPING say nothing about a
GPU: whether it is free is another question, `release_proven`, and only evidence answers it. GONE is internal: discovery
shows it as DEAD.
"""

RUN = """\
`drain` and `stop` may come several times. FAILED is the end of the road and no claim about GPUs.
"""


LEASE = """\
Holders are the inference roles and training. A lease is given only when every holder that shares a GPU with it is
SLEEPING, by the book and by the evidence of its replicas. BLOCKED is left by evidence only, never by an answer that
came late. Which request leads to which event is `relax_slurm/core/lifecycle.py`.
"""

BATCH = """\
The commit gate's view of a closed batch: may training have it? The finer stages of its data belong to the workload
(docs/batches.md).
"""


def meanings(kind: type[StrEnum]) -> list[str]:
    """A table of an enum's members with the docstrings under them."""
    lines = inspect.getsource(kind).splitlines()
    rows = ["| | meaning |", "|---|---|"]
    for member in kind:
        place = next(number for number, line in enumerate(lines) if line.strip().startswith(f"{member.name} = "))
        text = []
        for line in lines[place + 1 :]:
            text.append(line.strip().strip('"'))
            if line.rstrip().endswith('"""'):
                break
        rows.append(f"| `{member.value}` | {' '.join(text).strip()} |")
    return rows


def diagram(text: str) -> list[str]:
    """A Mermaid block."""
    return ["```mermaid", text.rstrip(), "```"]


def section(title: str, note: str, drawing: str, enums: Iterable[tuple[str, type[StrEnum]]]) -> list[str]:
    """One machine: what to know, the drawing, and what its words mean."""
    lines = [f"## {title}", "", note, *diagram(drawing)]
    for name, kind in enums:
        lines += ["", f"### {name}", "", *meanings(kind)]
    return lines


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    parts += section(
        "Replica",
        REPLICA,
        replica.mermaid(),
        [
            ("States", replica_events.State),
            ("Events", replica_events.EventKind),
            ("Evidence", replica_events.Evidence),
        ],
    )
    parts += [
        "",
        *section("Run", RUN, run.mermaid(), [("States of a run", run.RunState), ("Events of a run", run.RunEvent)]),
    ]
    parts += [
        "",
        *section(
            "Lease", LEASE, lease.mermaid(), [("Leases", lease.LeaseState), ("Events of a lease", lease.LeaseEvent)]
        ),
        "",
        *section(
            "Batch", BATCH, batch.mermaid(), [("Batches", batch.BatchState), ("Events of a batch", batch.BatchEvent)]
        ),
    ]
    return "\n".join(parts) + "\n"


def main(words: list[str]) -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description="writes docs/state-machines.md from the tables")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args(words).check:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
