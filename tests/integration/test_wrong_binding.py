"""A node whose GPUs are not the planned ones: refused with a table before any engine starts, and the job given back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_slurm import FakeSlurm
from tests.harness.fixtures import require_slurm
from tests.harness.launch import LaunchedRun, Ran, Site
from tests.harness.sites import FAKE, LOCAL, SLURM, FakeSite, LocalSite, NewRun, SlurmSite, merged, small
from tests.harness.slurm_cluster import SlurmCluster

PROLOG = """#!/bin/bash
[ -f "{folder}/$SLURMD_NODENAME" ] && cat "{folder}/$SLURMD_NODENAME"
exit 0
"""


@dataclass(frozen=True, slots=True)
class Liar:
    """A site on which the second node can be made to report what it does not have."""

    site: Site
    node: str
    lies: Path

    def tell(self, config: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        """Arrange that the tasks of the node see these variables; answers the config to launch."""
        if isinstance(self.site, FakeSite):
            self.site.slurm.lie(self.node, **variables)
        elif isinstance(self.site, SlurmSite):
            lines = [f"export {name}={value}" for name, value in variables.items()]
            (self.lies / self.node).write_text("\n".join(lines) + "\n")
        elif "SLURMD_NODENAME" in variables:
            return merged(config, {"local": {"absent": [self.node]}})
        elif "CUDA_VISIBLE_DEVICES" in variables:
            return merged(config, {"local": {"gpus": {self.node: variables["CUDA_VISIBLE_DEVICES"]}}})
        else:
            gpus = [int(word) for word in variables["SLURM_STEP_GPUS"].split(",")]
            return merged(config, {"local": {"gpus": {self.node: gpus}}})
        return config


@pytest.fixture(scope="module", params=[FAKE, LOCAL, SLURM])
def liar(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    folder = tmp_path_factory.mktemp(f"liar-{request.param}")
    root, lies = folder / "runs", folder / "lies"
    lies.mkdir()
    if request.param == "fake":
        yield Liar(FakeSite(root, FakeSlurm(folder / "slurm")), "fake2", lies)
    elif request.param == "local":
        yield Liar(LocalSite(root), "actor-1", lies)
    else:
        require_slurm()
        with SlurmCluster(2, task_prolog=PROLOG.format(folder=lies)) as cluster:
            yield Liar(SlurmSite(root, cluster), cluster.nodes[1], lies)


@pytest.fixture
def site(liar: Liar) -> Site:
    return liar.site


def refused(run: LaunchedRun, node: str) -> tuple[Ran, list[dict[str, str]]]:
    """Launch, and check everything that every refusal has in common; answers the table's rows."""
    done = run.launch("--json")
    assert done.rc == 5, done.said + run.logs()
    body = done.json
    assert body["exit_code"] == 5
    assert body["error"]["code"] == "binding_mismatch"
    rows = body["error"]["detail"]["rows"]
    assert rows, body
    assert node in {row["node"] for row in rows}
    assert all(row["seen"] and row["wanted"] for row in rows), rows
    assert ["node", "gpu", "source", "seen", "wanted", "problem"] in [line.split() for line in done.err.splitlines()]
    assert any(line.split()[:1] == [node] for line in done.err.splitlines()), done.err
    assert "Traceback" not in done.err
    assert run.engine_logs() == [], "an engine was started"
    assert run.ledgers() == [], "an engine took memory"
    run.nothing_left()
    outcome = run.outcome()
    assert (outcome["state"], outcome["exit_code"]) == ("FAILED", 5)
    return done, rows


CASES = {
    "other GPUs": ({"SLURM_STEP_GPUS": "4,5"}, "4,5"),
    "one GPU less": ({"SLURM_STEP_GPUS": "0"}, "0"),
    "a duplicate": ({"SLURM_STEP_GPUS": "1,1"}, "1,1"),
    "a mask with a duplicate": ({"CUDA_VISIBLE_DEVICES": "0,0"}, "0,0"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_node_with_the_wrong_gpus_is_refused(new: NewRun, liar: Liar, case: str) -> None:
    variables, seen = CASES[case]
    run = new(liar.tell(small(), variables))
    _, rows = refused(run, liar.node)
    assert seen in {row["seen"] for row in rows}, rows


def test_a_node_that_reports_nothing_is_refused(new: NewRun, liar: Liar) -> None:
    run = new(liar.tell(small(), {"SLURMD_NODENAME": "nowhere"}))
    _, rows = refused(run, liar.node)
    assert {row["node"] for row in rows} == {liar.node}


def test_the_same_site_binds_when_nobody_lies(new: NewRun, liar: Liar) -> None:
    if isinstance(liar.site, FakeSite):
        liar.site.slurm.lie(liar.node)
    (liar.lies / liar.node).unlink(missing_ok=True)
    run = new(small())
    assert run.up()["state"] == "READY"
    bound = run.run_dir.read("bound.json")
    assert bound is not None
    assert {node["verdict"] for node in bound["nodes"]} == {"confirmed"}, bound
    assert run.call("stop").rc == 0
    run.nothing_left()
