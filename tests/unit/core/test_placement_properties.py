"""Random clusters and roles: what is planned keeps every rule, and what is refused really breaks one."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.config.load import from_mapping
from relax_slurm.core.placement import plan
from relax_slurm.core.placement_errors import Refusal
from relax_slurm.core.placement_json import from_json, to_json
from relax_slurm.core.plan import InferencePlacementPlan

ORDER = ("rollout", "genrm", "teacher")


@st.composite
def small_run(draw: st.DrawFn) -> dict[str, Any]:
    """A run of up to three roles on up to four nodes; about half of them do not fit."""
    mode = draw(st.sampled_from(["decoupled", "split", "defer"]))
    names = draw(st.lists(st.sampled_from(ORDER), min_size=1, max_size=3, unique=True))
    nodes, per_node = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3, 4, 8]))
    shared = {"nodes": nodes, "gpus_per_node": per_node}
    pools = dict.fromkeys(names, shared) if mode == "decoupled" else {"actor": shared}
    roles: dict[str, Any] = {}
    for name in names:
        size = draw(st.sampled_from([1, 2, 4, 8]))
        count = 1 if mode == "defer" else draw(st.integers(1, 2))
        models = {
            f"m{number}": {"model_path": "p", "gpus": size * draw(st.integers(1, 4)), "gpus_per_engine": size}
            for number in range(count)
        }
        roles[name] = {"pool": name if mode == "decoupled" else "actor", "models": models}
        if mode != "defer":
            roles[name]["offset"] = draw(st.one_of(st.none(), st.integers(0, 8)))
    run: dict[str, Any] = {"name": "t", "placement": mode, "pools": pools, "roles": roles}
    if mode != "decoupled":
        run["training"] = {"pool": "actor", "gpus": nodes * per_node}
    return run


def fits(run: dict[str, Any]) -> bool:
    """The rules once more, counted slot by slot: which (pool, node, gpu, phase) does each engine take?"""
    used: set[tuple[str, int, int]] = set()
    cursor = 0
    for name in ORDER:
        if name not in run["roles"]:
            continue
        role = run["roles"][name]
        pool = run["pools"][role["pool"]]
        per_node = pool["gpus_per_node"]
        start = role.get("offset")
        if start is None:
            start = cursor if run["placement"] == "split" else 0
        phase = ORDER.index(name) if run["placement"] == "defer" else 0
        for model in role["models"].values():
            for _ in range(model["gpus"] // model["gpus_per_engine"]):
                slots = range(start, start + model["gpus_per_engine"])
                start = slots.stop
                if slots.stop > pool["nodes"] * per_node:
                    return False
                per = defaultdict(list)
                for slot in slots:
                    if (role["pool"], slot, phase) in used:
                        return False
                    used.add((role["pool"], slot, phase))
                    per[slot // per_node].append(slot)
                whole = all(len(taken) == per_node for taken in per.values())
                if len(per) > 1 and not (whole and model["gpus_per_engine"] > per_node):
                    return False
        cursor = max(cursor, start)
    return True


def check(made: InferencePlacementPlan, run: dict[str, Any]) -> None:
    resident: dict[tuple[str, int, int, int], str] = {}
    offsets: dict[tuple[str, int], set[int]] = defaultdict(set)
    for role in made.roles:
        pool = made.pool(role.pool)
        assert role.gpus == sum(len(replica.bundles) for model in role.models for replica in model.replicas)
        for model in role.models:
            wanted = run["roles"][role.role.value]["models"][model.name]
            assert sum(len(replica.bundles) for replica in model.replicas) == wanted["gpus"]
            for number, replica in enumerate(model.replicas):
                assert replica.replica_id == f"{model.name}/replica-{number}"
                assert len(replica.bundles) == model.gpus_per_engine
                nodes = [worker.node for worker in replica.workers]
                assert len(set(nodes)) == len(nodes)
                assert [worker.node_rank for worker in replica.workers] == list(range(len(nodes)))
                slots = [worker.node * pool.gpus_per_node + gpu for worker in replica.workers for gpu in worker.gpus]
                assert tuple(slots) == replica.bundles
                for worker in replica.workers:
                    assert list(worker.gpus) == list(range(worker.gpus[0], worker.gpus[0] + len(worker.gpus)))
                    assert 0 <= worker.node < pool.nodes
                    assert worker.gpus[-1] < pool.gpus_per_node
                    for gpu in worker.gpus:
                        slot = (worker.pool, worker.node, gpu, role.phase)
                        assert resident.setdefault(slot, replica.replica_id) == replica.replica_id
                    ports = set(range(worker.ports.guard, worker.ports.rendezvous + 10))
                    assert not ports & offsets[worker.pool, worker.node]
                    offsets[worker.pool, worker.node] |= ports
                    assert max(ports) < made.ports.span


@settings(max_examples=300)
@given(small_run())
def test_planner_and_slot_counter_agree(run: dict[str, Any]) -> None:
    config = from_mapping(run)
    if not fits(run):
        with pytest.raises(Refusal):
            plan(config)
        return
    made = plan(config)
    check(made, run)
    assert plan(config) == made
    assert from_json(to_json(made)) == made
