# ruff: noqa: T201 - what it prints is its output
"""The training side of a run in small: waits for commits, reads partitions, takes training's turn, pushes weights.

    python examples/trainer.py RUN_DIR --batches 20 --checkpoints /shared/checkpoints

RUN_DIR is the run's folder (`relax-slurm status --json`, key `run_dir`). One JSON line of metrics per step. Start it
before, beside or after `relax-slurm batch`: it waits until each batch is committed and never reads another. With
`batch.consumers: [trainer]` in the run file the next batch begins when this one was trained on; without it training may
find the GPUs taken. The model is three numbers, so that the loop around it is all there is to see; needs numpy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from relax_slurm.errors import RelaxError
from relax_slurm.workload.consumer import Consumer
from relax_slurm.workload.lifecycle import Lifecycle
from relax_slurm.workload.making import PARTITIONS
from relax_slurm.workload.training_batch import TrainingBatch

Push = Callable[[Path, str], Awaitable[Any]]
"""Gives the rollout engines the checkpoint in a folder under a version: `update_weights_from_disk`."""


def advantages(batch: TrainingBatch) -> np.ndarray:
    """GRPO: each reward against its group's mean, in units of the group's deviation. Removed samples get 0."""
    rewards = np.asarray(batch.columns["reward"], dtype=np.float64)
    groups = np.asarray(batch.columns["group_index"])
    kept = np.asarray(batch.columns["removed"]) == 0
    found = np.zeros_like(rewards)
    for group in np.unique(groups):
        chosen = (groups == group) & kept
        if chosen.any():
            centred = rewards[chosen] - rewards[chosen].mean()
            found[chosen] = centred / (rewards[chosen].std() + 1e-6)
    return found


class Trainer:
    """A policy gradient on three numbers: log-prob of what was said, its length, and the teacher's disagreement."""

    def __init__(self, rate: float = 0.01) -> None:
        self.weights = np.zeros(3)
        self.rate = rate

    def features(self, batch: TrainingBatch) -> np.ndarray:
        """[N, 3] one row per sample; masked means over its tokens."""
        rows = []
        taught = batch.columns.get("teacher_log_probs") or [[]] * batch.rows
        for said, teacher, mask in zip(
            batch.columns["rollout_log_probs"], taught, batch.columns["loss_mask"], strict=True
        ):
            own = np.asarray(said)[np.asarray(mask[: len(said)], dtype=bool)]
            other = np.asarray(teacher)[np.asarray(mask[: len(teacher)], dtype=bool)]
            gap = float((own - other).mean()) if own.size and own.size == other.size else 0.0
            rows.append([float(own.mean()) if own.size else 0.0, own.size / 100.0, gap])
        return np.asarray(rows, dtype=np.float64).reshape(batch.rows, 3)

    def step(self, batch: TrainingBatch) -> dict[str, Any]:
        """One update; its metrics."""
        features, advantage = self.features(batch), advantages(batch)
        gradient = features.T @ advantage / max(batch.rows, 1)
        self.weights = self.weights + self.rate * gradient
        kept = np.asarray(batch.columns["reward"])[np.asarray(batch.columns["removed"]) == 0]
        return {
            "batch": batch.number,
            "samples": batch.rows,
            "reward_mean": float(kept.mean()) if kept.size else None,
            "advantage_std": float(advantage.std()),
            "response_tokens": int(sum(batch.columns["response_length"])),
            "teacher_gap": float(features[:, 2].mean()) if batch.rows else 0.0,
            "gradient_norm": float(np.linalg.norm(gradient)),
            "weight_versions": list(batch.facts.get("weight_versions", [])),
        }

    def save(self, folder: Path) -> Path:
        """A checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "weights.npz", weights=self.weights)
        return folder


async def train(
    lifecycle: Lifecycle,
    root: Path,
    *,
    first: int = 0,
    count: int = 1,
    checkpoints: Path | None = None,
    push: Push | None = None,
    report: Callable[[dict[str, Any]], None] = lambda metrics: print(json.dumps(metrics), flush=True),
    name: str = "trainer",
    timeout_seconds: float = 7200.0,
) -> Trainer:
    """Train on `count` batches from `first` on. `push` gets every checkpoint, with the step as its version."""
    trainer, consumer = Trainer(), Consumer(lifecycle, root, name, timeout_seconds=timeout_seconds)
    async for batch in consumer.batches(first, count):
        async with lifecycle.training(batch.number):  # the GPUs are training's here, and nobody else's
            metrics = trainer.step(batch)
            folder = trainer.save(checkpoints / f"step-{batch.number}") if checkpoints is not None else None
        if push is not None and folder is not None:
            await push(folder, str(batch.number + 1))
            metrics["pushed_version"] = str(batch.number + 1)
        await consumer.done(batch.number)
        report(metrics)
    return trainer


async def main() -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(description="a trainer that consumes committed batches")
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's folder")
    parser.add_argument("--root", type=Path, default=None, help="folder of the partitions (default: in RUN_DIR)")
    parser.add_argument("--first", type=int, default=0, help="first batch")
    parser.add_argument("--batches", type=int, default=1, help="how many")
    parser.add_argument("--checkpoints", type=Path, default=None, help="folder for a checkpoint per step")
    parser.add_argument("--push", metavar="MODEL", default=None, help="give this policy model every checkpoint")
    parser.add_argument("--payload", type=json.loads, default={}, help="more fields of SGLang's call, as JSON")
    arguments = parser.parse_args()
    if arguments.push is not None and arguments.checkpoints is None:
        parser.error("--push needs --checkpoints: engines load what a step has written there")
    from relax_slurm.client.lifecycle import LifecycleClient

    try:
        lifecycle = await LifecycleClient.of(arguments.run_dir)
    except RelaxError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    push: Push | None = None
    if arguments.push is not None:
        from relax_slurm.client.weights import WeightsClient

        weights = WeightsClient.of_run(arguments.run_dir)

        async def push(folder: Path, version: str) -> Any:
            return await weights.update_weights_from_disk(
                arguments.push, str(folder), version, payload=arguments.payload
            )

    try:
        await train(
            lifecycle,
            arguments.root or arguments.run_dir / PARTITIONS,
            first=arguments.first,
            count=arguments.batches,
            checkpoints=arguments.checkpoints,
            push=push,
        )
    except RelaxError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return error.exit_code
    finally:
        lifecycle.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
