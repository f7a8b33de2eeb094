"""Something ends with SIGKILL while the run serves: who is told, what comes back, what is left."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.harness.fixtures import require_slurm
from tests.harness.launch import LaunchedRun, Site
from tests.harness.load import load_on
from tests.harness.sites import FAKE, LOCAL, SLURM, NewRun, SlurmSite, merged, own_ports, small
from tests.harness.slurm_cluster import SlurmCluster
from tests.harness.slurm_proc import Proc, wait_gone
from tests.harness.wait import until


def engine_of(run: LaunchedRun, worker: str) -> Proc:
    """The process of one engine."""
    found = Proc.of(int(run.worker(worker)["pid"]))
    assert found is not None
    return found


def generations(state: dict[str, Any]) -> dict[str, int]:
    """Generation by replica."""
    return {row["replica"]: row["generation"] for row in state["replicas"]}


def node_of(state: dict[str, Any], replica: str) -> str:
    """The node that carries a replica."""
    (node,) = next(row["nodes"] for row in state["replicas"] if row["replica"] == replica)
    assert isinstance(node, str)
    return node


def test_a_killed_engine_under_load_is_built_again(new: NewRun) -> None:
    run = new(small())
    run.up()
    engine = engine_of(run, "policy/replica-0#0")
    with load_on(run.gateway_url, "/rollout/generate", run.token) as load:
        load.more(50)
        engine.send(signal.SIGKILL)
        state = run.wait_replica("policy/replica-0", generation=2)
        load.more(50)
    assert load.wrong == []
    assert generations(state) == {
        "policy/replica-0": 2,
        "policy/replica-1": 1,
        "judge/replica-0": 1,
        "teacher/replica-0": 1,
    }
    run.wait_state("READY")
    engines = run.http().get("/rollout/engines").json()["models"]["policy"]["engines"]
    assert [(engine["state"], engine["generation"]) for engine in engines] == [("READY", 2), ("READY", 1)]
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_killed_follower_costs_the_whole_replica_and_it_is_built_again(new: NewRun) -> None:
    one = {"nodes": 1, "gpus_per_node": 1}
    apart = small(placement="decoupled", training=None, pools={"judges": one, "teachers": one})
    roles = {
        "rollout": {"models": {"policy": {"gpus": 4, "gpus_per_engine": 4}}},
        "genrm": {"pool": "judges"},
        "teacher": {"pool": "teachers"},
    }
    run = new(merged(apart, {"roles": roles}))
    state = run.up()
    (replica,) = [row for row in state["replicas"] if row["replica"] == "policy/replica-0"]
    assert len(set(replica["nodes"])) == 2
    engines = run.http().get("/rollout/engines").json()["models"]["policy"]["engines"]
    assert [engine["engine_id"] for engine in engines] == ["policy/replica-0"], "only the head is published"
    head, follower = (engine_of(run, f"policy/replica-0#{rank}") for rank in (0, 1))
    follower.send(signal.SIGKILL)
    state = run.wait_replica("policy/replica-0", generation=2)
    assert wait_gone([head, follower], 5.0) == []
    assert generations(state)["judge/replica-0"] == 1
    run.http().post("/rollout/generate", json={"text": "1+1="}).raise_for_status()
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_killed_sidecar_takes_its_engines_along_and_both_come_back(new: NewRun, site: Site) -> None:
    run = new(small())
    state = run.up()
    lost, other = node_of(state, "judge/replica-0"), node_of(state, "policy/replica-0")
    engines = [engine_of(run, f"{replica}/replica-0#0") for replica in ("judge", "teacher")]
    sidecar = run.sidecar(lost)
    with load_on(run.gateway_url, "/rollout/generate", run.token, clients=2) as load:
        load.more(20)
        sidecar.send(signal.SIGKILL)
        assert wait_gone(engines, 10.0) == []
        run.wait_replica("judge/replica-0", generation=2)
        state = run.wait_replica("teacher/replica-0", generation=2)
        load.more(20)
    assert (load.wrong, load.failed) == ([], 0), "the other node serves on"
    assert generations(state)["policy/replica-0"] == 1
    run.wait_state("READY")
    assert run.sidecar(lost) != sidecar
    if site.kind != "local":
        assert site.steps() == sorted((f"sidecar-{node}", node) for node in (lost, other))
    for role in ("genrm", "teacher"):
        run.http().post(f"/{role}/generate", json={"text": "1"}).raise_for_status()
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.fixture(scope="module")
def cgroup_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmSite]:
    require_slurm()
    with SlurmCluster(2, proctrack="proctrack/cgroup") as cluster:
        yield SlurmSite(tmp_path_factory.mktemp("cgroup"), cluster)


@pytest.mark.slurm
@pytest.mark.parametrize("site", [LOCAL], indirect=True)  # what `new` makes its runs on, unless told otherwise
def test_where_cgroups_track_processes_the_end_of_the_step_is_the_proof(new: NewRun, cgroup_site: SlurmSite) -> None:
    run = new(small(), site=cgroup_site)
    state = run.up()
    lost = node_of(state, "judge/replica-0")
    run.sidecar(lost).send(signal.SIGKILL)
    run.wait_replica("judge/replica-0", generation=2)
    run.wait_replica("teacher/replica-0", generation=2)
    (ended,) = run.events("step_ended")
    assert (ended["node"], ended["proof"], ended["again"]) == (lost, "cgroup", True)
    run.wait_state("READY")
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [LOCAL, FAKE], indirect=True)
def test_a_killed_gateway_comes_back_on_the_same_port(new: NewRun) -> None:
    run = new(small(ports=own_ports()))
    run.up()
    url, gateway = run.gateway_url, run.gateway()
    with load_on(url, "/rollout/generate", run.token) as load:
        load.more(20)
        gateway.send(signal.SIGKILL)
        assert wait_gone([gateway], 5.0) == []
        load.more(50)
    assert load.wrong == []
    assert run.gateway_url == url
    state = run.state()
    assert state is not None
    assert (state["state"], set(generations(state).values())) == ("READY", {1}), "nothing else has moved"
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_killed_coordinator_ends_the_run_in_good_order(new: NewRun) -> None:
    run = new(small())
    run.up()
    run.coordinator().send(signal.SIGKILL)
    outcome = run.outcome()
    assert outcome["state"] == "FAILED"
    assert outcome["exit_code"] != 0
    assert "coordinator" in outcome["error"]["message"]
    run.nothing_left()
    status = run.call("status", "--json")
    assert status.rc == 0, status.said
    assert status.json["state"] == "FAILED"
    stopped = run.call("stop", "--json")
    assert stopped.rc in {0, outcome["exit_code"]}, stopped.said


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_a_killed_supervisor_leaves_nothing(new: NewRun) -> None:
    run = new(small())
    run.up()
    run.supervisor().send(signal.SIGKILL)
    run.nothing_left()
    status = run.call("status", "--json")
    assert status.rc == 0, status.said
    assert status.json["state"] not in {"READY", "DEGRADED", "STARTING"}, status.said
    again = run.up()
    assert again["attempt"] == 2
    assert run.call("stop").rc == 0


@pytest.mark.parametrize("site", [FAKE, SLURM], indirect=True)
def test_scancel_leaves_nothing_and_status_tells(new: NewRun, site: Any) -> None:
    run = new(small())
    job = str(run.up()["job_ids"][0])
    if site.kind == "fake":
        site.slurm.run("scancel", job)
    else:
        site.cluster.run("scancel", job)
    outcome = run.outcome()
    # Slurm signals every process of the batch step, so either of two may have heard it first.
    assert "SIGTERM" in outcome["reason"] or "told to end" in outcome["reason"], outcome
    run.nothing_left()
    status = run.call("status")
    assert status.rc == 0, status.said
    assert outcome["reason"] in status.out
    assert outcome["state"] in status.out


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_a_coordinator_that_hangs_stops_admission_until_it_is_back(new: NewRun) -> None:
    run = new(small(control={"beat_seconds": 0.2, "silence_seconds": 1}))
    state = run.up()
    urls = [row["base_url"] for row in state["replicas"]]
    key = {"Authorization": f"Bearer {run.run_dir.engine_key_file.read_text().strip()}"}
    body = {"text": "1 + 1 = ", "sampling_params": {"max_new_tokens": 4}}
    coordinator = run.coordinator()
    with httpx.Client(headers=key, trust_env=False) as direct:

        def statuses() -> set[int]:
            return {direct.post(f"{url}/generate", json=body).status_code for url in urls}

        assert statuses() == {200}
        coordinator.send(signal.SIGSTOP)
        until(lambda: statuses() == {503}, 15.0, "guards that hold admission")
        answer = run.http().post("/rollout/generate", json=body)
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        coordinator.send(signal.SIGCONT)
        until(lambda: statuses() == {200}, 20.0, lambda: f"guards that admit again{run.logs()}")
    state = run.wait_state("READY")
    assert set(generations(state).values()) == {1}, "nobody was built again"
    until(lambda: run.http().post("/rollout/generate", json=body).status_code == 200, 10.0, "the gateway serves")
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_an_event_log_that_cannot_grow_does_not_end_the_run(new: NewRun) -> None:
    run = new(small())
    run.up()
    # What a full disk does to a writer: every further byte to a file is refused.
    resource.prlimit(run.coordinator().pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
    engine_of(run, "policy/replica-0#0").send(signal.SIGKILL)
    run.wait_replica("policy/replica-0", generation=2)
    run.wait_state("READY")
    with load_on(run.gateway_url, "/rollout/generate", run.token) as load:
        load.more(20)
    assert (load.wrong, load.failed) == ([], 0)
    resource.prlimit(run.coordinator().pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert run.call("stop").rc == 0
    run.nothing_left()
