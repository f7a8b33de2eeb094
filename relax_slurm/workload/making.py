"""From a run's config and plan to the parts that make its batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_slurm.client.inference import InferenceClient
from relax_slurm.config.batch import BatchConfig
from relax_slurm.core.plan import InferencePlacementPlan, Mode, Role
from relax_slurm.workload.deferred import Scoring
from relax_slurm.workload.prefill import Selection
from relax_slurm.workload.publishers.base import Publisher
from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
from relax_slurm.workload.rewards.registry import RewardAdapter, RewardContext, RewardRegistry
from relax_slurm.workload.rollout import RolloutSettings
from relax_slurm.workload.scoring import StudentScoring, TeacherScoring, TeacherSettings
from relax_slurm.workload.validate import Expected

PARTITIONS = "partitions"
"""Folder in an attempt's folder, unless `batch.publisher.root` names another."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where a run's engines are found and what opens them."""

    gateway_url: str
    token: str | None = field(default=None, repr=False)
    engine_key: str | None = field(default=None, repr=False)

    def client(self) -> InferenceClient:
        """A direct client; to be closed."""
        return InferenceClient.polling(self.gateway_url, self.token, engine_key=self.engine_key)


@dataclass(frozen=True, slots=True)
class Scorers:
    """The scoring of a batch, with what has to be closed."""

    scoring: Scoring
    reward: RewardAdapter


def selection_of(batch: BatchConfig) -> Selection | None:
    """What the teacher is asked, if there is one."""
    return None if batch.teacher is None else Selection(batch.teacher.selection)


def rollout_settings(batch: BatchConfig) -> RolloutSettings:
    """How the policy generates."""
    selection = selection_of(batch)
    keeps = batch.teacher is not None and selection is not None and selection.student_candidates
    return RolloutSettings(
        samples_per_prompt=batch.n_samples_per_prompt,
        concurrency=batch.concurrency,
        sampling=dict(batch.sampling),
        top_k=batch.teacher.top_k if keeps and batch.teacher is not None else 0,
        model=batch.model,
        seed=batch.seed,
        timeout_seconds=batch.generate_seconds,
        complete_groups=batch.incomplete_groups == "refuse",
    )


def scorers(
    batch: BatchConfig,
    plan: InferencePlacementPlan,
    client: InferenceClient,
    access: Access,
    registry: RewardRegistry,
) -> Scorers:
    """The stages that a batch goes through, by what the reward adapter declares."""
    registration = registry[batch.reward.adapter]
    reward = registration.make(
        RewardContext(
            deferred=plan.mode is Mode.DEFER,
            gateway_url=access.gateway_url,
            token=access.token,
            concurrency=batch.reward.concurrency,
            options=_options(batch),
        )
    )
    selection = selection_of(batch)
    teacher = None
    if batch.teacher is not None and selection is not None:
        role = plan.role(Role.TEACHER)
        settings = TeacherSettings(
            selection=selection,
            top_k=batch.teacher.top_k,
            route_keys=dict(batch.teacher.route_keys),
            known_keys=frozenset(role.route_key_map) if role is not None else frozenset(),
            concurrency=batch.teacher.concurrency,
            timeout_seconds=batch.timeout_seconds,
        )
        teacher = TeacherScoring(client, settings)
    student = None
    if batch.student_scoring:
        student = StudentScoring(
            client, model=batch.model, concurrency=batch.concurrency, timeout_seconds=batch.timeout_seconds
        )
    fields = frozenset[str]() if selection is None else selection.fields(batch.student_scoring)
    expected = Expected(fields=fields, top_k=0 if batch.teacher is None else batch.teacher.top_k)
    return Scorers(Scoring(reward, registration.role, teacher, student, expected), reward)


def publisher_of(batch: BatchConfig, root: Path) -> Publisher:
    """Where batches go. ConfigError when its extra is not installed."""
    if batch.publisher.kind == "transferqueue":
        from relax_slurm.workload.publishers.transfer_queue import TransferQueuePublisher

        return TransferQueuePublisher()
    return SharedFilesystem(root, file_format=batch.publisher.format)


def partitions_root(batch: BatchConfig, attempt: Path) -> Path:
    """Folder of the partitions of a run whose attempt's folder is `attempt`."""
    return attempt / PARTITIONS if batch.publisher.root is None else Path(batch.publisher.root).expanduser()


def _options(batch: BatchConfig) -> Mapping[str, Any]:
    return batch.reward.model_dump(exclude={"adapter", "concurrency"})
