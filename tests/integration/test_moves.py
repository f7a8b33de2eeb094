"""A role leaves its GPUs while it is busy, and comes back: nobody is left without an answer, no engine ends."""

from __future__ import annotations

from typing import Any

import pytest

from relax_slurm.cli.common import ask
from relax_slurm.client.weights import SyncWeightsClient
from relax_slurm.errors import RelaxError
from sidecars.ledger import GIB
from tests.harness.crowd import ENDS, crowd
from tests.harness.launch import LaunchedRun
from tests.harness.routers import require_router
from tests.harness.sites import LOCAL, NewRun, merged, small
from tests.harness.wait import until

pytestmark = pytest.mark.parametrize("site", [LOCAL], indirect=True)
CROWD, TOKENS = 50, 4000
REPLICAS = ("policy/replica-0", "policy/replica-1")


def busy(**policy: Any) -> dict[str, Any]:
    """Engines that are slow enough to be caught at work: a request takes ten seconds."""
    model = {"engine_args": {"enable_weights_cpu_backup": True}, **policy}
    changes = {
        "engine": {"sim": {"tokens_per_second": 400}},
        "roles": {"rollout": {"models": {"policy": model}}},
        "control": {"operation_seconds": 60, "drain_seconds": 1},
    }
    return merged(small(), changes)


def move(run: LaunchedRun, role: str, method: str) -> dict[str, Any]:
    """Ask for it and wait for the end of it."""
    ask(run.run_dir, "move_role", role=role, method=method)
    found: list[dict[str, Any]] = []

    def over() -> bool:
        now = (run.state() or {"moves": {}})["moves"].get(role)
        found[:] = [] if now is None else [now]
        return now is not None and now["state"] != "RUNNING"

    until(over, 90.0, lambda: f"{method} of {role}, last {found}{run.logs()}")
    return found[0]


def rows(run: LaunchedRun, *replicas: str) -> dict[str, tuple[str, int]]:
    """State and generation of replicas."""
    state = run.state()
    assert state is not None
    return {
        row["replica"]: (row["state"], row["generation"]) for row in state["replicas"] if row["replica"] in replicas
    }


def resident(run: LaunchedRun, replica: str) -> int:
    """Bytes that a replica holds on all its cards, by the ledger."""
    return sum(entry.bytes for entry in run.held() if entry.owner.startswith(replica))


def wait_busy(run: LaunchedRun, *replicas: str) -> None:
    """Requests are at every one of these engines."""

    def counts() -> list[int]:
        return [int(run.worker(f"{replica}#0")["in_flight"]) for replica in replicas]

    until(lambda: min(counts()) > 0, 30.0, lambda: f"requests at {replicas}, last {counts()}")


def there_and_back(run: LaunchedRun, role: str, replicas: tuple[str, ...]) -> None:
    """Offload under load, then onload: same processes, same generation, memory gone in between."""
    pids = {replica: run.worker(f"{replica}#0")["pid"] for replica in replicas}
    full = {replica: resident(run, replica) for replica in replicas}
    assert min(full.values()) > 10 * GIB
    with crowd(run.gateway_url, f"/{role}/generate", run.token, CROWD, TOKENS) as many:
        wait_busy(run, *replicas)
        assert move(run, role, "offload")["state"] == "DONE"
        ends = many.ends()
    assert many.wrong == []
    assert set(ends) <= ENDS
    assert ends.total() == CROWD
    assert rows(run, *replicas) == dict.fromkeys(replicas, ("SLEEPING", 1))
    assert all(resident(run, replica) <= GIB for replica in replicas), "only the context stays"
    refused = run.http().post(f"/{role}/generate", json={"text": "1 + 1 = "})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert move(run, role, "offload")["state"] == "DONE", "again is nothing to do"
    assert move(run, role, "onload")["state"] == "DONE"
    assert rows(run, *replicas) == dict.fromkeys(replicas, ("READY", 1))
    assert move(run, role, "onload")["state"] == "DONE"
    assert {replica: run.worker(f"{replica}#0")["pid"] for replica in replicas} == pids
    assert {replica: resident(run, replica) for replica in replicas} == full
    body = {"text": "1 + 1 = ", "sampling_params": {"max_new_tokens": 4}}
    until(lambda: run.http().post(f"/{role}/generate", json=body).status_code == 200, 30.0, run.logs)


def test_a_busy_rollout_leaves_and_comes_back_with_its_weights(new: NewRun) -> None:
    run = new(busy())
    run.up()
    there_and_back(run, "rollout", REPLICAS)
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.engine
def test_the_same_behind_a_router(new: NewRun) -> None:
    routed = {"engine": {"router_python": require_router()}}
    run = new(merged(busy(route_mode="SGLANG_ROUTER", router={"policy": "round_robin"}), routed))
    run.up()
    there_and_back(run, "rollout", REPLICAS)
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_busy_teacher_leaves_and_comes_back(new: NewRun) -> None:
    run = new(busy())
    run.up()
    there_and_back(run, "teacher", ("teacher/replica-0",))
    assert rows(run, *REPLICAS) == dict.fromkeys(REPLICAS, ("READY", 1))
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_rollout_that_lost_its_weights_loads_the_checkpoint_it_is_due(new: NewRun) -> None:
    run = new(busy(engine_args={}))
    run.up()
    assert move(run, "rollout", "offload")["state"] == "DONE"
    assert move(run, "rollout", "onload")["state"] == "DONE"
    assert rows(run, *REPLICAS) == dict.fromkeys(REPLICAS, ("READY", 1))
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_weights_that_are_on_no_disk_are_waited_for_and_that_is_no_failure(new: NewRun) -> None:
    run = new(busy(engine_args={}))
    run.up()
    with SyncWeightsClient(run.run_dir.path) as weights:
        weights.update_weights_from_tensor("policy", ["AAAA"], "2")
        assert move(run, "rollout", "offload")["state"] == "DONE"
        woken = move(run, "rollout", "onload")
        assert (woken["state"], woken["pending"], woken["error"]) == ("WEIGHTS_PENDING", list(REPLICAS), "")
        assert rows(run, *REPLICAS) == dict.fromkeys(REPLICAS, ("ONLOADING", 1))
        assert run.http().post("/rollout/generate", json={"text": "1"}).status_code == 503
        weights.update_weights_from_tensor("policy", ["AAAA"], "3")
    assert rows(run, *REPLICAS) == dict.fromkeys(REPLICAS, ("READY", 1))
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_moves_that_make_no_sense_are_refused(new: NewRun) -> None:
    run = new(busy())
    run.up()
    with pytest.raises(RelaxError, match="no such role"):
        ask(run.run_dir, "move_role", role="critic", method="offload")
    with pytest.raises(RelaxError, match="method"):
        ask(run.run_dir, "move_role", role="rollout", method="teleport")
    assert run.call("stop").rc == 0
    run.nothing_left()
