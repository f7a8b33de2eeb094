"""What the planner makes of good run files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_slurm.config.load import from_mapping, load
from relax_slurm.core.placement import plan
from relax_slurm.core.placement_errors import PoolUnused
from relax_slurm.core.placement_json import from_json, to_json
from relax_slurm.core.plan import InferencePlacementPlan, Mode, Role, RouteMode, WeightSource, WorkerType

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "cluster" not in path.name)


def shipped(name: str) -> InferencePlacementPlan:
    return plan(load(ROOT / "configs" / f"{name}.yaml", environ={}), ephemeral=(32768, 60999))


def role(pool: str, **models: dict[str, Any]) -> dict[str, Any]:
    return {"pool": pool, "models": {name: {"model_path": "p", **model} for name, model in models.items()}}


def make(placement: str, pools: dict[str, Any], roles: dict[str, Any], **more: Any) -> InferencePlacementPlan:
    return plan(from_mapping({"name": "t", "placement": placement, "pools": pools, "roles": roles, **more}))


def pool(nodes: int, gpus: int, **more: Any) -> dict[str, Any]:
    return {"nodes": nodes, "gpus_per_node": gpus, **more}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_plan_fit_four_nodes_and_can_be_launched(path: Path) -> None:
    made = plan(load(path, environ={}), ephemeral=(32768, 60999))
    assert sum(component.nodes for component in made.components) <= 4
    assert all(component.gpus_per_node <= 8 for component in made.components)
    assert {entry.role for entry in made.roles} == set(Role)
    assert made.engine == "sim"


def test_decoupled_is_a_heterogeneous_job_with_a_component_per_pool() -> None:
    made = shipped("decoupled")
    assert (made.job_shape, made.head_component) == ("het", None)
    assert [(entry.name, entry.nodes, entry.gpus_per_node) for entry in made.components] == [
        ("rollout", 2, 8),
        ("genrm", 1, 8),
        ("teacher", 1, 8),
    ]
    assert [entry.component for entry in made.pools] == [0, 1, 2]
    assert all(entry.offset == 0 and entry.phase == 0 and not entry.offload for entry in made.roles)
    teacher = made.role(Role.TEACHER)
    assert teacher is not None
    assert [(model.name, model.replicas[0].bundles) for model in teacher.models] == [
        ("math", (0, 1, 2, 3)),
        ("code", (4, 5, 6, 7)),
    ]


def test_split_runs_one_cursor_over_rollout_genrm_teacher() -> None:
    made = shipped("split")
    assert [(entry.role, entry.offset, entry.gpus) for entry in made.roles] == [
        (Role.ROLLOUT, 0, 8),
        (Role.GENRM, 8, 4),
        (Role.TEACHER, 12, 4),
    ]
    assert all(entry.offload and not entry.deferred for entry in made.roles)


def test_split_cursor_follows_the_roles_order_not_the_files() -> None:
    made = make(
        "split",
        {"a": pool(1, 8)},
        {"teacher": role("a", t={"gpus": 2}), "genrm": role("a", g={"gpus": 2}), "rollout": role("a", r={"gpus": 4})},
        training={"pool": "a", "gpus": 8},
    )
    assert [(entry.role.value, entry.offset) for entry in made.roles] == [("rollout", 0), ("genrm", 4), ("teacher", 6)]


def test_defer_starts_every_role_at_bundle_0_in_a_phase_of_its_own() -> None:
    made = shipped("defer")
    assert made.mode is Mode.DEFER
    assert [(entry.role.value, entry.offset, entry.phase, entry.deferred) for entry in made.roles] == [
        ("rollout", 0, 0, False),
        ("genrm", 0, 1, True),
        ("teacher", 0, 2, True),
    ]
    assert made.training is not None
    assert made.training.components == {"actor": 8}


def test_ports_of_one_node_never_meet_even_across_phases() -> None:
    made = shipped("defer")
    seen: set[int] = set()
    for entry in made.roles:
        for replica in entry.models[0].replicas:
            ports = replica.workers[0].ports
            block = set(range(ports.guard, ports.rendezvous + 10))
            assert not block & seen
            seen |= block
    assert max(seen) < made.ports.span


def test_a_multi_node_engine_takes_whole_distinct_nodes() -> None:
    made = make(
        "decoupled", {"a": pool(4, 8)}, {"rollout": role("a", m={"gpus": 32, "engine_args": {"tp": 8, "pp": 2}})}
    )
    replicas = made.model_placement(Role.ROLLOUT, "m").replicas
    assert [[(worker.node, worker.node_rank, worker.gpus) for worker in replica.workers] for replica in replicas] == [
        [(0, 0, tuple(range(8))), (1, 1, tuple(range(8)))],
        [(2, 0, tuple(range(8))), (3, 1, tuple(range(8)))],
    ]


def test_engine_size_and_tensor_parallelism_follow_from_each_other() -> None:
    roles = {"rollout": role("a", m={"gpus": 8, "gpus_per_engine": 4})}
    model = make("decoupled", {"a": pool(1, 8)}, roles).model_placement(Role.ROLLOUT, "m")
    assert model.engine_args == {"weight_version": "0", "tp_size": 4}
    roles = {"rollout": role("a", m={"gpus": 8, "engine_args": {"tp_size": 2, "pp_size": 2}})}
    assert make("decoupled", {"a": pool(1, 8)}, roles).model_placement(Role.ROLLOUT, "m").gpus_per_engine == 4
    roles = {"rollout": role("a", m={"gpus": 8, "gpus_per_engine": 8, "engine_args": {"pp_size": 2}})}
    assert make("decoupled", {"a": pool(1, 8)}, roles).model_placement(Role.ROLLOUT, "m").engine_args["tp_size"] == 4


def test_defaults_of_models_by_role() -> None:
    made = shipped("defer")
    sources = {entry.role: entry.models[0].weight_source for entry in made.roles}
    assert sources == {
        Role.ROLLOUT: WeightSource.ACTOR,
        Role.GENRM: WeightSource.STATIC,
        Role.TEACHER: WeightSource.STATIC,
    }
    assert all(entry.models[0].route_mode is RouteMode.DIRECT for entry in made.roles)
    assert made.model_placement(Role.GENRM, "judge").served_model_name == "judge"
    with pytest.raises(KeyError):
        made.model_placement(Role.GENRM, "nope")


def test_disaggregated_groups_are_planned() -> None:
    groups = [
        {"worker_type": "prefill", "gpus": 4, "gpus_per_engine": 2, "engine_args": {"chunked_prefill_size": 1}},
        {"worker_type": "decode", "gpus": 2},
        {"worker_type": "placeholder", "gpus": 2},
    ]
    roles = {"rollout": role("a", m={"gpus": 8, "gpus_per_engine": 2, "groups": groups})}
    made = make("decoupled", {"a": pool(1, 8)}, roles)
    model = made.model_placement(Role.ROLLOUT, "m")
    assert model.route_mode is RouteMode.SGLANG_ROUTER
    assert [(replica.worker_type, replica.bundles) for replica in model.replicas] == [
        (WorkerType.PREFILL, (0, 1)),
        (WorkerType.PREFILL, (2, 3)),
        (WorkerType.DECODE, (4, 5)),
        (WorkerType.PLACEHOLDER, (6, 7)),
    ]
    assert model.replicas[3].workers == ()
    assert model.engine_args_of(model.replicas[1]) == {"weight_version": "0", "chunked_prefill_size": 1, "tp_size": 2}
    assert model.engine_args_of(model.replicas[2]) == {"weight_version": "0", "tp_size": 2}


def test_external_engines_take_no_gpu() -> None:
    made = shipped("external")
    teacher = made.role(Role.TEACHER)
    assert teacher is not None
    assert (teacher.pool, teacher.gpus, teacher.default_model) == ("", 0, "math")
    (model,) = teacher.models
    assert (model.replicas, model.route_mode, model.weight_source) == ((), RouteMode.DIRECT, WeightSource.STATIC)
    assert [(engine.engine_id, engine.url) for engine in model.external] == [
        ("math/external-0", "http://127.0.0.1:30000")
    ]
    assert from_json(to_json(made)) == made


def test_one_role_may_have_both_kinds_of_models() -> None:
    theirs = {"external": [{"url": "http://node:1/base/", "api_key_env": "KEY"}]}
    made = make("decoupled", {"a": pool(1, 2)}, {"teacher": role("a", theirs=theirs, ours={"gpus": 2})})
    assert [model.name for model in made.roles[0].models] == ["theirs", "ours"]
    assert (made.roles[0].default_model, made.roles[0].gpus) == ("theirs", 2)
    (engine,) = made.roles[0].models[0].external
    assert (engine.url, engine.key_env, engine.key_file) == ("http://node:1/base", "KEY", None)


def test_a_pool_of_external_models_only_is_not_used() -> None:
    with pytest.raises(PoolUnused):
        make("decoupled", {"a": pool(1, 1)}, {"teacher": role("a", m={"external": ["http://node:1"]})})


ONE = {"rollout": role("a", m={"gpus": 8}), "genrm": role("b", g={"gpus": 8})}


def test_auto_is_single_when_all_nodes_look_alike() -> None:
    made = make("decoupled", {"a": pool(1, 8), "b": pool(2, 8)}, ONE | {"genrm": role("b", g={"gpus": 16})})
    assert made.job_shape == "single"
    assert [(entry.name, entry.nodes) for entry in made.components] == [("a+b", 3)]
    assert [(entry.name, entry.component, entry.first_node) for entry in made.pools] == [("a", 0, 0), ("b", 0, 1)]


@pytest.mark.parametrize("more", [{"gpu_type": "h100"}, {"partition": "x"}, {"cpus_per_node": 4}, {"mem": "8G"}])
def test_auto_is_het_when_nodes_differ(more: dict[str, Any]) -> None:
    assert make("decoupled", {"a": pool(1, 8), "b": pool(1, 8, **more)}, ONE).job_shape == "het"


def test_a_head_component_comes_first_because_the_batch_script_runs_there() -> None:
    made = make(
        "decoupled",
        {"a": pool(1, 8), "b": pool(1, 8)},
        ONE,
        head={"cpus": 4, "mem": "4G"},
        slurm={"partition": "gpu"},
    )
    assert (made.job_shape, made.head_component) == ("het", 0)
    head = made.components[0]
    assert (head.gpus_per_node, head.cpus_per_node, head.mem, head.partition) == (0, 4, "4G", "gpu")
    assert [entry.component for entry in made.pools] == [1, 2]


def test_the_source_systems_own_examples_fit() -> None:
    deferred = make(
        "defer",
        {"a": pool(2, 8)},
        {
            "rollout": role("a", policy={"gpus": 16, "gpus_per_engine": 2}),
            "genrm": role(
                "a",
                judge={
                    "gpus": 16,
                    "engine_args": {"tp_size": 8, "dp_size": 8, "ep_size": 8, "enable_dp_attention": True},
                },
            ),
        },
        training={"pool": "a", "gpus": 16},
    )
    assert [len(entry.models[0].replicas) for entry in deferred.roles] == [8, 2]
    distillation = make(
        "split",
        {"a": pool(16, 8)},
        {"rollout": role("a", r={"gpus": 120}), "teacher": role("a", t={"gpus": 8, "gpus_per_engine": 8})},
        training={"pool": "a", "gpus": 128},
    )
    teacher = distillation.role(Role.TEACHER)
    assert teacher is not None
    assert (teacher.offset, teacher.models[0].replicas[0].bundles) == (120, tuple(range(120, 128)))


def test_planning_is_repeatable() -> None:
    assert shipped("split") == shipped("split")


def test_a_thousand_nodes_are_planned() -> None:
    config = from_mapping(
        {
            "name": "big",
            "placement": "split",
            "pools": {"a": pool(1024, 8)},
            "roles": {"rollout": role("a", r={"gpus": 8000}), "teacher": role("a", t={"gpus": 192})},
            "training": {"pool": "a", "gpus": 8192},
        }
    )
    made = plan(config)
    assert sum(len(entry.models[0].replicas) for entry in made.roles) == 8192
