"""From the run file to nothing left: detached launch, wait, stop; dry run; every run file that is shipped."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from relax_slurm import resources
from relax_slurm.core.discovery import from_json
from tests.harness.launch import LaunchedRun, Site
from tests.harness.sites import FAKE, LOCAL, SLURM, NewRun, merged, small
from tests.harness.wait import until

ROLES = ("rollout", "genrm", "teacher")
SHIPPED = [name for name in resources.names("configs") if name not in ("cluster-example.yaml", "external.yaml")]
"""Those that need nothing from outside; the other one is in test_external.py."""


def shipped(name: str, **changes: Any) -> dict[str, Any]:
    """A shipped run file with shorter times; pools, roles and placement are as they are."""
    quick = {
        "control": {"beat_seconds": 0.25, "silence_seconds": 5},
        "engine": {"sim": {"startup_seconds": 0.05}},
    }
    return merged(merged(yaml.safe_load(resources.read("configs", name)), quick), changes)


def generate(run: LaunchedRun, role: str) -> dict[str, Any]:
    body = {"text": "2 + 3 = ", "sampling_params": {"max_new_tokens": 8}}
    answer = run.http().post(f"/{role}/generate", json=body).raise_for_status().json()
    assert isinstance(answer, dict)
    return answer


def test_detach_wait_stop_and_nothing_is_left(new: NewRun) -> None:
    run = new(small())
    detached = run.launch("--detach", "--json")
    assert detached.rc == 0, detached.said
    assert detached.json["run"] == run.name
    waited = run.call("status", "--wait", "READY", "--timeout", "60", "--json")
    assert waited.rc == 0, waited.said + run.logs()
    assert waited.json["state"] == "READY"
    for role in ROLES:
        generate(run, role)
    assert run.held(), "simulated engines account for their memory"
    supervisor = run.supervisor()

    stopped = run.call("stop", "--json")
    assert stopped.rc == 0, stopped.said + run.logs()
    assert stopped.json["state"] == "STOPPED"
    assert stopped.json["exit_code"] == 0
    assert stopped.json["unproven"] == []
    run.nothing_left()
    assert not supervisor.alive
    ended = run.call("status", "--json")
    assert (ended.rc, ended.json["state"]) == (0, "STOPPED"), ended.said
    too_late = run.call("status", "--wait", "READY")
    assert too_late.rc == 6, too_late.said
    again = run.call("stop")
    assert again.rc == 0, again.said


def test_an_ended_run_can_be_launched_again_as_the_next_attempt(new: NewRun) -> None:
    run = new(small())
    first = run.up()
    assert run.call("stop").rc == 0
    second = run.up()
    assert (first["attempt"], second["attempt"]) == (1, 2)
    assert second["epoch"] > first["epoch"]
    generate(run, "rollout")
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_dry_run_writes_the_files_and_starts_nothing(new: NewRun, site: Site) -> None:
    run = new(small())
    done = run.launch("--dry-run", "--json")
    assert done.rc == 0, done.said
    assert done.json["state"] == "UNSUBMITTED"
    folder = run.run_dir.path
    for name in ("config.json", "plan.json", "job.sbatch", "keys/coordinator.key", "token"):
        assert (folder / name).exists(), name
    assert json.loads((folder / "config.json").read_text())["name"] == run.name
    assert not (folder / "job.json").exists()
    assert run.processes() == []
    assert site.jobs() == []
    bash = subprocess.run(["bash", "-n", folder / "job.sbatch"], capture_output=True, text=True, check=False)
    assert (bash.returncode, bash.stderr) == (0, "")


@pytest.mark.parametrize("site", [SLURM], indirect=True)
def test_slurm_takes_the_script_of_a_dry_run(new: NewRun, site: Any) -> None:
    run = new(shipped("decoupled.yaml"))
    assert run.launch("--dry-run").rc == 0
    script = run.run_dir.path / "job.sbatch"
    assert script.read_text().count("#SBATCH hetjob") == 2
    site.cluster.run("sbatch", "--test-only", script)


@pytest.mark.parametrize("site", [LOCAL, SLURM], indirect=True)
@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_run_file_comes_up_and_goes_away(new: NewRun, site: Site, name: str) -> None:
    run = new(shipped(name))
    document = run.up()
    for role in ROLES:
        from_json(run.http().get(f"/{role}/engines").raise_for_status().json())
    nodes = sorted(node["node"] for node in document["nodes"])
    plan = json.loads((run.run_dir.path / "plan.json").read_text())
    assert len(nodes) == sum(component["nodes"] for component in plan["components"])
    if site.kind == "slurm":
        assert site.steps() == [(f"sidecar-{node}", node) for node in nodes], "one sidecar step per planned node"
        assert len(site.jobs()) == len(plan["components"])
        leaders = {row.split()[0].split("+")[0] for row in site.jobs()}
        assert leaders == {document["job_ids"][0]}, "one job"
    if plan["mode"] == "defer":
        everything_sleeps(run, document, plan["components"][0])
    else:
        for role in ROLES:
            generate(run, role)
    assert run.call("stop").rc == 0
    run.nothing_left()


def everything_sleeps(run: LaunchedRun, document: dict[str, Any], nodes: dict[str, Any]) -> None:
    """The end of a deferred start: roles have been up one after the other, and hold only what a process keeps."""
    assert document["leases"] == dict.fromkeys(ROLES, "SLEEPING")
    assert {replica["state"] for replica in document["replicas"]} == {"SLEEPING"}
    per_gpu: dict[int, float] = {}
    for entry in run.held():
        per_gpu[entry.gpu] = per_gpu.get(entry.gpu, 0.0) + entry.bytes / 2**30
    assert set(per_gpu) == set(range(nodes["gpus_per_node"]))
    assert max(per_gpu.values()) <= nodes["nodes"] * len(ROLES) * 0.5, per_gpu
    answer = run.http().post("/rollout/generate", json={"text": "1"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    changes = [event for event in run.events("replica") if event["after"] in {"READY", "SLEEPING"}]
    order = [(event["role"], event["after"]) for event in changes]
    for before, after in pairwise(ROLES):
        last_asleep = max(index for index, pair in enumerate(order) if pair == (before, "SLEEPING"))
        first_up = min(index for index, pair in enumerate(order) if pair == (after, "READY"))
        assert last_asleep < first_up, order


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_one_homogeneous_job_when_asked_for(new: NewRun, site: Site) -> None:
    run = new(shipped("decoupled.yaml", job_shape="single"))
    document = run.up()
    assert len(site.jobs()) == 1
    assert len(document["job_ids"]) == 1
    assert "hetjob" not in (run.run_dir.path / "job.sbatch").read_text()
    assert len(document["nodes"]) == len(site.steps()) == 4
    for role in ROLES:
        generate(run, role)
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_a_head_component_carries_no_sidecar(new: NewRun, site: Site) -> None:
    run = new(small(head={"cpus": 1, "mem": "500M"}))
    document = run.up()
    assert len(document["job_ids"]) == 2
    assert len(site.steps()) == 2
    allocation = run.run_dir.read("allocation.json")
    assert allocation is not None
    assert [len(group) for group in allocation["nodes"]] == [1, 2]
    assert sorted(node["node"] for node in document["nodes"]) == sorted(allocation["nodes"][1])
    assert allocation["batch_host"] == allocation["nodes"][0][0]
    generate(run, "rollout")
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_inside_an_allocation_it_is_borrowed_and_left_as_it_was(new: NewRun, site: Any, tmp_path: Path) -> None:
    run = new(small())
    launch = [sys.executable, "-m", "relax_slurm", "launch", str(run.config), "--backend", "slurm", "--json"]
    answer = tmp_path / "launch.json"
    script = tmp_path / "outer.sh"
    script.write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gpus-per-node=2\n#SBATCH --output={tmp_path}/outer.log\n"
        f"export RELAX_RUNS_ROOT={site.root}\n{shlex.join(launch)} > {answer}.part\necho $? > {tmp_path}/code\n"
        f"mv {answer}.part {answer}\nexec sleep 120\n"
    )
    slurm = site.slurm if site.kind == "fake" else site.cluster
    slurm.run("sbatch", script)
    try:
        until(answer.exists, 60.0, lambda: (tmp_path / "outer.log").read_text() + run.logs())
        assert (tmp_path / "code").read_text().strip() == "0", (tmp_path / "outer.log").read_text()
        document = json.loads(answer.read_text())
        assert document["state"] == "READY"
        job = run.run_dir.read("job.json")
        assert job is not None
        assert job["backend"] == "borrowed"
        assert len(site.jobs()) == 1
        assert len(site.steps()) == 2
        generate(run, "rollout")
        stopped = run.call("stop")
        assert stopped.rc == 0, stopped.said + run.logs()
        until(lambda: not run.processes(), 20.0, run.logs)
        until(lambda: site.steps() == [], 10.0, lambda: f"{site.steps()} are left")
        assert run.held() == []
        assert len(site.jobs()) == 1, "the allocation is not ours to end"
    finally:
        for row in site.jobs():
            slurm.run("scancel", row.split()[0])
        until(lambda: not site.jobs(), 20.0, "the allocation ends")


@pytest.mark.parametrize("site", [SLURM], indirect=True)
def test_a_job_that_waits_to_run_again_is_seen_refused_and_ended(new: NewRun, site: Any) -> None:
    run = new(small())
    job = run.up()["job_ids"][0]
    site.cluster.run("scontrol", "requeue", job)
    assert run.outcome()["state"] == "STOPPED"
    until(lambda: (run.call("status", "--json").json or {})["state"] == "JOB_PENDING", 20.0, run.logs)
    status = run.call("status", "--json").json
    assert "requeued" in status["reason"]
    assert "attempt 1 ended with STOPPED" in status["reason"]
    assert (status["gateway_url"], status.get("exit_code")) == (None, None)
    began = time.monotonic()
    stopped = run.call("stop")
    assert stopped.rc == 0, stopped.said
    assert time.monotonic() - began < 15.0
    assert run.run_dir.attempt == 1
    run.nothing_left()
    assert run.call("status", "--json").json["state"] == "STOPPED"
    assert run.call("stop").rc == 0


@pytest.mark.parametrize("site", [SLURM], indirect=True)
def test_a_stop_while_slurm_puts_the_job_back_into_the_queue(new: NewRun, site: Any) -> None:
    run = new(small())
    site.cluster.run("scontrol", "requeue", run.up()["job_ids"][0])
    began = time.monotonic()
    stopped = run.call("stop", "--timeout", "30")
    assert stopped.rc == 0, stopped.said
    assert time.monotonic() - began < 25.0
    assert run.run_dir.attempt == 1
    run.nothing_left()


@pytest.mark.parametrize("site", [SLURM], indirect=True)
def test_a_requeued_job_is_a_new_attempt_of_a_higher_epoch(new: NewRun, site: Any) -> None:
    run = new(small())
    first = run.up()
    site.cluster.run("scontrol", "requeue", first["job_ids"][0])
    # Slurm waits for its credentials to expire before it starts the job again.
    until(lambda: run.run_dir.attempt == 2, 45.0, run.logs)
    second = run.wait_state("READY")
    assert second["attempt"] == 2
    assert second["epoch"] > first["epoch"]
    assert second["job_ids"] == first["job_ids"]
    ended = json.loads((run.run_dir.path.parent / "attempt_1" / "outcome.json").read_text())
    assert (ended["state"], ended["unproven"]) == ("STOPPED", [])
    until(lambda: (run.state() or {})["gateway_url"], 20.0, run.logs)
    generate(run, "rollout")
    assert run.call("stop").rc == 0
    run.nothing_left()
