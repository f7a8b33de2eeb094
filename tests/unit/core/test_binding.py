"""Physical binding: what is refused, what is bound, and what an engine is given. Case numbers: field inputs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.core.binding import (
    AllocationFacts,
    Backend,
    BoundPlan,
    HeadFacts,
    Says,
    Verdict,
    bind,
    port_owners,
)
from relax_slurm.core.plan import InferencePlacementPlan, Role
from relax_slurm.core.report import (
    ForeignProcess,
    InterfaceAddress,
    NodeReport,
    PortBlockReport,
)
from relax_slurm.errors import BindingMismatch, RelaxError
from tests.unit.core.binding_samples import (
    GIB,
    Want,
    cluster,
    device,
    devices,
    ids,
    make_plan,
    make_report,
)

ONE = Want(Role.ROLLOUT, 1, 4, 2)
TWO = Want(Role.ROLLOUT, 2, 4, 2)


def refuse(
    plan: InferencePlacementPlan, facts: AllocationFacts, reports: dict[str, NodeReport], **options: Any
) -> list[dict[str, str]]:
    """The rows of the refusal that must come."""
    with pytest.raises(BindingMismatch) as caught:
        bind(plan, facts, reports, **options)
    assert caught.value.exit_code == 5
    assert "no engine was started" in caught.value.message
    assert caught.value.rows
    for row in caught.value.rows:
        assert set(row) == {"node", "gpu", "source", "seen", "wanted", "problem", "do"}
        assert row["node"]
        assert row["problem"]
        assert row["do"], row
    assert caught.value.message.endswith(caught.value.rows[0]["do"])
    return caught.value.rows


def one_node(
    environ: dict[str, str | None], gpus: tuple[int, ...] = (0, 1, 2, 3), scontrol: bool = True, **changes: Any
) -> tuple[InferencePlacementPlan, AllocationFacts, dict[str, NodeReport]]:
    """A one-node plan of four GPUs with its report changed."""
    plan = make_plan(ONE)
    facts, _ = cluster(plan, gpus[0])
    facts = replace(facts, gpu_indexes={"n0": gpus} if scontrol else {}, batch_host="elsewhere")
    return plan, facts, {"n0": make_report("n0", gpus, environ=environ, **changes)}


# --- faithful reports bind -------------------------------------------------------------------------------------------


def test_a_faithful_cluster_binds_and_is_confirmed() -> None:
    plan = make_plan(Want(Role.ROLLOUT, 2, 8, 2), Want(Role.GENRM, 1, 8, 4), Want(Role.TEACHER, 1, 8, 8))
    facts, reports = cluster(plan)
    bound = bind(plan, facts, reports)
    assert [node.name for node in bound.nodes] == ["n0", "n1", "n2", "n3"]
    assert {node.verdict for node in bound.nodes} == {Verdict.CONFIRMED}
    teacher = plan.roles[2].models[0].replicas[0].workers[0]
    binding = bound.worker_binding(teacher)
    assert (binding.node_name, binding.address) == ("n3", "10.0.0.4")
    assert binding.indexes == tuple(range(8))
    assert binding.ports.guard == 20001
    assert len({*binding.ports.__getstate__()}) == 6  # type: ignore[misc]


def test_json_round_trip_is_identity() -> None:
    plan = make_plan(TWO)
    facts, reports = cluster(plan, 2)
    bound = bind(plan, facts, reports)
    text = json.dumps(bound.to_json())
    assert BoundPlan.from_json(json.loads(text)) == bound
    with pytest.raises(RelaxError, match="version 9"):
        BoundPlan.from_json({"version": 9})
    with pytest.raises(RelaxError, match="write it again"):
        BoundPlan.from_json({"version": 1, "nodes": [{"pool": 3}]})


def test_a_multi_node_replica_meets_at_its_heads_address() -> None:
    plan = make_plan(Want(Role.ROLLOUT, 2, 4, 8))
    facts, reports = cluster(plan)
    reports["n0"] = reports["n0"].model_copy(update={"port_block": PortBlockReport(start=21000, span=128)})
    bound = bind(plan, facts, reports)
    replica = plan.roles[0].models[0].replicas[0]
    assert [worker.node for worker in replica.workers] == [0, 1]
    assert bound.rendezvous(replica) == ("10.0.0.1", 21004)
    assert bound.worker_binding(replica.workers[1]).node_name == "n1"


def test_the_local_backend_confirms_through_its_own_report() -> None:
    plan = make_plan(TWO)
    _, reports = cluster(plan)
    local = {
        name: report.model_copy(
            update={
                "environ": {},
                "virtual_gpus": (0, 1, 2, 3),
                "hostname": "laptop",
                "boot_id": "b",
                "port_block": PortBlockReport(start=20000 + 128 * number, span=128),
            }
        )
        for number, (name, report) in enumerate(reports.items())
    }
    facts = AllocationFacts(backend=Backend.LOCAL, nodes=(("n0", "n1"),))
    bound = bind(plan, facts, local)
    assert {node.verdict for node in bound.nodes} == {Verdict.CONFIRMED}
    assert {node.address for node in bound.nodes} == {"127.0.0.1"}
    assert bound.gpu_keys("rollout", [0, 7]) == ("n0/gpu0", "n1/gpu3")  # same index on another node: another GPU
    rows = refuse(plan, replace(facts, gpu_indexes={"n0": (0, 1, 2, 3), "n1": (4, 5, 6, 7)}), local)
    assert [(row["node"], row["wanted"]) for row in rows] == [("n1", "within 4,5,6,7 (local backend record)")]


# --- field inputs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["0,1,2,3", None])
def test_case_4_renumbered_gpus_are_recorded_with_three_identities(mask: str | None) -> None:
    plan, facts, reports = one_node({"CUDA_VISIBLE_DEVICES": mask}, (4, 5, 6, 7), devices=devices(4))
    bound = bind(plan, facts, reports)
    gpus = bound.nodes[0].gpus
    assert [gpu.index for gpu in gpus] == [4, 5, 6, 7]
    assert [gpu.ordinal for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu.uuid for gpu in gpus] == [f"GPU-n-000{number}" for number in range(4)]
    binding = bound.worker_binding(plan.roles[0].models[0].replicas[1].workers[0])
    assert binding.visible == (("2", "3") if mask else ("GPU-n-0002", "GPU-n-0003"))
    assert binding.numbers == (2, 3)


def test_case_4_absolute_mask_under_cgroups_is_refused_before_a_model_loads() -> None:
    rows = refuse(*one_node({}, (4, 5, 6, 7), devices=devices(4)))
    assert len(rows) == 1
    assert rows[0]["source"] == "CUDA_VISIBLE_DEVICES"
    assert (rows[0]["seen"], rows[0]["wanted"]) == ("4,5,6,7", "0,1,2,3")
    assert "no CUDA GPU" in rows[0]["problem"]


def test_case_4_relative_mask_without_cgroups_would_take_the_gpus_of_others() -> None:
    rows = refuse(*one_node({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (4, 5, 6, 7), devices=devices(8)))
    assert "means GPUs of others" in rows[0]["problem"]


def test_case_4_absolute_mask_without_cgroups_is_bound_by_index() -> None:
    bound = bind(*one_node({}, (4, 5, 6, 7), devices=devices(8)))
    assert [gpu.uuid for gpu in bound.nodes[0].gpus] == [f"GPU-n-000{number}" for number in (4, 5, 6, 7)]
    assert [gpu.visible for gpu in bound.nodes[0].gpus] == ["4", "5", "6", "7"]


def case_5(**environ: str | None) -> tuple[InferencePlacementPlan, AllocationFacts, dict[str, NodeReport]]:
    plan = make_plan(TWO)
    facts, _ = cluster(plan)
    facts = replace(facts, gpu_indexes={"n0": (0, 1, 2, 3), "n1": (2, 3, 6, 7)})
    stale: dict[str, str | None] = {"SLURM_JOB_GPUS": "0,1,2,3"}
    reports = {
        "n0": make_report("n0", (0, 1, 2, 3), 0, environ=dict(stale)),
        "n1": make_report("n1", (2, 3, 6, 7), 1, environ=stale | environ),
    }
    return plan, facts, reports


def test_case_5_inherited_job_gpus_are_reported_and_not_a_mismatch() -> None:
    bound = bind(*case_5())
    by_name = {node.name: {source.name: source for source in node.sources} for node in bound.nodes}
    assert by_name["n1"]["SLURM_JOB_GPUS"].says is Says.INHERITED
    assert "n0" in by_name["n1"]["SLURM_JOB_GPUS"].note
    assert by_name["n0"]["SLURM_JOB_GPUS"].says is Says.AGREES  # n0 is the batch host
    assert [gpu.index for gpu in bound.nodes[1].gpus] == [2, 3, 6, 7]


def test_case_5_batch_host_that_contradicts_its_own_job_is_refused() -> None:
    plan, facts, reports = case_5()
    rows = refuse(plan, replace(facts, batch_host="n1"), reports)
    assert {(row["node"], row["wanted"]) for row in rows} == {("n1", "within 0,1,2,3 (SLURM_JOB_GPUS)")}


def test_case_5_job_gpus_are_not_trusted_on_a_batch_host_of_another_component() -> None:
    plan = make_plan(Want(Role.GENRM, 1, 4, 4), ONE)
    facts, reports = cluster(plan)
    reports["n1"] = make_report("n1", (0, 1, 2, 3), 1, environ={"SLURM_JOB_GPUS": "4,5,6,7"})
    bound = bind(plan, replace(facts, batch_host="n1"), reports)
    assert Says.INHERITED in {source.says for source in bound.nodes[1].sources}


def test_case_5_missing_step_gpus_cannot_be_verified_unless_allowed() -> None:
    missing = case_5(SLURM_STEP_GPUS=None)
    rows = refuse(*missing)
    assert len(rows) == 1
    assert rows[0]["problem"].startswith("cannot verify: SLURM_STEP_GPUS")
    assert "--allow-unverified" in rows[0]["wanted"]
    bound = bind(*missing, allow_unverified=True)
    assert [node.verdict for node in bound.nodes] == [Verdict.CONFIRMED, Verdict.CANNOT_VERIFY]
    assert [gpu.index for gpu in bound.nodes[1].gpus] == [2, 3, 6, 7]  # from scontrol


def test_case_6_uuid_mask_is_matched_and_integers_are_there_for_old_engines() -> None:
    mask = ids_of(("GPU-n-0000", "GPU-n-0003", "GPU-n-0004", "GPU-n-0005"))
    bound = bind(*one_node({"CUDA_VISIBLE_DEVICES": mask}, (0, 3, 4, 5), devices=devices(8)))
    binding = bound.worker_binding(make_plan(ONE).roles[0].models[0].replicas[0].workers[0])
    assert binding.visible == ("GPU-n-0000", "GPU-n-0003")
    assert binding.numbers == (0, 3)
    assert binding.indexes == (0, 3)


def test_case_6_uuid_mask_without_nvml_is_bound_without_integers() -> None:
    mask = ids_of(tuple(f"GPU-{letter * 8}" for letter in "abcd"))
    bound = bind(*one_node({"CUDA_VISIBLE_DEVICES": mask}))
    binding = bound.worker_binding(make_plan(ONE).roles[0].models[0].replicas[0].workers[0])
    assert binding.uuids == ("GPU-aaaaaaaa", "GPU-bbbbbbbb")
    assert binding.numbers is None


def ids_of(entries: tuple[str, ...]) -> str:
    return ",".join(entries)


@pytest.mark.parametrize(
    ("mask", "problem"),
    [
        (("GPU-n-0001", "GPU-n-0000", "GPU-n-0002", "GPU-n-0003"), "another GPU"),
        (("GPU-n-0000", "GPU-n-0001", "GPU-n-0002", "GPU-x"), "not on this node"),
        (("GPU-n", "GPU-n-0001", "GPU-n-0002", "GPU-n-0003"), "fits several"),
    ],
)
def test_case_6_uuid_mask_that_leads_elsewhere_is_refused(mask: tuple[str, ...], problem: str) -> None:
    rows = refuse(*one_node({"CUDA_VISIBLE_DEVICES": ids_of(mask)}, devices=devices(4)))
    assert any(problem in row["problem"] for row in rows)


@pytest.mark.parametrize("mask", ["NoDevFiles", "", "  "])
def test_case_7_no_dev_files_means_nothing_was_requested(mask: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": mask, "SLURM_STEP_GPUS": None}
    rows = refuse(*one_node(environ), allow_unverified=True)
    assert rows[0]["problem"] == "no GPUs requested from Slurm (missing --gres/--gpus-per-node)"


@pytest.mark.parametrize(
    "mask", ["0,1,2,3,0,1,2,3", "0,,1", "0, 1", "-1", "all", "void", "none", "0,1,2,GPU-aa", "0,01,2,3", "0;1", "0x1"]
)
def test_case_8_unreadable_masks_are_refused_even_when_unverified_is_allowed(mask: str) -> None:
    rows = refuse(*one_node({"CUDA_VISIBLE_DEVICES": mask}, devices=devices(4)), allow_unverified=True)
    assert rows[0]["source"] == "CUDA_VISIBLE_DEVICES"
    assert rows[0]["seen"] == mask


@pytest.mark.parametrize("on_node", ["1", "4"])
def test_case_9_gpus_per_task_hides_gpus_from_a_task(on_node: str) -> None:
    environ = {
        "CUDA_VISIBLE_DEVICES": "0",
        "SLURM_GPUS_ON_NODE": on_node,
        "SLURM_NTASKS": "4",
        "SLURM_STEP_GPUS": "0" if on_node == "1" else "0,1,2,3",
    }
    rows = refuse(*one_node(environ))
    assert any(row["problem"].startswith("task sees 1 of 4, add --gpu-bind=none") for row in rows)


def test_case_16_busy_port_is_named_with_its_replica() -> None:
    plan, facts, reports = one_node({}, port_block=None, busy_ports=(20018, 20147))
    rows = refuse(plan, facts, reports)
    assert port_owners(plan, "rollout", 0)[18] == "rollout/replica-1 http"
    assert rows[0]["seen"] == "busy: 20018 (rollout/replica-1 http), 20147 (rollout/replica-1 nccl)"


@pytest.mark.parametrize(
    ("block", "ephemeral", "problem"),
    [
        ((20000, 64), (32768, 60999), "not as planned"),
        ((29950, 128), (32768, 60999), "not as planned"),
        ((20000, 128), (10000, 61000), "ephemeral"),
        ((20000, 128), (20100, 61000), "ephemeral"),
    ],
)
def test_case_16_port_block_outside_its_rules_is_refused(
    block: tuple[int, int], ephemeral: tuple[int, int], problem: str
) -> None:
    taken = PortBlockReport(start=block[0], span=block[1])
    rows = refuse(*one_node({}, port_block=taken, ephemeral_range=ephemeral))
    assert problem in rows[0]["problem"]


def test_two_nodes_of_one_machine_hold_different_ports() -> None:
    plan = make_plan(TWO)
    facts, reports = cluster(plan)
    same = {name: report.model_copy(update={"hostname": "h", "boot_id": "b"}) for name, report in reports.items()}
    assert "overlaps n0's" in refuse(plan, facts, same)[0]["problem"]


# --- the other refusals ----------------------------------------------------------------------------------------------


def test_every_mismatch_is_in_one_table() -> None:
    plan = make_plan(Want(Role.ROLLOUT, 3, 4, 2))
    facts, reports = cluster(plan)
    del reports["n0"]
    reports["n1"] = make_report("n1", (0, 1, 2), 1)
    reports["n2"] = make_report("n2", (0, 1, 2, 3), 2, environ={"CUDA_VISIBLE_DEVICES": "all"})
    reports["stranger"] = make_report("stranger", (0,), 3)
    rows = refuse(plan, facts, reports)
    assert {row["node"] for row in rows} == {"n0", "n1", "n2", "stranger"}


def test_fewer_and_more_gpus_than_planned() -> None:
    for gpus in [(0, 1, 2), (0, 1, 2, 3, 4)]:
        rows = refuse(*one_node({}, gpus))
        assert rows[0]["problem"] == f"GPU count is not as planned: {len(gpus)} instead of 4"


def test_gpus_that_the_job_does_not_have() -> None:
    plan, facts, reports = one_node({}, (4, 5, 6, 7))
    rows = refuse(plan, replace(facts, gpu_indexes={"n0": (0, 1, 2, 3)}), reports)
    assert [(row["source"], row["seen"]) for row in rows] == [("SLURM_STEP_GPUS", "4,5,6,7")]
    assert rows[0]["wanted"] == "within 0,1,2,3 (scontrol show job -d)"


def test_a_step_on_part_of_a_borrowed_node_is_confirmed() -> None:
    plan, facts, reports = one_node({}, (4, 5, 6, 7))
    bound = bind(plan, replace(facts, gpu_indexes={"n0": tuple(range(8))}), reports)
    assert bound.nodes[0].verdict is Verdict.CONFIRMED


def test_part_of_a_borrowed_node_is_bound_where_no_other_run_is() -> None:
    plan, facts, reports = one_node({}, (2, 3, 4, 5, 6, 7, 8, 9))
    facts = replace(facts, gpu_counts={"n0": 8}, first_gpu={"n0": 4})
    gpus = bind(plan, facts, reports).nodes[0].gpus
    assert [(gpu.slot, gpu.ordinal, gpu.index, gpu.visible) for gpu in gpus] == [
        (0, 4, 6, "6"),
        (1, 5, 7, "7"),
        (2, 6, 8, "8"),
        (3, 7, 9, "9"),
    ]
    rows = refuse(plan, facts, {"n0": make_report("n0", (2, 3, 4, 5))})
    assert rows[0]["problem"] == "GPU count is not as planned: 4 instead of 8"


def test_foreign_memory_outside_our_part_of_a_borrowed_node_is_not_ours_to_judge() -> None:
    cards = list(devices(8))
    cards[1] = cards[1].model_copy(update={"memory_used": 40 * GIB})
    plan, facts, reports = one_node({}, tuple(range(8)), devices=tuple(cards))
    facts = replace(facts, gpu_counts={"n0": 8})
    assert bind(plan, replace(facts, first_gpu={"n0": 4}), reports).nodes[0].gpus[0].ordinal == 4
    assert "in use by someone else" in refuse(plan, facts, reports)[0]["problem"]


def test_wrong_gpu_type() -> None:
    plan, facts, reports = one_node({})
    rows = refuse(plan, replace(facts, gpu_types={"n0": "a100"}), reports)
    assert (rows[0]["problem"], rows[0]["seen"], rows[0]["wanted"]) == ("GPU type is not as planned", "a100", "h100")
    mixed = (*devices(3), device(3, "GPU-n-0003", name="NVIDIA A100"))
    rows = refuse(*one_node({}, devices=mixed))
    assert "different types" in rows[0]["problem"]


def test_one_uuid_behind_two_nodes() -> None:
    plan = make_plan(TWO)
    facts, reports = cluster(plan)
    same = {name: report.model_copy(update={"devices": devices(4, "shared")}) for name, report in reports.items()}
    rows = refuse(plan, facts, same)
    assert len(rows) == 4
    assert {row["problem"] for row in rows} == {"two bundles on one physical GPU"}


def test_two_pools_on_one_node_share_no_gpu() -> None:
    plan = make_plan(ONE)
    twin = replace(plan.pools[0], name="twin")
    facts, reports = cluster(plan)
    rows = refuse(replace(plan, pools=(*plan.pools, twin)), facts, reports)
    assert {row["problem"] for row in rows} == {"two bundles on one physical GPU"}


def test_node_in_two_components() -> None:
    plan = make_plan(ONE, Want(Role.GENRM, 1, 4, 4))
    facts, reports = cluster(plan)
    rows = refuse(plan, replace(facts, nodes=(("n0",), ("n0",))), reports)
    assert any("two components" in row["problem"] for row in rows)


def test_node_list_not_as_planned() -> None:
    plan = make_plan(TWO)
    facts, reports = cluster(plan)
    rows = refuse(plan, replace(facts, nodes=(("n0",),)), reports)
    assert any("node list is not as planned" in row["problem"] for row in rows)
    rows = refuse(plan, replace(facts, nodes=()), {})
    assert any("node list is not as planned" in row["problem"] for row in rows)


@pytest.mark.parametrize(
    ("environ", "source"),
    [({"SLURMD_NODENAME": "n9"}, "SLURMD_NODENAME"), ({"SLURM_JOB_ID": "78"}, "SLURM_JOB_ID")],
)
def test_reports_of_another_node_or_job(environ: dict[str, str | None], source: str) -> None:
    assert refuse(*one_node(environ))[0]["source"] == source


def test_report_under_another_name() -> None:
    plan, facts, reports = one_node({})
    moved = {"n0": reports["n0"].model_copy(update={"node": "n5"})}
    assert any("another node's" in row["problem"] for row in refuse(plan, facts, moved))


def test_foreign_memory_is_refused_with_the_pid_and_our_own_is_not_foreign() -> None:
    held = (
        *devices(3),
        device(3, "GPU-n-0003", memory_used=40 * GIB, foreign=(ForeignProcess(pid=4242, memory=39 * GIB),)),
    )
    rows = refuse(*one_node({}, devices=held))
    assert (rows[0]["gpu"], rows[0]["source"]) == ("3", "NVML")
    assert "40.0 GiB (pid 4242)" in rows[0]["seen"]
    unseen = (*devices(3), device(3, "GPU-n-0003", memory_used=2 * GIB))
    assert "no process visible" in refuse(*one_node({}, devices=unseen))[0]["seen"]
    ours = (*devices(3), device(3, "GPU-n-0003", memory_used=40 * GIB, own_memory=40 * GIB))
    bind(*one_node({}, devices=ours))
    bind(*one_node({}, devices=held), memory_limit=50 * GIB)


def test_nvml_that_sees_too_few_gpus() -> None:
    rows = refuse(*one_node({}, devices=devices(3)))
    assert "NVML does not see every GPU" in rows[0]["problem"]
    rows = refuse(*one_node({}, (4, 5, 6, 9), devices=devices(8)))
    assert "NVML does not see every GPU" in rows[0]["problem"]


def test_order_of_a_mask_and_of_a_step_must_ascend() -> None:
    assert "not ascending" in refuse(*one_node({"CUDA_VISIBLE_DEVICES": "1,0,2,3"}))[0]["problem"]
    assert "not ascending" in refuse(*one_node({"SLURM_STEP_GPUS": "3,2,1,0"}))[0]["problem"]
    assert "other GPUs" in refuse(*one_node({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}))[0]["problem"]
    assert "named twice" in refuse(*one_node({"SLURM_STEP_GPUS": "0,1,1,2"}))[0]["problem"]
    assert "disagree" in refuse(*one_node({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}))[0]["problem"]


def test_count_variable_that_differs_from_the_list() -> None:
    assert refuse(*one_node({"SLURM_GPUS_ON_NODE": "8"}))[0]["source"] == "SLURM_GPUS_ON_NODE"
    unset = {"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": None}
    assert refuse(*one_node(unset))[0]["source"] == "SLURM_GPUS_ON_NODE"


def test_mig_slices_serve_single_gpu_engines_only() -> None:
    slices = tuple(device(number, f"MIG-{number}", mig_parent="GPU-a") for number in range(4))
    environ = {"CUDA_VISIBLE_DEVICES": "MIG-0,MIG-1,MIG-2,MIG-3"}
    plan, facts, reports = one_node(environ, devices=slices)
    assert all("MIG slices" in row["problem"] for row in refuse(plan, facts, reports))
    single = make_plan(Want(Role.ROLLOUT, 1, 4, 1))
    bound = bind(single, facts, reports)
    binding = bound.worker_binding(single.roles[0].models[0].replicas[3].workers[0])
    assert (binding.visible, binding.numbers) == (("MIG-3",), None)


def test_verdicts_by_what_was_seen() -> None:
    """The smallest sets of sources that confirm, and those just below them."""
    everything = ("scontrol", "nvml", "step")
    for seen in [("step", "scontrol"), ("step", "nvml"), everything]:
        nvml = {"devices": devices(4)} if "nvml" in seen else {}
        bound = bind(*one_node({}, scontrol="scontrol" in seen, **nvml))
        assert bound.nodes[0].verdict is Verdict.CONFIRMED
    alone = one_node({}, scontrol=False)
    assert "only SLURM_STEP_GPUS speaks" in refuse(*alone)[0]["problem"]
    assert bind(*alone, allow_unverified=True).nodes[0].verdict is Verdict.CANNOT_VERIFY
    no_mask = one_node({"CUDA_VISIBLE_DEVICES": None}, (4, 5, 6, 7))
    assert "it is open how programs count" in refuse(*no_mask)[0]["problem"]


def test_a_node_about_which_nothing_is_known_is_refused_even_if_unverified_is_allowed() -> None:
    nothing = {"CUDA_VISIBLE_DEVICES": None, "SLURM_STEP_GPUS": None, "SLURM_GPUS_ON_NODE": None}
    rows = refuse(*one_node(nothing, scontrol=False), allow_unverified=True)
    assert any("nothing tells which GPUs" in row["problem"] for row in rows)


# --- plans that break the rules --------------------------------------------------------------------------------------


def with_replica(plan: InferencePlacementPlan, index: int, **changes: Any) -> InferencePlacementPlan:
    """The plan with one replica changed."""
    role = plan.roles[0]
    replicas = list(role.models[0].replicas)
    replicas[index] = replace(replicas[index], **changes)
    model = replace(role.models[0], replicas=tuple(replicas))
    return replace(plan, roles=(replace(role, models=(model,)), *plan.roles[1:]))


def test_plans_with_broken_bundles_are_refused() -> None:
    plan = make_plan(TWO)
    facts, reports = cluster(plan)
    workers = plan.roles[0].models[0].replicas[0].workers
    head = workers[0]
    wrong: list[tuple[InferencePlacementPlan, str]] = [
        (with_replica(plan, 0, bundles=(0, 0)), "duplicate bundle"),
        (with_replica(plan, 0, bundles=(0, 99)), "unknown bundle"),
        (with_replica(plan, 1, bundles=(0, 1), workers=workers), "also held by"),
        (with_replica(plan, 0, bundles=(4, 5)), "workers and bundles disagree"),
        (with_replica(plan, 0, workers=(replace(head, gpus=(1, 0)),)), "not ascending and contiguous"),
        (with_replica(plan, 0, workers=(replace(head, gpus=(0, 2)),)), "not ascending and contiguous"),
        (with_replica(plan, 0, workers=(replace(head, gpus=()),)), "not ascending and contiguous"),
        (with_replica(plan, 0, workers=(replace(head, gpus=(3, 4)),)), "on two nodes"),
        (with_replica(plan, 0, workers=(replace(head, node=7),)), "unknown node"),
        (with_replica(plan, 0, workers=(head, replace(head, node_rank=1, gpus=(1,)))), "uses a node twice"),
        (with_replica(plan, 0, workers=(replace(head, node_rank=1),)), "node ranks"),
        (with_replica(plan, 0, workers=(replace(head, ports=replace(head.ports, guard=0)),)), "outside the block"),
        (with_replica(plan, 0, workers=(replace(head, ports=replace(head.ports, guard=17)),)), "also used by"),
        (replace(plan, roles=(replace(plan.roles[0], gpus=9),)), "slice out of bounds"),
        (replace(plan, roles=(replace(plan.roles[0], offset=2, gpus=6),)), "outside the role's slice"),
        (replace(plan, roles=(replace(plan.roles[0], pool="nowhere"),)), "pool is not in the plan"),
    ]
    for broken, problem in wrong:
        rows = refuse(broken, facts, reports)
        assert any(problem in row["problem"] for row in rows), (problem, rows)


def test_the_same_bundles_in_different_phases_are_fine() -> None:
    plan = make_plan(ONE)
    role = plan.roles[0]
    shifted = tuple(
        replace(
            replica,
            replica_id=f"judge/replica-{replica.index}",
            workers=tuple(
                replace(
                    worker,
                    ports=replace(
                        worker.ports,
                        **{name: getattr(worker.ports, name) + 64 for name in worker.ports.__slots__},
                    ),
                )
                for worker in replica.workers
            ),
        )
        for replica in role.models[0].replicas
    )
    judge = replace(role, role=Role.GENRM, phase=1, models=(replace(role.models[0], replicas=shifted),))
    facts, reports = cluster(plan)
    assert bind(replace(plan, roles=(role, judge)), facts, reports).nodes
    rows = refuse(replace(plan, roles=(role, replace(judge, phase=0))), facts, reports)
    assert any("is also held by" in row["problem"] for row in rows)


# --- addresses -------------------------------------------------------------------------------------------------------


def address(interface: str, value: str, prefix: int = 24) -> InterfaceAddress:
    return InterfaceAddress(interface=interface, address=value, prefix=prefix)


LO = address("lo", "127.0.0.1", 8)
DOCKER = address("docker0", "172.17.0.1", 16)


def bind_addresses(
    n0: tuple[InterfaceAddress, ...], n1: tuple[InterfaceAddress, ...], **facts_changes: Any
) -> list[str]:
    plan = make_plan(TWO)
    facts, reports = cluster(plan)
    towards = facts_changes.pop("towards", (None, None))
    for name, entries, facing in zip(reports, (n0, n1), towards, strict=True):
        reports[name] = reports[name].model_copy(update={"addresses": entries, "towards_head": facing})
    return [node.address for node in bind(plan, replace(facts, **facts_changes), reports).nodes]


def test_case_17_never_loopback_and_never_the_bridge_that_every_node_has() -> None:
    n0 = (LO, address("dummy", "127.0.1.1"), DOCKER, address("ib0", "10.1.0.1"), address("eth0", "10.0.0.1"))
    n1 = (LO, DOCKER, address("ib0", "10.1.0.2"), address("eth0", "10.0.0.2"))
    assert bind_addresses(n0, n1) == ["10.0.0.1", "10.0.0.2"]  # the head has 10.0.0.200/24
    assert bind_addresses(n0, n1, towards=("10.1.0.1", "172.17.0.1")) == ["10.1.0.1", "10.0.0.2"]
    assert bind_addresses(n0, n1, interface="ib0") == ["10.1.0.1", "10.1.0.2"]
    assert bind_addresses(n0, n1, head=None) == ["10.1.0.1", "10.1.0.2"]
    assert bind_addresses((LO,), n1, towards=("10.9.9.9", None)) == ["10.9.9.9", "10.0.0.2"]  # an alias address


def test_case_17_a_bridge_seen_on_one_node_only_comes_last() -> None:
    other = (address("docker0", "172.30.0.1", 16), address("eth0", "10.5.0.1"))
    assert bind_addresses(other, (LO, address("eth0", "10.5.0.2"))) == ["10.5.0.1", "10.5.0.2"]


def test_case_17_node_without_a_usable_address_is_refused() -> None:
    with pytest.raises(BindingMismatch) as caught:
        bind_addresses((LO, DOCKER), (LO, DOCKER, address("eth0", "10.0.0.2")))
    assert [row["node"] for row in caught.value.rows] == ["n0"]
    assert "docker0 172.17.0.1, also on another machine" in caught.value.rows[0]["seen"]
    with pytest.raises(BindingMismatch):
        bind_addresses((LO, address("eth0", "10.0.0.1")), (LO, address("ib0", "10.1.0.2")), interface="eth0")


def test_case_17_loopback_only_when_everything_is_one_machine() -> None:
    plan = make_plan(ONE)
    facts, reports = cluster(plan)
    reports["n0"] = reports["n0"].model_copy(update={"addresses": (LO,)})
    same = HeadFacts("n0", "boot-n0", "4026531833", (LO,))
    assert bind(plan, replace(facts, head=same), reports).nodes[0].address == "127.0.0.1"
    other_stack = HeadFacts("n0", "boot-n0", "1", (LO,))
    assert refuse(plan, replace(facts, head=other_stack), reports)[0]["source"] == "interfaces"


def test_one_machine_with_a_real_address_still_advertises_it() -> None:
    plan = make_plan(ONE)
    facts, reports = cluster(plan)
    head = HeadFacts("n0", "boot-n0", "4026531833", reports["n0"].addresses)
    assert bind(plan, replace(facts, head=head), reports).nodes[0].address == "10.0.0.1"


def test_one_machine_whose_head_listens_on_loopback_is_served_over_loopback() -> None:
    plan = make_plan(ONE)
    facts, reports = cluster(plan)
    head = HeadFacts("n0", "boot-n0", "4026531833", reports["n0"].addresses)
    reports["n0"] = reports["n0"].model_copy(update={"towards_head": "127.0.0.1"})
    assert bind(plan, replace(facts, head=head), reports).nodes[0].address == "127.0.0.1"


# --- properties ------------------------------------------------------------------------------------------------------

WANTS = st.builds(
    lambda role, nodes, exponent, engine: Want(role, nodes, 2**exponent, 2 ** min(engine, exponent)),
    st.sampled_from([Role.ROLLOUT]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(want=WANTS, first=st.integers(0, 5), data=st.data())
def test_a_faithful_report_always_binds_and_every_slot_is_another_gpu(
    want: Want, first: int, data: st.DataObject
) -> None:
    plan = make_plan(want)
    facts, reports = cluster(plan, first)
    for name, report in reports.items():
        view = data.draw(st.sampled_from(["plain", "cgroup", "all", "uuid"]))
        gpus = facts.gpu_indexes[name]
        relative = ids(tuple(range(len(gpus))))
        changed: dict[str, Any] = {}
        if view == "cgroup":
            environ = report.environ | {"CUDA_VISIBLE_DEVICES": relative}
            changed = {"devices": devices(len(gpus), name), "environ": environ}
        elif view == "all":
            changed = {"devices": devices(first + len(gpus) + 1, name)}
        elif view == "uuid":
            mask = ",".join(f"GPU-{name}-{ordinal:04x}" for ordinal in range(len(gpus)))
            environ = report.environ | {"CUDA_VISIBLE_DEVICES": mask}
            changed = {"devices": devices(len(gpus), name), "environ": environ}
        reports[name] = report.model_copy(update=changed)
    bound = bind(plan, facts, reports)
    total = want.nodes * want.gpus_per_node
    keys = bound.gpu_keys("rollout", range(total))
    assert len(set(keys)) == total
    by_worker = [
        key
        for replica in plan.roles[0].models[0].replicas
        for worker in replica.workers
        for key in bound.worker_keys(worker)
    ]
    assert by_worker == list(keys)
    assert BoundPlan.from_json(json.loads(json.dumps(bound.to_json()))) == bound


@settings(max_examples=100, deadline=None)
@given(data=st.data(), nvml=st.booleans(), unverified=st.booleans())
def test_a_permuted_duplicated_or_missing_gpu_is_always_refused(
    data: st.DataObject, nvml: bool, unverified: bool
) -> None:
    plan = make_plan(Want(Role.ROLLOUT, 2, 4, 2))
    facts, reports = cluster(plan)
    name = data.draw(st.sampled_from(sorted(reports)))
    true = [0, 1, 2, 3]
    lie = data.draw(
        st.one_of(
            st.permutations(true),
            st.lists(st.integers(0, 9), min_size=1, max_size=6),
        ).filter(lambda value: value != true)
    )
    where = data.draw(st.sampled_from(["SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", "both"]))
    environ = dict(reports[name].environ)
    for variable in ("SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"):
        if where in {variable, "both"}:
            environ[variable] = ids(tuple(lie))
    changed: dict[str, Any] = {"environ": environ}
    if nvml:
        changed["devices"] = devices(8, name)
    reports[name] = reports[name].model_copy(update=changed)
    rows = refuse(plan, facts, reports, allow_unverified=unverified)
    assert {row["node"] for row in rows} == {name}


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            ["SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES", "SLURM_NTASKS"]
        ),
        st.one_of(st.text(max_size=20), st.lists(st.integers(-1, 5), max_size=6).map(lambda v: ",".join(map(str, v)))),
    ),
    st.one_of(st.none(), st.integers(0, 6).map(devices)),
    st.booleans(),
)
def test_no_environment_crashes_and_what_binds_has_every_gpu_once(
    environ: dict[str, str], found: Any, unverified: bool
) -> None:
    plan, facts, _ = one_node({})
    report = make_report("n0", (0, 1, 2, 3), devices=found).model_copy(
        update={"environ": {"SLURMD_NODENAME": "n0"} | environ}
    )
    try:
        bound = bind(plan, facts, {"n0": report}, allow_unverified=unverified)
    except BindingMismatch:
        return
    assert [gpu.index for gpu in bound.nodes[0].gpus] == [0, 1, 2, 3]
    assert len({gpu.visible for gpu in bound.nodes[0].gpus}) == 4


def test_brute_force_every_claim_over_three_gpus_agrees_with_the_rule() -> None:
    """On a node of three GPUs of which the job owns two: exactly the owned pair, in order, binds."""
    plan = make_plan(Want(Role.ROLLOUT, 1, 2, 1))
    facts, _ = cluster(plan)
    owned = (0, 2)
    facts = replace(facts, gpu_indexes={"n0": owned}, batch_host=None)
    lists = [()] + [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    for step in lists:
        for mask in lists:
            environ = {"SLURM_STEP_GPUS": ids(step), "CUDA_VISIBLE_DEVICES": ids(mask), "SLURM_GPUS_ON_NODE": None}
            report = make_report("n0", owned, environ=environ)
            lawful = step == owned and mask in {owned, (0, 1)}
            try:
                bind(plan, facts, {"n0": report})
            except BindingMismatch:
                assert not lawful, (step, mask)
            else:
                assert lawful, (step, mask)


def test_a_thousand_nodes_bind_in_seconds() -> None:
    plan = make_plan(Want(Role.ROLLOUT, 1024, 8, 8))
    facts, reports = cluster(plan)
    for name, report in reports.items():
        reports[name] = report.model_copy(update={"addresses": (DOCKER, *report.addresses)})
    began = time.perf_counter()
    bound = bind(plan, facts, reports)
    assert time.perf_counter() - began < 10
    assert len(bound.nodes) == 1024
