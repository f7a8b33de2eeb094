"""Makes closed batches, one after the other: what is behind `relax-slurm batch`, for training jobs to call as well.

summary = await run_batches(lifecycle, config, plan, PromptSource.of(path), access, root, batches=20)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_slurm.client.inference import InferenceClient
from relax_slurm.config.batch import BatchConfig
from relax_slurm.config.models import RunConfig
from relax_slurm.core.plan import InferencePlacementPlan, Role
from relax_slurm.errors import DeadlineExceeded
from relax_slurm.workload import preflight
from relax_slurm.workload.collector import DeferredTransferCollector
from relax_slurm.workload.consumer import wait_consumed
from relax_slurm.workload.deferred import DeferredBatch, Finalizer, Scoring
from relax_slurm.workload.lifecycle import Lifecycle
from relax_slurm.workload.making import Access, publisher_of, rollout_settings, scorers
from relax_slurm.workload.publishers.base import Publisher, partition_name
from relax_slurm.workload.rewards.registry import RewardRegistry
from relax_slurm.workload.rewards.shipped import shipped
from relax_slurm.workload.rollout import RolloutWorkload
from relax_slurm.workload.samples import Group
from relax_slurm.workload.source import PromptSource
from relax_slurm.workload.summary import Summary
from relax_slurm.workload.timing import Timing
from relax_slurm.workload.training_batch import TrainingBatch


@dataclass(frozen=True, slots=True)
class Event:
    """Something to show. `samples` of `of` are generated; `phase` is what goes on now."""

    batch: int
    phase: str
    samples: int
    of: int


Progress = Callable[[Event], None]


async def run_batches(
    lifecycle: Lifecycle,
    config: RunConfig,
    plan: InferencePlacementPlan,
    prompts: PromptSource,
    access: Access,
    partitions_root: Path,
    *,
    batches: int = 1,
    registry: RewardRegistry | None = None,
    publisher: Publisher | None = None,
    finalizer: Finalizer | None = None,
    progress: Progress = lambda event: None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Make `batches` batches and answer the summary. BatchRefused before anything is done; BatchNotMade for the first
    batch that fails, which is the run's failure: no further one is begun."""
    registry = registry or shipped()
    preflight.check(config, plan, registry)
    batch_config = config.batch or BatchConfig()
    publisher = publisher or publisher_of(batch_config, partitions_root)
    first = next_batch(await lifecycle.get_state())
    summary = Summary(str(partitions_root) if batch_config.publisher.kind == "shared_fs" else None)
    async with access.client() as client:
        parts = scorers(batch_config, plan, client, access, registry)
        started = batch_config.oversample or batch_config.batch_size
        workload = RolloutWorkload(client, rollout_settings(batch_config), first_group=first * started)
        maker = _Maker(lifecycle, batch_config, client, workload, parts.scoring, publisher, finalizer, progress)
        try:
            for number in range(first, first + batches):
                timing = Timing(clock)
                batch = await maker.make(number, prompts, timing, {"run": config.name})
                summary.add(batch, partition_name(number), timing.seconds)
                if batch_config.consumers and number + 1 < first + batches:
                    with timing.phase("consume"):
                        await wait_consumed(
                            partitions_root, number, batch_config.consumers, batch_config.consume_seconds
                        )
                    summary.spent("consume", timing.seconds["consume"])
        finally:
            await parts.reward.close()
    return summary.document()


def next_batch(state: dict[str, Any]) -> int:
    """The number after the last batch that the coordinator knows; the first one is 0."""
    last = (state.get("batch") or {}).get("id")
    return 0 if last is None else int(last) + 1


@dataclass(frozen=True, slots=True)
class _Maker:
    lifecycle: Lifecycle
    config: BatchConfig
    client: InferenceClient
    workload: RolloutWorkload
    scoring: Scoring
    publisher: Publisher
    finalizer: Finalizer | None
    progress: Progress

    async def make(self, number: int, prompts: PromptSource, timing: Timing, facts: dict[str, Any]) -> TrainingBatch:
        """One batch, from its first request to its commit."""
        config = self.config
        collector = DeferredTransferCollector()
        of = config.batch_size * config.n_samples_per_prompt
        timing.started = lambda phase: self.progress(Event(number, phase, len(collector), of))
        batch = DeferredBatch(
            number,
            self.lifecycle,
            self.scoring,
            self.publisher,
            finalizer=self.finalizer,
            facts=facts,
            timeout_seconds=config.timeout_seconds,
            timing=timing,
            ready=self._ready,
        )
        await batch.begin()
        try:
            with timing.phase("generate"):
                taken = prompts.take(config.oversample or config.batch_size)
                async with asyncio.timeout(config.generate_seconds):
                    await self.workload.generate(
                        taken, _Counted(collector, lambda: timing.started("generate")), config.batch_size
                    )
        except TimeoutError:
            wanted = f"generation took longer than {config.generate_seconds:g} s (batch.generate_seconds)"
            await batch.abandon(DeadlineExceeded(f"{wanted}; {len(collector)} of {of} samples were there"), "generate")
        except BaseException as error:  # whatever it is, rollout has to be released
            await batch.abandon(error, "generate")
        made = await batch.complete(collector.seal())
        timing.started("committed")
        return made

    async def _ready(self, role: Role) -> None:
        await self.client.wait_ready(role)


@dataclass(frozen=True, slots=True)
class _Counted:
    """Hands groups on and says so."""

    collector: DeferredTransferCollector
    more: Callable[[], None]

    def put(self, group: Group) -> None:
        """Part of Transfer."""
        self.collector.put(group)
        self.more()
