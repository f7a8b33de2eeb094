"""What cannot be combined with batches is refused before anything starts: a literal table of rules. Pure.

A rule looks at `Facts` and answers what is wrong, or None. `check` raises the first one as `BatchRefused`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from relax_slurm.config.batch import BatchConfig
from relax_slurm.config.models import RunConfig
from relax_slurm.core.plan import InferencePlacementPlan, Mode, ModelPlan, Role, RolePlan, WorkerType
from relax_slurm.workload.collector import MAX_SAMPLES
from relax_slurm.workload.failures import BatchRefused
from relax_slurm.workload.rewards.registry import Registration, RewardRegistry
from relax_slurm.workload.rewards.shipped import shipped


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that rules look at."""

    batch: BatchConfig
    plan: InferencePlacementPlan
    reward: Registration
    deferrable: tuple[str, ...]
    train_offload: bool

    def models(self, role: Role) -> tuple[ModelPlan, ...]:
        """Models of a role; none when the run does not have it."""
        found = self.plan.role(role)
        return () if found is None else found.models

    @property
    def static(self) -> list[RolePlan]:
        """Judge and teacher as far as engines of ours stand behind them."""
        roles = [self.plan.role(role) for role in (Role.GENRM, Role.TEACHER)]
        return [role for role in roles if role is not None and role.gpus > 0]


@dataclass(frozen=True, slots=True)
class Rule:
    """One refusal."""

    name: str
    always: bool
    """Whether it holds for every placement; the others hold with `placement: defer`."""
    look: Callable[[Facts], str | None]


def _custom(facts: Facts) -> str | None:
    job = facts.batch.job
    for key in ("custom_reward", "custom_convert", "custom_filter"):
        value = getattr(job, key)
        if value is not None:
            return (
                f"batch.job.{key} is {value!r}; a batch is scored, converted and taken whole here, so remove the hook"
            )
    return None


def _groups(facts: Facts) -> str | None:
    models = facts.models(Role.ROLLOUT)
    if len(models) > 1:
        return f"rollout has {len(models)} models ({_names(models)}), wanted one; which one would write a batch?"
    for model in models:
        kinds = [group.worker_type for group in model.groups if group.worker_type is not WorkerType.PLACEHOLDER]
        if WorkerType.PREFILL in kinds or WorkerType.DECODE in kinds:
            return f"rollout model {model.name!r} has prefill and decode groups; use regular engines"
        if len(kinds) > 1:
            return f"rollout model {model.name!r} has {len(kinds)} groups of engines, wanted one"
    return None


def _mixed(facts: Facts) -> str | None:
    deferred = [role.role for role in facts.static if role.deferred]
    resident = [role.role for role in facts.static if not role.deferred]
    if deferred and resident:
        return f"{resident[0]} is not deferred and {deferred[0]} is; defer both, or neither with placement: split"
    return None


def _adapter(facts: Facts) -> str | None:
    if facts.reward.supports_deferred:
        return None
    return (
        f"reward adapter {facts.reward.name!r} does not support deferral; use one of "
        f"{', '.join(facts.deferrable) or 'none that is registered'}, or placement: split or decoupled"
    )


def _role_of_reward(facts: Facts) -> str | None:
    role = facts.reward.role
    if role is None or facts.plan.role(role) is not None:
        return None
    return f"reward adapter {facts.reward.name!r} asks the role {role}, which the run does not have; add roles.{role}"


def _size(facts: Facts) -> str | None:
    size = facts.batch.batch_size * facts.batch.n_samples_per_prompt
    if size <= MAX_SAMPLES:
        return None
    return f"batch_size times n_samples_per_prompt is {size} samples, wanted up to {MAX_SAMPLES}; make smaller batches"


def _when(wrong: bool, sentence: str) -> str | None:
    return sentence if wrong else None


def _names(models: Sequence[ModelPlan]) -> str:
    return ", ".join(model.name for model in models)


