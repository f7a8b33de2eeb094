"""Ends what an earlier sidecar of this node left behind, found by its tags and by nothing else."""

from __future__ import annotations

import asyncio
import time

from relax_slurm.errors import RecoveryRequired
from sidecars import proc
from sidecars.command_line import RUN_TAG, WORKER_TAG
from sidecars.process import wait_gone

NODE_TAG = "RELAX_NODE"
"""Set in the environment of engines: tells the engines of two virtual nodes of one machine apart."""
KILL_SECONDS = 10.0


def leftovers(run_tag: str, node: str, worker_id: str | None = None) -> list[proc.ProcessInfo]:
    """Live engine processes of this run on this node (or of one worker)."""
    tags = [f"{RUN_TAG}={run_tag}", f"{NODE_TAG}={node}"]
    if worker_id is not None:
        tags.append(f"{WORKER_TAG}={worker_id}")
    return proc.find_tagged(*tags)


async def sweep(run_tag: str, node: str, worker_id: str | None = None) -> list[int]:
    """End them and wait until they are gone; their pids. `RecoveryRequired` when one survives SIGKILL."""
    deadline = time.monotonic() + KILL_SECONDS
    ended: set[int] = set()
    while left := await asyncio.to_thread(leftovers, run_tag, node, worker_id):
        if time.monotonic() >= deadline:
            named = ", ".join(f"{item.pid} ({item.name}, state {item.state})" for item in left)
            raise RecoveryRequired(
                f"node {node}: {named} of an earlier sidecar survive SIGKILL and may hold GPU memory; "
                f"see what they wait for, or drain the node",
                detail={"pids": [item.pid for item in left]},
            )
        for target in left:
            proc.kill_exactly(target)
            ended.add(target.pid)
        await wait_gone(left, deadline - time.monotonic())
    return sorted(ended)
