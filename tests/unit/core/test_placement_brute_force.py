"""A second planner, written slot by slot and without a look at the first: both agree on every small cluster.

The checker walks through a run file and collects the codes of all rules that it breaks. The planner must refuse exactly
the run files that break one, with one of these codes, and must put every engine on the slots that the checker counted.
"""

from __future__ import annotations

import itertools
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
Slots = dict[str, list[int]]
"""Engine by `role/model/index` to its bundles."""


class Checker:
    """Collects what is wrong with a run file, and where each engine lies."""

    def __init__(self, run: dict[str, Any]) -> None:
        self.run = run
        self.mode: str = run["placement"]
        self.broken: set[str] = set()
        self.slots: Slots = {}
        self.holders: dict[tuple[str, str, int], str] = {}
        self.cursor = 0

    def check(self) -> None:
        for name in ORDER:
            if name in self.run["roles"]:
                self.role(name, self.run["roles"][name])
        training = self.run.get("training")
        if training is None:
            if self.mode != "decoupled":
                self.broken.add("actor_pool_missing")
            return
        pool = self.run["pools"][training["pool"]]
        parts = training.get("components")
        if training["gpus"] > pool["nodes"] * pool["gpus_per_node"] or (
            parts and sum(parts.values()) != training["gpus"]
        ):
            self.broken.add("training_budget")
        if self.mode != "decoupled" and training.get("offload") is False:
            self.broken.add("offload_needed")

    def role(self, name: str, role: dict[str, Any]) -> None:
        self.deferral(name, role)
        pool = self.run["pools"][role["pool"]]
        per_node, size = pool["gpus_per_node"], pool["nodes"] * pool["gpus_per_node"]
        budgets = self.budgets(name, role)
        start = role.get("offset")
        if start is None:
            start = self.cursor if self.mode == "split" else 0
        for model, budget in budgets.items():
            for engine in self.engines(role["models"][model], budget):
                bundles = list(range(start, start + engine))
                start += engine
                number = sum(key.startswith(f"{name}/{model}/") for key in self.slots)
                key = f"{name}/{model}/{number}"
                self.slots[key] = bundles
                self.place(key, role["pool"], name if self.mode == "defer" else "", bundles, per_node, size)
        self.cursor = max(self.cursor, start)

    def deferral(self, name: str, role: dict[str, Any]) -> None:
        deferred = role.get("deferred")
        if self.mode != "defer" and deferred:
            self.broken.add("deferred_role" if name == "rollout" else "deferred_outside_defer")
        if self.mode != "defer":
            return
        if name == "rollout" and deferred:
            self.broken.add("deferred_role")
        if name != "rollout" and deferred is False:
            self.broken.add("mixed_deferral")
        if role.get("offset"):
            self.broken.add("defer_offset")
        groups = [group for model in role["models"].values() for group in model.get("groups") or [{}]]
        if name == "genrm" and len(role["models"]) > 1:
            self.broken.add("defer_many_groups")
        if name == "rollout" and (len(groups) > 1 or groups[0].get("worker_type") in {"prefill", "decode"}):
            self.broken.add("defer_many_groups")

    def budgets(self, name: str, role: dict[str, Any]) -> dict[str, int]:
        given = {model: entry.get("gpus") for model, entry in role["models"].items()}
        whole = role.get("gpus")
        if all(given.values()):
            if whole is not None and whole != sum(given.values()):
                self.broken.add("budget_sum")
            return given
        if name == "teacher" and any(given.values()):
            self.broken.add("teacher_budget")
        elif whole is None or (len(given) > 1 and name != "teacher"):
            self.broken.add("budget_missing")
        elif whole % len(given):
            self.broken.add("teacher_budget")
        return {model: budget or (whole or 0) // len(given) for model, budget in given.items()}

    def engines(self, model: dict[str, Any], budget: int) -> list[int]:
        """GPUs of every engine of a model, in order."""
        groups = model.get("groups") or [{"gpus": budget}]
        kinds = [group.get("worker_type", "regular") for group in groups]
        if sum(group["gpus"] for group in groups) != budget:
            self.broken.add("group_sum")
        if model.get("groups"):
            halves = {"prefill", "decode"} & set(kinds)
            if set(kinds) == {"placeholder"}:
                self.broken.add("nothing_serves")
            if halves and "regular" in kinds:
                self.broken.add("mixed_worker_types")
            if len(halves) == 1:
                self.broken.add("prefill_decode_pair")
            if halves and model.get("route_mode") == "DIRECT":
                self.broken.add("disaggregation_route")
        found: list[int] = []
        for group in groups:
            args = model.get("engine_args", {})
            tp, pp, dp = args.get("tp_size"), args.get("pp_size", 1), args.get("dp_size", 1)
            size = model.get("gpus_per_engine") or (tp or 1) * pp
            tp = tp or max(1, size // pp)
            if tp * pp != size:
                self.broken.add("parallelism_mismatch")
            if dp > 1 and not args.get("enable_dp_attention"):
                self.broken.add("data_parallel_without_attention")
            if tp % dp:
                self.broken.add("data_parallel_division")
            if group["gpus"] % size:
                self.broken.add("budget_division")
            found += [size] * (group["gpus"] // size)
        return found

    def place(self, key: str, pool: str, phase: str, bundles: list[int], per_node: int, size: int) -> None:
        nodes: dict[int, int] = {}
        for bundle in bundles:
            nodes[bundle // per_node] = nodes.get(bundle // per_node, 0) + 1
            if bundle >= size:
                self.broken.add("slice_out_of_pool")
            if self.holders.setdefault((pool, phase, bundle), key) != key:
                self.broken.add("slice_overlap")
        if len(bundles) > per_node and any(taken != per_node for taken in nodes.values()):
            self.broken.add("whole_nodes")
        if len(bundles) <= per_node and len(nodes) > 1:
            self.broken.add("engine_straddles_nodes")


def agree(run: dict[str, Any]) -> None:
    """Planner and checker say the same about a run file."""
    checker = Checker(run)
    checker.check()
    config = from_mapping(run)
    if checker.broken:
        with pytest.raises(Refusal) as caught:
            plan(config)
        assert caught.value.code in checker.broken, (caught.value.message, checker.broken)
        return
    made = plan(config)
    assert _slots(made) == checker.slots
    assert plan(config) == made
    assert from_json(to_json(made)) == made
    for role in made.roles:
        assert role.gpus == sum(len(bundles) for key, bundles in checker.slots.items() if key.startswith(role.role))
        for model in role.models:
            assert made.model_placement(role.role, model.name) is model


def _slots(made: InferencePlacementPlan) -> Slots:
    found: Slots = {}
    for role in made.roles:
        per_node = made.pool(role.pool).gpus_per_node
        for model in role.models:
            for replica in model.replicas:
                found[f"{role.role}/{model.name}/{replica.index}"] = list(replica.bundles)
                if replica.workers:
                    held = [worker.node * per_node + gpu for worker in replica.workers for gpu in worker.gpus]
                    assert held == list(replica.bundles)
                    assert len({worker.node for worker in replica.workers}) == len(replica.workers)
    return found


def one(pool: str, gpus: int, size: int, offset: int | None = None) -> dict[str, Any]:
    role: dict[str, Any] = {"pool": pool, "models": {"m": {"model_path": "p", "gpus": gpus, "gpus_per_engine": size}}}
    return role if offset is None else {**role, "offset": offset}


@pytest.mark.parametrize("mode", ["decoupled", "split", "defer"])
def test_every_pair_of_roles_on_up_to_two_nodes_of_up_to_three_gpus(mode: str) -> None:
    """Exhaustive: 2,592 run files per mode, refused or planned alike by both."""
    count = 0
    for nodes, per_node in itertools.product((1, 2), (1, 2, 3)):
        shared = {"nodes": nodes, "gpus_per_node": per_node}
        for first, second in itertools.product(itertools.product((1, 2, 3, 4), (1, 2, 3)), repeat=2):
            for offset in (None, 0, 2):
                count += 1
                pools = {"a": shared, "b": shared} if mode == "decoupled" else {"a": shared}
                run: dict[str, Any] = {
                    "name": "t",
                    "placement": mode,
                    "pools": pools,
                    "roles": {"rollout": one("a", *first), "teacher": one([*pools][-1], *second, offset)},
                }
                if mode != "decoupled":
                    run["training"] = {"pool": "a", "gpus": nodes * per_node}
                agree(run)
    assert count == 2592


KINDS = st.sampled_from(["regular", "prefill", "decode", "placeholder"])
GROUPS = st.sampled_from(
    [["regular"], ["prefill", "decode"], ["regular", "placeholder"], ["prefill", "decode", "placeholder"]]
)


def seldom(draw: st.DrawFn) -> bool:
    """One time in eight: rules are broken one or two at a time, and many run files break none."""
    return draw(st.integers(0, 7)) == 7


@st.composite
def model(draw: st.DrawFn) -> dict[str, Any]:
    """A model that mostly fits: engines that divide its budget, now and then parallelism and groups of any kind."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    entry: dict[str, Any] = {"model_path": "p", "gpus": size * draw(st.sampled_from([1, 1, 2, 4]))}
    if seldom(draw):
        entry["gpus"] += 1
    if seldom(draw):
        del entry["gpus"]
    args: dict[str, Any] = {}
    if draw(st.booleans()):
        entry["gpus_per_engine"] = size
    else:
        args["tp_size"] = size
    if size > 1 and draw(st.integers(0, 3)) == 3:
        args |= {"pp_size": 2, "tp_size": size // 2}
    if draw(st.integers(0, 3)) == 3:
        args |= {"dp_size": draw(st.sampled_from([1, 2, 3])), "enable_dp_attention": not seldom(draw)}
    if seldom(draw):
        args["tp_size"] = draw(st.sampled_from([1, 2, 4]))
    entry["engine_args"] = args
    if "gpus" in entry and draw(st.integers(0, 3)) == 3:
        kinds = draw(st.lists(KINDS, min_size=1, max_size=3) if seldom(draw) else GROUPS)
        entry["groups"] = [{"worker_type": kind, "gpus": size} for kind in kinds]
        if not seldom(draw):
            entry["gpus"] = size * len(kinds)
        if seldom(draw):
            entry["route_mode"] = draw(st.sampled_from(["DIRECT", "SGLANG_ROUTER"]))
    return entry


@st.composite
def any_run(draw: st.DrawFn) -> dict[str, Any]:
    """Roles, models, groups, parallelism and training in every combination that a run file can say."""
    mode = draw(st.sampled_from(["decoupled", "split", "defer"]))
    names = draw(st.lists(st.sampled_from(ORDER), min_size=1, max_size=3, unique=True))
    shared = {"nodes": draw(st.integers(1, 8)), "gpus_per_node": draw(st.sampled_from([1, 2, 4, 8]))}
    pools = dict.fromkeys(names, shared) if mode == "decoupled" else {"actor": shared}
    roles: dict[str, Any] = {}
    for name in names:
        count = 2 if seldom(draw) or (name == "teacher" and draw(st.booleans())) else 1
        models = {f"m{number}": draw(model()) for number in range(count)}
        if name == "teacher" and draw(st.booleans()):
            for entry in models.values():
                entry.pop("gpus", None)
                entry.pop("groups", None)
        roles[name] = {"pool": name if mode == "decoupled" else "actor", "models": models}
        if seldom(draw) or any("gpus" not in entry for entry in models.values()):
            roles[name]["gpus"] = draw(st.sampled_from([2, 4, 8, 16]))
        if seldom(draw):
            roles[name]["offset"] = draw(st.sampled_from([0, 1, 2, 4, 8]))
        if seldom(draw):
            roles[name]["deferred"] = draw(st.booleans())
    run: dict[str, Any] = {"name": "t", "placement": mode, "pools": pools, "roles": roles}
    if mode != "decoupled" and draw(st.integers(0, 19)):
        size = shared["nodes"] * shared["gpus_per_node"]
        run["training"] = {"pool": "actor", "gpus": draw(st.integers(1, 40)) if seldom(draw) else size}
        if draw(st.integers(0, 3)) == 0:
            share = max(1, run["training"]["gpus"] // 2)
            run["training"]["components"] = {"actor": share, draw(st.sampled_from(["critic", "reference"])): share}
        if seldom(draw):
            run["training"]["offload"] = False
    return run


@settings(max_examples=600)
@given(any_run())
def test_whatever_a_run_file_says_both_agree(run: dict[str, Any]) -> None:
    agree(run)
