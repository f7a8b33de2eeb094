"""Inside an allocation of somebody else: parts of it, several runs at once, heterogeneous ones."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import LaunchedRun
from tests.harness.sites import FAKE, SLURM, NewRun, small
from tests.harness.wait import until

DECOUPLED: dict[str, Any] = {
    "placement": "decoupled",
    "job_shape": "het",
    "training": None,
    "pools": {"a": {"nodes": 1, "gpus_per_node": 2}, "b": {"nodes": 1, "gpus_per_node": 2}},
    "roles": {
        "rollout": {"pool": "a", "models": {"policy": {"model_path": "sim/policy", "gpus": 2}}},
        "genrm": {"pool": "b", "models": {"judge": {"model_path": "sim/judge", "gpus": 2}}},
    },
}


def decoupled() -> dict[str, Any]:
    """Two components of one node each, whose engines answer like those of `small`."""
    base = {key: value for key, value in small().items() if key not in {"pools", "roles", "training", "placement"}}
    return base | {key: value for key, value in DECOUPLED.items() if value is not None}


@contextlib.contextmanager
def allocation(
    site: Any, tmp_path: Path, components: Sequence[str], runs: Sequence[LaunchedRun]
) -> Iterator[list[Any]]:
    """Submits a job with these components that launches the runs one after the other and then waits to be ended.

    Gives the documents of the launches, None for one that was refused.
    """
    lines = ["#!/bin/bash"]
    for number, options in enumerate(components):
        lines += ["#SBATCH hetjob"] if number else []
        lines += [f"#SBATCH {option}" for option in options.split()]
        lines += [f"#SBATCH --output={tmp_path}/outer.log"] if number == 0 else []
    lines.append(f"export RELAX_RUNS_ROOT={site.root}")
    for number, run in enumerate(runs):
        launch = [sys.executable, "-m", "relax_slurm", "launch", str(run.config), "--backend", "slurm", "--json"]
        lines += [f"{shlex.join(launch)} > {tmp_path}/{number}.json", f"echo $? > {tmp_path}/{number}.code"]
    lines += [f"touch {tmp_path}/launched", "exec sleep 300"]
    script = tmp_path / "outer.sh"
    script.write_text("\n".join(lines) + "\n")
    slurm = site.slurm if site.kind == "fake" else site.cluster
    slurm.run("sbatch", script)
    try:
        log = tmp_path / "outer.log"
        until((tmp_path / "launched").exists, 100.0, lambda: log.read_text() + "".join(run.logs() for run in runs))
        documents = []
        for number in range(len(runs)):
            body = json.loads((tmp_path / f"{number}.json").read_text())
            documents.append(body if (tmp_path / f"{number}.code").read_text().strip() == "0" else body["error"])
        yield documents
    finally:
        for row in site.jobs():
            slurm.run("scancel", row.split()[0].partition("+")[0])
        until(lambda: not site.jobs(), 20.0, "the allocation ends")


def gpus_of(run: LaunchedRun) -> dict[str, set[int]]:
    """Physical GPUs by node, as bound."""
    bound = json.loads((run.run_dir.path / "bound.json").read_text())
    return {node["name"]: {gpu["index"] for gpu in node["gpus"]} for node in bound["nodes"]}


def answers(run: LaunchedRun, role: str) -> bool:
    body = {"text": "1", "sampling_params": {"max_new_tokens": 2}}
    return run.http().post(f"/{role}/generate", json=body).status_code == 200


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_runs_in_one_allocation_keep_apart_and_end_alone(new: NewRun, site: Any, tmp_path: Path) -> None:
    first, second, third = new(small()), new(small()), new(small())
    whole = ["--nodes=2 --gpus-per-node=4"]
    with allocation(site, tmp_path, whole, [first, second, third]) as documents:
        assert [document.get("state") for document in documents[:2]] == ["READY", "READY"], documents
        assert documents[2]["code"] == "startup_failed"
        assert f"runs {', '.join(sorted([first.name, second.name]))} use a part of it" in documents[2]["message"]
        one, two = gpus_of(first), gpus_of(second)
        assert set(one) == set(two)
        for node, mine in one.items():
            assert len(mine) == len(two[node]) == 2
            assert not mine & two[node], "no GPU twice"
        assert len(site.steps()) == 4
        assert first.call("stop").rc == 0, first.logs()
        until(lambda: len(site.steps()) == 2, 10.0, lambda: f"{site.steps()}")
        assert all(second.name in name for name, _ in site.steps())
        assert answers(second, "rollout"), "the other run does not notice"
        assert len(site.jobs()) == 1
        assert second.call("stop").rc == 0
        until(lambda: site.steps() == [], 10.0, lambda: f"{site.steps()}")
        assert len(site.jobs()) == 1, "the allocation is not ours to end"


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_a_forced_end_touches_only_its_own_steps(new: NewRun, site: Any, tmp_path: Path) -> None:
    first, second = new(small()), new(small())
    with allocation(site, tmp_path, ["--nodes=2 --gpus-per-node=4"], [first, second]) as documents:
        assert [document.get("state") for document in documents] == ["READY", "READY"], documents
        first.supervisor().send(signal.SIGKILL)
        until(lambda: not first.processes(), 30.0, first.logs)
        assert answers(second, "rollout")
        assert len([name for name, _ in site.steps() if second.name in name]) == 2
        assert second.call("stop").rc == 0


@pytest.mark.parametrize("site", [SLURM], indirect=True)
@pytest.mark.parametrize(
    "components",
    [["--nodes=1 --gpus-per-node=4", "--nodes=2 --gpus-per-node=h100:8"], ["--nodes=3 --gpus-per-node=4"]],
    ids=["het", "single"],
)
def test_a_run_of_two_components_in_a_larger_allocation(
    new: NewRun, site: Any, tmp_path: Path, components: list[str]
) -> None:
    run = new(decoupled())
    with allocation(site, tmp_path, components, [run]) as (document,):
        assert document.get("state") == "READY", document
        assert [len(gpus) for gpus in gpus_of(run).values()] == [2, 2]
        assert answers(run, "rollout")
        assert answers(run, "genrm")
        jobs = len(site.jobs())
        assert jobs == len(components)
        assert run.call("stop").rc == 0
        until(lambda: site.steps() == [], 10.0, lambda: f"{site.steps()}")
        assert len(site.jobs()) == jobs
