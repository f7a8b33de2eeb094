"""Writes arithmetic prompts of the package reasoning-gym as JSON lines `{"prompt", "label"}` for tools/ask_rollout.py.

    python tools/reasoning_gym_prompts.py --count 300 --seed 1 prompts.jsonl

The tasks take turns; the same count, seed and tasks give the same file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

TASKS = ("chain_sum", "basic_arithmetic", "products", "decimal_chain_sum")


def prompts(count: int, seed: int, tasks: Sequence[str]) -> list[dict[str, str]]:
    """`count` prompts, the tasks in turn. ValueError for a task that the package does not have."""
    import reasoning_gym

    each = -(-count // len(tasks))
    sets = [reasoning_gym.create_dataset(task, size=each, seed=seed) for task in tasks]
    rows = [
        {"prompt": str(sets[place][number]["question"]), "label": str(sets[place][number]["answer"])}
        for number in range(each)
        for place in range(len(tasks))
    ]
    return rows[:count]


def main(words: Sequence[str] | None = None) -> int:
    """Exit 0 when the file is written."""
    parser = argparse.ArgumentParser(description="arithmetic prompts of reasoning-gym as JSON lines")
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL file to write")
    parser.add_argument("--count", type=int, default=300, metavar="N", help="how many prompts (default 300)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the tasks (default 1)")
    parser.add_argument("--task", action="append", metavar="NAME", help=f"repeatable (default {', '.join(TASKS)})")
    arguments = parser.parse_args(words)
    if arguments.count < 1:
        parser.error(f"--count is {arguments.count}, wanted 1 or more")
    try:
        rows = prompts(arguments.count, arguments.seed, arguments.task or TASKS)
    except ImportError:
        parser.error("the package reasoning-gym is not installed; install relax-slurm[dev] or use make env")
    except ValueError as error:
        parser.error(f"reasoning-gym: {error}")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    arguments.file.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
