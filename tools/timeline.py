# ruff: noqa: T201 - what it prints is its output
"""Who had the GPUs when: a run's leases batch by batch, out of its events.jsonl.

    python tools/timeline.py RUN_DIR [--json] [--batches N]

RUN_DIR is an attempt's folder (`relax-slurm status --json`, key `run_dir`). A row is one lease from its grant to its
release: seconds since its batch began, how long it was held, and how much of that its engines took to come and to go.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WIDTH = 48
FILES = ("events.1.jsonl", "events.jsonl")


def events(folder: Path) -> list[dict[str, Any]]:
    """Everything the run wrote down, in its order. OSError when there is nothing."""
    found = [folder / name for name in FILES if (folder / name).exists()]
    if not found:
        raise FileNotFoundError(f"{folder} has no {FILES[-1]}; wanted the folder of an attempt")
    return [json.loads(line) for path in found for line in path.read_text(encoding="utf-8").splitlines()]


def timeline(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Batches with their leases. `at_once` is the largest number of leases that were held together.

    Leases that a run begins with (roles with GPUs of their own) are not in the events until they change.
    """
    batches: list[dict[str, Any]] = []
    open_leases: dict[str, dict[str, Any]] = {}
    at_once = 0
    for event in lines:
        now, holder = event.get("time", 0.0), event.get("holder", "")
        if event["event"] == "batch":
            number, _, state = str(event["after"]).partition(" ")
            if state == "PENDING":
                batches.append({"batch": int(number), "state": state, "began": now, "ended": None, "leases": []})
            elif batches and state:
                batches[-1] |= {"state": state, "ended": now}
        elif event["event"] == "lease" and batches:
            lease = open_leases.get(holder)
            if lease is None and event["before"] == "SLEEPING":
                lease = {"holder": holder, "from": now, "to": None, "state": "", "onload": 0.0, "offload": 0.0}
                open_leases[holder] = lease
                batches[-1]["leases"].append(lease)
            if lease is not None:
                lease["state"] = event["after"]
            if lease is not None and event["after"] == "SLEEPING":
                lease["to"] = now
                del open_leases[holder]
            at_once = max(at_once, len(open_leases))
        elif event["event"] == "moved" and holder in open_leases:
            open_leases[holder][event["move"]] += event["seconds"]
    for batch in batches:
        for lease in batch["leases"]:
            lease["from"] = round(lease["from"] - batch["began"], 3)
            lease["to"] = None if lease["to"] is None else round(lease["to"] - batch["began"], 3)
    return {"batches": batches, "at_once": at_once}


def text(document: dict[str, Any]) -> str:
    """The same for a reader."""
    out = []
    for batch in document["batches"]:
        ends = [lease["to"] for lease in batch["leases"] if lease["to"] is not None]
        last = max([*ends, (batch["ended"] or batch["began"]) - batch["began"], 0.001])
        out.append(f"batch {batch['batch']} {batch['state']}, {last:.3f} s to the last release")
        for lease in batch["leases"]:
            to = lease["to"]
            left = min(int(lease["from"] / last * WIDTH), WIDTH - 1)
            right = WIDTH if to is None else max(round(to / last * WIDTH), left + 1)
            bar = (" " * left + "#" * (right - left)).ljust(WIDTH)
            until = f"{'still ' + lease['state']:>16}" if to is None else f"{to:8.3f}{to - lease['from']:8.3f}"
            moves = f"on {lease['onload']:.3f} off {lease['offload']:.3f}"
            out.append(f"  {lease['holder']:<9}|{bar}|{lease['from']:8.3f}{until}  {moves}")
    out.append(f"{len(document['batches'])} batches, at most {document['at_once']} leases at once")
    return "\n".join(out)


def main(words: Sequence[str] | None = None) -> int:
    """Exit 0, or 2 when there are no events."""
    parser = argparse.ArgumentParser(description="who had the GPUs when")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of an attempt")
    parser.add_argument("--batches", type=int, default=None, metavar="N", help="only the last N batches")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    arguments = parser.parse_args(words)
    try:
        document = timeline(events(arguments.run_dir))
    except (OSError, ValueError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.batches is not None:
        document["batches"] = document["batches"][-max(arguments.batches, 0) :] if arguments.batches > 0 else []
    print(json.dumps(document, indent=2) if arguments.json else text(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
