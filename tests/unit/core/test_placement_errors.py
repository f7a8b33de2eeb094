"""Every rule has a run file that breaks it, and the sentence says where and with which numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from relax_slurm.config.load import from_mapping
from relax_slurm.core import placement_errors as errors
from relax_slurm.core.placement import plan
from relax_slurm.core.placement_job import job_shape


def pool(nodes: int = 1, gpus: int = 8, **more: Any) -> dict[str, Any]:
    return {"nodes": nodes, "gpus_per_node": gpus, **more}


def model(**more: Any) -> dict[str, Any]:
    return {"model_path": "p", **more}


def role(
    where: str = "a", /, *, models: dict[str, Any] | None = None, more: dict[str, Any] | None = None, **one: Any
) -> Any:
    return {"pool": where, "models": models or {"m": model(**one)}, **(more or {})}


def base(placement: str = "decoupled", **changes: Any) -> dict[str, Any]:
    start: dict[str, Any] = {
        "name": "t",
        "placement": placement,
        "pools": {"a": pool()},
        "roles": {"rollout": role(gpus=8)},
    }
    if placement != "decoupled":
        start["training"] = {"pool": "a", "gpus": 8}
    return {**start, **changes}


def rollout(**one: Any) -> dict[str, Any]:
    return base(roles={"rollout": role(**one)})


def groups(*types: str, **more: Any) -> dict[str, Any]:
    size = 8 // len(types)
    return rollout(gpus=8, groups=[{"worker_type": kind, "gpus": size} for kind in types], **more)


TWO = {"rollout": role(gpus=4), "genrm": role(gpus=4)}
APART = {"rollout": role(gpus=8), "genrm": role("b", gpus=8)}
CASES: list[tuple[type[errors.Refusal], dict[str, Any], list[str]]] = [
    (errors.UnknownPool, base(roles={"rollout": role("x", gpus=8)}), ["roles.rollout.pool", "'x'", "(a)"]),
    (errors.UnknownPool, base(training={"pool": "x", "gpus": 1}), ["training.pool"]),
    (errors.PoolUnused, base(pools={"a": pool(), "idle": pool(3)}), ["pools.idle", "3 nodes"]),
    (errors.BudgetMissing, rollout(), ["roles.rollout.models.m.gpus", "null"]),
    (
        errors.BudgetMissing,
        base(roles={"rollout": role(models={"m": model(), "n": model()}, more={"gpus": 8})}),
        ["roles.rollout.models.m.gpus", "2 models"],
    ),
    (errors.BudgetSum, base(roles={"rollout": role(gpus=4, more={"gpus": 8})}), ["is 8", "add up to 4", "m 4"]),
    (
        errors.TeacherBudget,
        base(roles={"teacher": role(models={"m": model(), "n": model(), "o": model()}, more={"gpus": 8})}),
        ["is 8", "3 models"],
    ),
    (
        errors.TeacherBudget,
        base(roles={"teacher": role(models={"m": model(gpus=4), "n": model()}, more={"gpus": 8})}),
        ["m 4 name a budget and n none"],
    ),
    (errors.GroupSum, rollout(gpus=8, groups=[{"gpus": 4}]), ["add up to 4", "is 8"]),
    (errors.BudgetDivision, rollout(gpus=7, gpus_per_engine=2), ["budget of 7", "engine 2", "use 6 or 8"]),
    (errors.BudgetDivision, rollout(gpus=1, gpus_per_engine=2), ["use 2"]),
    (
        errors.ParallelismMismatch,
        rollout(gpus=8, gpus_per_engine=8, engine_args={"tp_size": 2, "pp_size": 2}),
        ["tp_size 2 x pp_size 2 = 4", "gpus_per_engine is 8"],
    ),
    (errors.ParallelismMismatch, rollout(gpus=8, gpus_per_engine=8, engine_args={"pp_size": 3}), ["2 x pp_size 3 = 6"]),
    (
        errors.DataParallelDivision,
        rollout(gpus=8, engine_args={"tp_size": 8, "dp_size": 3, "enable_dp_attention": True}),
        ["tp_size 8", "dp_size 3"],
    ),
    (errors.DataParallelWithoutAttention, rollout(gpus=8, engine_args={"tp_size": 2, "dp_size": 4}), ["2 x 4 = 8"]),
    (errors.WholeNodes, base(pools={"a": pool(3)}, roles={"rollout": role(gpus=12, gpus_per_engine=12)}), ["is 12"]),
    (
        errors.WholeNodes,
        base(pools={"a": pool(3)}, roles={"rollout": role(gpus=16, gpus_per_engine=16, more={"offset": 4})}),
        ["start at bundle 4", "start at 8"],
    ),
    (
        errors.EngineStraddlesNodes,
        base(pools={"a": pool(2)}, roles={"rollout": role(gpus=9, gpus_per_engine=3)}),
        ["engine 2", "bundles 6 to 8", "nodes 0 and 1"],
    ),
    (errors.SliceOutOfPool, rollout(gpus=9), ["bundles 0 to 8", "which has 8"]),
    (
        errors.SliceOutOfPool,
        base("split", roles={"rollout": role(gpus=8), "genrm": role(gpus=4)}),
        ["roles.genrm", "bundles 8 to 11", "rollout 8 + genrm 4 = 12"],
    ),
    (
        errors.SliceOverlap,
        base("split", roles={"rollout": role(gpus=4), "genrm": role(gpus=4, more={"offset": 2})}),
        ["roles.rollout has bundles 0 to 3", "roles.genrm starts at 2"],
    ),
    (errors.CoResident, base(roles=TWO), ["roles.genrm and roles.rollout", "pool 'a'"]),
    (errors.CoResident, base(training={"pool": "a", "gpus": 8}), ["roles.rollout and training"]),
    (errors.ActorPoolMissing, {**base("split"), "training": None}, ["placement is split"]),
    (errors.ActorPoolMissing, {**base("defer"), "training": None}, ["placement is defer"]),
    (
        errors.OutsideActorPool,
        base("split", pools={"a": pool(), "b": pool()}, roles=APART),
        ["roles.genrm.pool is 'b'", "actor pool is 'a'"],
    ),
    (errors.OffloadNeeded, base("split", training={"pool": "a", "gpus": 8, "offload": False}), ["training.offload"]),
    (errors.OffloadNeeded, base("defer", roles={"rollout": role(gpus=8, more={"offload": False})}), ["roles.rollout"]),
    (
        errors.DeferredRole,
        base("defer", roles={"rollout": role(gpus=8, more={"deferred": True})}),
        ["rollout.deferred"],
    ),
    (
        errors.DeferredOutsideDefer,
        base("split", roles={"genrm": role(gpus=8, more={"deferred": True})}),
        ["roles.genrm.deferred", "placement is split"],
    ),
    (
        errors.MixedDeferral,
        base("defer", roles={"rollout": role(gpus=8), "genrm": role(gpus=8, more={"deferred": False})}),
        ["roles.genrm.deferred is false"],
    ),
    (errors.DeferOffset, base("defer", roles={"genrm": role(gpus=4, more={"offset": 4})}), ["offset is 4"]),
    (
        errors.DeferManyGroups,
        base("defer", roles={"genrm": role(models={"m": model(gpus=4), "n": model(gpus=4)})}),
        ["2 models"],
    ),
    (
        errors.DeferManyGroups,
        base("defer", roles={"rollout": role(gpus=8, groups=[{"gpus": 4}, {"gpus": 4}])}),
        ["2 groups"],
    ),
    (errors.MixedWorkerTypes, groups("regular", "prefill"), ["prefill, regular"]),
    (errors.PrefillDecodePair, groups("prefill"), ["no decode group"]),
    (errors.PrefillDecodePair, groups("decode", "placeholder"), ["no prefill group"]),
    (errors.DisaggregationRoute, groups("prefill", "decode", route_mode="DIRECT"), ["route_mode is DIRECT"]),
    (errors.NothingServes, groups("placeholder", "placeholder"), ["all 2 groups"]),
    (errors.ExternalShared, base("split", roles={"rollout": role(external=["http://x"])}), ["placement is split"]),
    (
        errors.ExternalBesideManaged,
        base(roles={"rollout": role(external=["http://x"]), "genrm": role("b", gpus=8)}),
        ["roles.genrm is managed"],
    ),
    (errors.TrainingBudget, base("split", training={"pool": "a", "gpus": 9}), ["is 9", "has 8"]),
    (
        errors.TrainingBudget,
        base("split", training={"pool": "a", "gpus": 8, "components": {"actor": 4, "critic": 2}}),
        ["add up to 6", "is 8"],
    ),
    (errors.SingleJobShape, base(job_shape="single", head={}), ["head component"]),
    (
        errors.SingleJobShape,
        base(job_shape="single", pools={"a": pool(), "b": pool(gpus=4)}, roles={**APART, "genrm": role("b", gpus=4)}),
        ["pools.a.gpus_per_node is 8 and pools.b.gpus_per_node is 4"],
    ),
    (errors.HetJobShape, base(job_shape="het"), ["1 component"]),
    (errors.HetJobShape, base(head={}, slurm={"het_jobs": False}), ["slurm.het_jobs is false"]),
    (errors.PortOverflow, base(ports={"first": 65500, "last": 65535}), ["> 65535 for replica m/replica-", "65407"]),
    (errors.PortSpan, base(ports={"first": 20000, "last": 20100}), ["> ports.last 20100", "needs 129 ports"]),
    (errors.PortEphemeral, base(ports={"first": 30000, "last": 40000}), ["30000-40000", "32768-60999", "1024-32767"]),
    (errors.PortEphemeral, base(ports={"first": 80, "last": 4000}), ["ports.first is 80"]),
]


def named_cases() -> dict[str, tuple[type[errors.Refusal], dict[str, Any], list[str]]]:
    """Every case by name: the rule's code, numbered where a rule has several sentences."""
    named: dict[str, tuple[type[errors.Refusal], dict[str, Any], list[str]]] = {}
    seen: Counter[str] = Counter()
    for case in CASES:
        code = case[0].code
        seen[code] += 1
        named[code if seen[code] == 1 else f"{code}-{seen[code]}"] = case
    return named


