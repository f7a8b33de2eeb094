"""Something lives and does not move: it leaves routing, its clients hear of it, and it comes back or is built again."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.harness.crowd import crowd
from tests.harness.launch import LaunchedRun
from tests.harness.load import load_on
from tests.harness.sites import LOCAL, NewRun, merged, small
from tests.harness.slurm_proc import Proc
from tests.harness.wait import until

pytestmark = pytest.mark.parametrize("site", [LOCAL], indirect=True)
FIRST, SECOND = "policy/replica-0", "policy/replica-1"
QUICK = {"every_seconds": 0.2, "idle_seconds": 0.2, "answer_seconds": 2.0}
LONG = 30_000
"""Tokens that take hundreds of seconds."""


def config(health: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return merged(small(engine={"health": QUICK | health, "sim": {"tokens_per_second": 100}}), changes)


def engine_of(run: LaunchedRun, replica: str) -> Proc:
    found = Proc.of(int(run.worker(f"{replica}#0")["pid"]))
    assert found is not None
    return found


def shown(run: LaunchedRun, replica: str) -> tuple[str, bool, int]:
    """State, eligibility and generation in discovery."""
    engines = run.http().get("/rollout/engines").raise_for_status().json()["models"]["policy"]["engines"]
    (engine,) = [engine for engine in engines if engine["engine_id"] == replica]
    return engine["state"], engine["direct_eligible"], engine["generation"]


def row(run: LaunchedRun, replica: str) -> dict[str, Any]:
    """A replica in the state document."""
    state = run.state() or {"replicas": []}
    return next((row for row in state["replicas"] if row["replica"] == replica), {"state": None})


def test_a_frozen_engine_leaves_routing_and_comes_back_as_it_was(new: NewRun) -> None:
    run = new(config({"mute_failed": 10_000, "stalled_failed": 10_000}))
    run.up()
    engine = engine_of(run, FIRST)
    engine.send(signal.SIGSTOP)
    until(lambda: shown(run, FIRST) == ("UNKNOWN", False, 1), 30.0, run.logs)
    status = row(run, FIRST)
    assert (status["state"], status["release_proven"]) == ("UNKNOWN", False)
    assert "did not answer" in status["reason"]
    with load_on(run.gateway_url, "/rollout/generate", run.token) as load:
        load.more(30)
    assert (load.wrong, load.failed) == ([], 0), "the other one serves"
    engine.send(signal.SIGCONT)
    until(lambda: shown(run, FIRST) == ("READY", True, 1), 30.0, run.logs)
    assert (row(run, FIRST)["reason"], engine_of(run, FIRST)) == ("", engine)
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_an_engine_that_stays_frozen_is_built_again_and_its_clients_get_an_error(new: NewRun) -> None:
    run = new(config({"mute_failed": 3}))
    run.up()
    with crowd(run.gateway_url, "/rollout/generate", run.token, 8, LONG) as many:
        until(lambda: run.worker(f"{FIRST}#0")["in_flight"] == 4, 20.0, run.logs)
        engine_of(run, FIRST).send(signal.SIGSTOP)
        run.wait_replica(FIRST, generation=2)
        assert run.worker(f"{FIRST}#0")["in_flight"] == 0, "nothing was sent a second time"
        gone = [future for future in many.futures if future.done()]
        assert len(gone) == 4
        assert {future.result() for future in gone} <= {"cut", "refused"}
        engine_of(run, SECOND).send(signal.SIGKILL)
    assert many.wrong == []
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_frozen_sidecar_keeps_nobody_waiting_and_comes_back(new: NewRun) -> None:
    quiet = {"control": {"silence_seconds": 2, "lost_seconds": 3600}, "gateway": {"doubt_seconds": 1}}
    run = new(config({}, **quiet))
    state = run.up()
    (node,) = next(row["nodes"] for row in state["replicas"] if row["replica"] == FIRST)
    sidecar = run.sidecar(node)
    with crowd(run.gateway_url, "/rollout/generate", run.token, 8, LONG) as many:
        until(lambda: run.worker(f"{FIRST}#0")["in_flight"] > 0, 20.0, run.logs)
        sidecar.send(signal.SIGSTOP)
        until(lambda: row(run, FIRST)["state"] == "UNKNOWN", 30.0, run.logs)
        assert "silent" in row(run, FIRST)["reason"]
        until(lambda: any(future.done() for future in many.futures), 30.0, run.logs)
        ended = {future.result() for future in many.futures if future.done()}
        assert ended <= {"refused", "cut"}
        sidecar.send(signal.SIGCONT)
        until(lambda: shown(run, FIRST) == ("READY", True, 1), 30.0, run.logs)
        for replica in (FIRST, SECOND):
            engine_of(run, replica).send(signal.SIGKILL)
    assert many.wrong == []
    assert run.call("stop").rc == 0
    run.nothing_left()


def test_a_sidecar_that_was_frozen_for_too_long_builds_again(new: NewRun) -> None:
    run = new(config({}, control={"silence_seconds": 2, "lost_seconds": 3}))
    state = run.up()
    (node,) = next(row["nodes"] for row in state["replicas"] if row["replica"] == FIRST)
    sidecar = run.sidecar(node)
    sidecar.send(signal.SIGSTOP)
    until(lambda: row(run, FIRST)["state"] == "STOPPING", 30.0, run.logs)
    status = row(run, FIRST)
    assert (status["release_proven"], "has been silent" in status["reason"]) == (False, True)
    sidecar.send(signal.SIGCONT)
    run.wait_replica(FIRST, generation=2)
    run.wait_state("READY")
    assert run.call("stop").rc == 0
    run.nothing_left()
