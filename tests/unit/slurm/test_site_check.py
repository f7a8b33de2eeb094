"""What the doctor says about recorded sites, and about plans that cannot start on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.config.load import from_mapping
from relax_slurm.core.placement import plan
from relax_slurm.errors import ConfigError
from relax_slurm.slurm.scontrol import parse_config
from relax_slurm.slurm.site_check import Finding, Level, check_site
from relax_slurm.slurm.site_facts import SiteFacts, gather, minutes, parse_nodes, parse_partitions

RECORDINGS = Path(__file__).parent / "recordings"


def recorded(version: str = "24.11", **config: str) -> SiteFacts:
    """Four nodes of eight h100 in the partitions main and high, as real Slurm printed them."""
    folder = RECORDINGS / version
    settings = parse_config((folder / "scontrol-config.txt").read_text()) | config
    return SiteFacts(
        (),
        settings,
        parse_partitions((folder / "scontrol-partition.txt").read_text()),
        parse_nodes((folder / "scontrol-node.txt").read_text()),
    )


def changed(facts: SiteFacts, **fields: Any) -> SiteFacts:
    """The same site with another partition `main`."""
    assert facts.partitions is not None
    return replace(facts, partitions={**facts.partitions, "main": replace(facts.partitions["main"], **fields)})


def of(facts: SiteFacts, nodes: tuple[int, ...] = (2, 1), gpus: int = 8, **more: Any) -> list[Finding]:
    """Findings for a decoupled run with a pool per number of nodes."""
    roles = ("rollout", "genrm", "teacher")[: len(nodes)]
    pool = {key: more.pop(key) for key in ("gpu_type", "partition", "cpus_per_node") if key in more}
    sizes = dict(zip(roles, nodes, strict=True))
    run = {
        "name": "t",
        "placement": "decoupled",
        "job_shape": "het" if len(nodes) > 1 else "single",
        "pools": {role: {"nodes": size, "gpus_per_node": gpus, **pool} for role, size in sizes.items()},
        "roles": {
            role: {"pool": role, "models": {"m": {"model_path": "p", "gpus": size * gpus}}}
            for role, size in sizes.items()
        },
        "slurm": more,
    }
    config = from_mapping(run)
    return check_site(facts, config, plan(config))


def bad(findings: list[Finding]) -> list[str]:
    return [f"{entry.what}: {entry.seen}" for entry in findings if entry.level is Level.BAD]


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_a_plan_that_fits_a_recorded_site(version: str) -> None:
    findings = of(recorded(version))
    assert bad(findings) == []
    said = {entry.what: entry for entry in findings}
    assert said["version"].seen.startswith(version)
    assert said["partition main*"].seen == "4 nodes, 4 usable, 4 x gpu:h100:8"
    assert said["total nodes"].level is Level.OK
    assert said["ProctrackType"].level is Level.WARN
    assert "proves nothing" in said["ProctrackType"].advice


def test_totals_over_components_are_counted_because_sbatch_does_not() -> None:
    assert bad(of(recorded(), nodes=(2, 3))) == [
        "total nodes: 5 nodes wanted by rollout + genrm, 4 there for all of them"
    ]
    assert bad(of(recorded(), nodes=(2, 2))) == []
    assert bad(of(recorded(), nodes=(2, 1, 2))) == [
        "total nodes: 5 nodes wanted by rollout + genrm + teacher, 4 there for all of them"
    ]


@pytest.mark.parametrize(
    ("nodes", "gpus", "more", "words"),
    [
        ((5,), 8, {}, "4 of 4 nodes are usable"),
        ((1,), 16, {}, "0 of 4 nodes have 16 GPUs"),
        ((1,), 8, {"gpu_type": "l40s"}, "0 of 4 nodes have 8 GPUs of type l40s"),
        ((1,), 8, {"cpus_per_node": 64}, "0 of 4 nodes have 64 CPUs"),
        ((1,), 8, {"constraint": "ib"}, "0 of 4 nodes have the feature ib"),
        ((1,), 8, {"partition": "nope"}, "partition nope"),
    ],
)
def test_what_no_node_can_carry(nodes: tuple[int, ...], gpus: int, more: dict[str, Any], words: str) -> None:
    (line,) = bad(of(recorded(), nodes, gpus, **more))
    assert words in line


def test_the_type_is_compared_without_case_and_untyped_requests_take_any() -> None:
    assert bad(of(recorded(), (1,), gpu_type="H100")) == []
    assert bad(of(recorded(), (1,), 4)) == []


@pytest.mark.parametrize(
    ("fields", "more", "words"),
    [
        ({"state": "DOWN"}, {}, "partition main is DOWN"),
        ({"max_nodes": 1}, {}, "2 nodes, MaxNodes=1"),
        ({"min_nodes": 3}, {}, "2 nodes, MinNodes=3"),
        ({"max_minutes": 30}, {"time": "1:00:00"}, "is 60 min, MaxTime is 30 min in main"),
        ({"accounts": frozenset({"b"})}, {"account": "a"}, "account a may not use main"),
        ({"denied_accounts": frozenset({"a"})}, {"account": "a"}, "account a may not use main"),
        ({"qos": frozenset({"low"})}, {"qos": "high"}, "QOS high is not among low"),
    ],
)
def test_limits_of_a_partition(fields: dict[str, Any], more: dict[str, Any], words: str) -> None:
    lines = bad(of(changed(recorded(), **fields), (2,), **more))
    assert any(words in line for line in lines), lines


def test_het_jobs_need_backfill() -> None:
    assert bad(of(recorded(SchedulerType="sched/builtin"))) == ["scheduler: sched/builtin"]
    assert bad(of(recorded(SchedulerType="sched/builtin"), (1,))) == []


def test_disabled_het_steps_do_not_touch_steps_of_one_component() -> None:
    findings = of(recorded(SchedulerParameters="bf_interval=7,disable_hetjob_steps"))
    assert bad(findings) == []
    assert next(entry for entry in findings if entry.what == "het steps").level is Level.NOTE
    assert next(entry for entry in findings if entry.what == "het start").seen == "bf_interval=7"


def test_a_site_without_gpus_or_with_cgroups() -> None:
    assert bad(check_site(recorded(GresTypes="nvme"))) == ["GresTypes: nvme"]
    said = {entry.what: entry for entry in check_site(recorded(ProctrackType="proctrack/cgroup"))}
    assert said["ProctrackType"].level is Level.OK


def test_nodes_that_are_drained_do_not_count() -> None:
    facts = recorded()
    assert facts.nodes is not None
    away = {name: replace(node, state="IDLE+DRAIN") for name, node in facts.nodes.items() if name != "node1"}
    facts = replace(facts, nodes={**facts.nodes, **away})
    assert bad(of(facts, (2,))) == [
        "component 0 (rollout): wanted 2 nodes with 8 GPUs; in main 1 of 4 nodes are usable",
    ]


def test_what_could_not_be_asked_is_unknown_and_not_bad(tmp_path: Path) -> None:
    script = "#!/bin/sh\necho 'slurm_load_ctl_conf error: Socket timed out on send/recv operation' >&2\nexit 1\n"
    for name in ("sbatch", "srun", "squeue", "scontrol", "scancel"):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    facts = gather({"PATH": f"{tmp_path}:/bin"})
    findings = of(facts, (9,))
    assert bad(findings) == []
    assert [entry.level for entry in findings] == [Level.UNKNOWN] * 3
    assert all("Socket timed out" in entry.seen for entry in findings)


def test_no_slurm_at_all(tmp_path: Path) -> None:
    (finding,) = check_site(gather({"PATH": str(tmp_path)}))
    assert finding.level is Level.BAD
    assert "sbatch, srun" in finding.seen


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *[("90", 90), ("1:30", 2), ("1:30:00", 90), ("1-00:00:00", 1440), ("2-12", 3600), ("1-1:30", 1530)],
        *[("UNLIMITED", None), ("", None), ("1:2:3:4", None), ("-", None), ("a-b", None), ("9" * 30, None)],
    ],
)
def test_times(text: str, wanted: int | None) -> None:
    assert minutes(text) == wanted


@given(st.text("PartitionName=NodesGresState[]-,: \n", max_size=120))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_partitions, parse_nodes):
        try:
            parse(text)
        except ConfigError:
            continue