def refused(data: dict[str, Any]) -> errors.Refusal:
    """The refusal of a run file, on a node with the usual ephemeral range."""
    with pytest.raises(errors.Refusal) as caught:
        plan(from_mapping(data), ephemeral=(32768, 60999))
    return caught.value


@pytest.mark.parametrize("name", list(named_cases()))
def test_rule(name: str) -> None:
    refusal, data, words = named_cases()[name]
    error = refused(data)
    assert type(error) is refusal, error.message
    for word in words:
        assert word in error.message
    assert "\n" not in error.message
    assert error.exit_code == 3
    assert error.as_json()["code"] == refusal.code
    assert error.as_json()["detail"] == {"rule": refusal.rule}


def test_every_rule_has_a_case_a_code_and_a_sentence() -> None:
    assert {case[0] for case in CASES} == set(errors.ALL)
    assert len({refusal.code for refusal in errors.ALL}) == len(errors.ALL)
    for refusal in errors.ALL:
        assert refusal.rule.endswith(".")
        assert refusal.code != errors.Refusal.code


def test_more_components_than_slurm_takes() -> None:
    pools = {f"p{number}": pool(gpus=1 + number % 2) for number in range(129)}
    with pytest.raises(errors.HetJobShape, match="129 components and Slurm takes at most 128"):
        job_shape(from_mapping(base(pools=pools)))