RULES: tuple[Rule, ...] = (
    Rule("rollout", True, lambda f: _when(f.plan.role(Role.ROLLOUT) is None, "the run has no rollout role; add one")),
    Rule(
        "offline",
        True,
        lambda f: _when(
            f.batch.job.kind != "rl", f"batch.job.kind is {f.batch.job.kind}, which generates nothing; wanted rl"
        ),
    ),
    Rule("reward_role", True, _role_of_reward),
    Rule(
        "teacher_role",
        True,
        lambda f: _when(
            f.batch.teacher is not None and f.plan.role(Role.TEACHER) is None,
            "batch.teacher is set and the run has no teacher; add roles.teacher or remove it",
        ),
    ),
    Rule("size", True, _size),
    Rule(
        "partial_rollout",
        False,
        lambda f: _when(
            f.batch.job.partial_rollout,
            "batch.job.partial_rollout is true; responses would outlive the policy's turn, so set it to false",
        ),
    ),
    Rule(
        "dynamic_batch",
        False,
        lambda f: _when(
            f.batch.job.dynamic_batch,
            "batch.job.dynamic_batch is true; a closed batch has a known size, set it to false",
        ),
    ),
    Rule("custom_hooks", False, _custom),
    Rule(
        "train_offload",
        False,
        lambda f: _when(
            not f.train_offload, "training.offload is false; training would keep its memory, so set it to true"
        ),
    ),
    Rule(
        "evaluation_data",
        False,
        lambda f: _when(
            f.batch.job.evaluation_data,
            "batch.job.evaluation_data is true; there is no stage for it, so evaluate in a run of its own",
        ),
    ),
    Rule(
        "judges",
        False,
        lambda f: _when(
            len(f.models(Role.GENRM)) > 1,
            f"genrm has {len(f.models(Role.GENRM))} models ({_names(f.models(Role.GENRM))}), wanted one",
        ),
    ),
    Rule("rollout_groups", False, _groups),
    Rule("adapter", False, _adapter),
    Rule("mixed_static", False, _mixed),
    Rule(
        "student_oversampling",
        False,
        lambda f: _when(
            f.batch.student_scoring and (f.batch.oversample or 0) > f.batch.batch_size,
            f"batch.oversample is {f.batch.oversample} with student_scoring, wanted at most batch_size "
            f"({f.batch.batch_size}); turn one of them off",
        ),
    ),
    Rule(
        "custom_rollout",
        False,
        lambda f: _when(
            f.batch.job.custom_rollout is not None and not f.batch.job.transfer_adapter,
            f"batch.job.custom_rollout is {f.batch.job.custom_rollout!r} without a transfer adapter; its groups would "
            "bypass the capture, so hand them to one and set transfer_adapter: true",
        ),
    ),
)
"""All refusals, in the order in which they are looked for."""


def facts_of(config: RunConfig, plan: InferencePlacementPlan, registry: RewardRegistry | None = None) -> Facts:
    """What the rules look at. ConfigError when the reward adapter is not known."""
    registry = registry or shipped()
    batch = config.batch or BatchConfig()
    offload = config.training is None or config.training.offload
    return Facts(batch, plan, registry[batch.reward.adapter], registry.deferrable(), offload)


def refusals(facts: Facts) -> list[tuple[str, str]]:
    """Every rule that is broken, with its sentence."""
    found = []
    for rule in RULES:
        if rule.always or facts.plan.mode is Mode.DEFER:
            sentence = rule.look(facts)
            if sentence is not None:
                found.append((rule.name, sentence))
    return found


def check(config: RunConfig, plan: InferencePlacementPlan, registry: RewardRegistry | None = None) -> None:
    """BatchRefused names the first rule that is broken. A run without a `batch` section is held to what concerns its
    placement only."""
    facts = facts_of(config, plan, registry)
    always = {rule.name for rule in RULES if rule.always}
    broken = [(name, said) for name, said in refusals(facts) if config.batch is not None or name not in always]
    if broken:
        more = f" ({len(broken)} things in all)" if len(broken) > 1 else ""
        where = "placement: defer with batches" if broken[0][0] not in always else "batch"
        raise BatchRefused(
            f"{where}: {broken[0][1]}{more}", detail={"rules": [{"rule": name, "what": said} for name, said in broken]}
        )
