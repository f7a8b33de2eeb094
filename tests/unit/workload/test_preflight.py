"""Every combination that is refused, each with its own sentence; and every shipped run file that is not."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.config.load import from_mapping, load
from relax_slurm.config.models import RunConfig
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.core.plan import Mode, Role
from relax_slurm.errors import ConfigError, PlanRefused
from relax_slurm.workload import preflight
from relax_slurm.workload.failures import BatchRefused
from relax_slurm.workload.preflight import RULES, Facts
from relax_slurm.workload.rewards.registry import Registration, RewardRegistry
from relax_slurm.workload.rewards.shipped import shipped
from tests.unit.workload.stage import FixedReward

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.stem != "cluster-example")


def model(gpus: int, **more: Any) -> dict[str, Any]:
    return {"model_path": "sim/x", "gpus": gpus, **more}


def run(placement: str = "defer", **batch: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "run",
        "placement": placement,
        "engine": {"program": "sim"},
        "pools": {"actor": {"nodes": 1, "gpus_per_node": 8}},
        "training": {"pool": "actor", "gpus": 8},
        "roles": {
            "rollout": {"pool": "actor", "models": {"policy": model(4)}},
            "genrm": {"pool": "actor", "models": {"judge": model(2)}},
            "teacher": {"pool": "actor", "models": {"math": model(2)}},
        },
        "batch": batch,
    }
    return base


def refused(data: dict[str, Any]) -> tuple[str, str]:
    config = from_mapping(data)
    with pytest.raises(BatchRefused) as caught:
        preflight.check(config, make_plan(config, ephemeral=None))
    assert caught.value.exit_code == 3
    rules = caught.value.detail["rules"]
    assert len(rules) == 1, rules
    return rules[0]["rule"], caught.value.message


def with_roles(**roles: Any) -> dict[str, Any]:
    data = run()
    for name, value in roles.items():
        data["roles"][name] |= value
    return data


TOPK = {"selection": "teacher_topk"}
GROUP = {"gpus": 2}
PD = {"groups": [GROUP | {"worker_type": "prefill"}, GROUP | {"worker_type": "decode"}], "gpus_per_engine": 2}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("partial_rollout", run(job={"partial_rollout": True}), "batch.job.partial_rollout is true"),
    ("dynamic_batch", run(job={"dynamic_batch": True}), "batch.job.dynamic_batch is true"),
    ("custom_hooks", run(job={"custom_reward": "my.reward"}), "batch.job.custom_reward is 'my.reward'"),
    ("custom_hooks", run(job={"custom_convert": "my.convert"}), "batch.job.custom_convert is 'my.convert'"),
    ("custom_hooks", run(job={"custom_filter": "my.filter"}), "batch.job.custom_filter is 'my.filter'"),
    ("offline", run(job={"kind": "sft"}), "batch.job.kind is sft"),
    ("offline", run(job={"kind": "dpo"}), "batch.job.kind is dpo"),
    ("offline", run("split", job={"kind": "rm"}), "batch.job.kind is rm"),
    ("evaluation_data", run(job={"evaluation_data": True}), "batch.job.evaluation_data is true"),
    ("adapter", run(reward={"adapter": "remote", "url": "http://h"}), "'remote' does not support deferral; use one of"),
    (
        "student_oversampling",
        run(student_scoring=True, teacher=TOPK, batch_size=2, oversample=3),
        "batch.oversample is 3 with student_scoring, wanted at most batch_size (2)",
    ),
    ("custom_rollout", run(job={"custom_rollout": "my.rollout"}), "'my.rollout' without a transfer adapter"),
    ("size", run(batch_size=65_536, n_samples_per_prompt=2), "is 131072 samples, wanted up to 65536"),
]


@pytest.mark.parametrize(("rule", "data", "sentence"), CASES, ids=[f"{case[0]}-{i}" for i, case in enumerate(CASES)])
def test_refused(rule: str, data: dict[str, Any], sentence: str) -> None:
    broken, message = refused(data)
    assert broken == rule
    assert sentence in message


def facts(data: dict[str, Any], **changes: Any) -> Facts:
    config = from_mapping(data)
    plan = make_plan(config, ephemeral=None)
    made = preflight.facts_of(config, plan)
    fields = {name: getattr(made, name) for name in ("batch", "plan", "reward", "deferrable", "train_offload")}
    return Facts(**{**fields, **changes})


def test_training_that_keeps_its_memory() -> None:
    assert preflight.refusals(facts(run(), train_offload=False)) == [
        ("train_offload", "training.offload is false; training would keep its memory, so set it to true")
    ]


PLANS: list[tuple[str, dict[str, Any], str]] = [
    (
        "judges",
        with_roles(genrm={"models": {"a": model(1), "b": model(1)}}),
        "genrm has 2 models (a, b), wanted one",
    ),
    ("rollout_groups", with_roles(rollout={"models": {"a": model(2), "b": model(2)}}), "rollout has 2 models (a, b)"),
    ("rollout_groups", with_roles(rollout={"models": {"p": model(4, **PD)}}), "has prefill and decode groups"),
    (
        "rollout_groups",
        with_roles(rollout={"models": {"p": model(4, groups=[GROUP, GROUP], gpus_per_engine=2)}}),
        "has 2 groups of engines, wanted one",
    ),
    ("mixed_static", run(), "teacher is not deferred and genrm is; defer both"),
]
"""Plans that the planner refuses by itself; the rules look at plans from elsewhere too."""


@pytest.mark.parametrize(("rule", "data", "sentence"), PLANS, ids=[f"{case[0]}-{i}" for i, case in enumerate(PLANS)])
def test_plans_that_are_refused(rule: str, data: dict[str, Any], sentence: str) -> None:
    if rule == "mixed_static":
        data["roles"]["teacher"]["deferred"] = False
    with pytest.raises(PlanRefused):
        make_plan(from_mapping(data), ephemeral=None)
    data["roles"]["teacher"].pop("deferred", None)
    config = from_mapping(data | {"placement": "split"})
    plan = make_plan(config, ephemeral=None)
    deferred = {Role.GENRM} if rule == "mixed_static" else {Role.GENRM, Role.TEACHER}
    roles = tuple(replace(role, deferred=role.role in deferred) for role in plan.roles)
    with pytest.raises(BatchRefused) as caught:
        preflight.check(config, replace(plan, mode=Mode.DEFER, roles=roles))
    assert [found["rule"] for found in caught.value.detail["rules"]] == [rule]
    assert sentence in caught.value.message


def test_roles_that_are_asked_must_be_there() -> None:
    data = run("decoupled", reward={"adapter": "genrm"}, teacher={})
    del data["training"], data["roles"]["genrm"], data["roles"]["teacher"]
    config = from_mapping(data)
    with pytest.raises(BatchRefused, match="asks the role genrm, which the run does not have") as caught:
        preflight.check(config, make_plan(config, ephemeral=None))
    assert [rule["rule"] for rule in caught.value.detail["rules"]] == ["reward_role", "teacher_role"]


def test_a_run_without_rollout_may_be_launched_but_not_asked_for_batches() -> None:
    data = run("decoupled")
    del data["training"], data["roles"]["rollout"], data["roles"]["genrm"]
    config = from_mapping(data)
    with pytest.raises(BatchRefused, match="has no rollout role"):
        preflight.check(config, make_plan(config, ephemeral=None))
    without = from_mapping({key: value for key, value in data.items() if key != "batch"})
    preflight.check(without, make_plan(without, ephemeral=None))


ONLY_DEFER = [case for case in CASES if not next(rule for rule in RULES if rule.name == case[0]).always]


@pytest.mark.parametrize("data", [case[1] for case in ONLY_DEFER], ids=str)
def test_the_same_is_fine_where_nothing_is_deferred(data: dict[str, Any]) -> None:
    data = copy.deepcopy(data) | {"placement": "split"}
    config = from_mapping(data)
    preflight.check(config, make_plan(config, ephemeral=None))


def test_it_is_the_capability_that_counts() -> None:
    loud = RewardRegistry([Registration("remote", lambda context: FixedReward(), supports_deferred=True)])
    config = from_mapping(run(reward={"adapter": "remote"}))
    plan = make_plan(config, ephemeral=None)
    preflight.check(config, plan, loud)
    with pytest.raises(BatchRefused, match="does not support deferral"):
        preflight.check(config, plan, shipped())
    unknown = from_mapping(run(reward={"adapter": "remot"}))
    with pytest.raises(ConfigError, match="did you mean 'remote'"):
        preflight.check(unknown, plan)


def test_all_that_is_wrong_is_counted() -> None:
    config = from_mapping(run(job={"partial_rollout": True, "dynamic_batch": True}))
    with pytest.raises(BatchRefused, match=r"2 things in all"):
        preflight.check(config, make_plan(config, ephemeral=None))


def test_every_rule_has_a_test() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert not [rule.name for rule in RULES if f'"{rule.name}"' not in here and rule.name != "rollout"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_run_file_passes(path: Path) -> None:
    config: RunConfig = load(path, environ={})
    plan = make_plan(config, ephemeral=None)
    preflight.check(config, plan)
    assert preflight.refusals(preflight.facts_of(config, plan)) == []
