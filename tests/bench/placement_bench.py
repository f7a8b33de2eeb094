"""`plan` for 1,024 nodes of 8 GPUs, and how it grows: CPU seconds of this process, median of five, as JSON."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from relax_slurm.cli.picture import picture
from relax_slurm.config.load import from_mapping
from relax_slurm.core.placement import plan
from relax_slurm.core.placement_json import from_json, to_json

ROUNDS = 5


def run_file(nodes: int) -> dict[str, Any]:
    """Three roles that take turns on all GPUs."""
    gpus = nodes * 8
    roles = {"rollout": 2, "genrm": 16, "teacher": 8}
    return {
        "name": "big",
        "placement": "defer",
        "pools": {"a": {"nodes": nodes, "gpus_per_node": 8}},
        "training": {"pool": "a", "gpus": gpus},
        "roles": {
            role: {"pool": "a", "models": {"m": {"model_path": "p", "gpus": gpus, "gpus_per_engine": size}}}
            for role, size in roles.items()
        },
    }


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    found = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        work()
        found.append(time.process_time() - begin)
    return statistics.median(found)


def main() -> int:
    """Measure and print."""
    result: dict[str, Any] = {"figure": "F11", "must_seconds": 2.0, "aim_seconds": 0.5}
    for nodes in (64, 1024):
        config = from_mapping(run_file(nodes))
        made = plan(config)
        text = to_json(made)
        result[f"nodes_{nodes}"] = {
            "plan": round(seconds(lambda config=config: plan(config)), 4),
            "picture": round(seconds(lambda made=made: picture(made)), 4),
            "to_json": round(seconds(lambda made=made: to_json(made)), 4),
            "from_json": round(seconds(lambda text=text: from_json(text)), 4),
        }
    small, large = result["nodes_64"]["plan"], result["nodes_1024"]["plan"]
    result["plan_growth_over_linear"] = round(large / small / 16, 2)
    sys.stdout.write(json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
