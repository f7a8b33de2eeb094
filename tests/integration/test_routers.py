"""Simulated engines behind a real sglang-router, on virtual nodes."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from typing import Any

import httpx
import pytest

from tests.harness.launch import LaunchedRun, arguments
from tests.harness.load import load_on
from tests.harness.routers import require_router
from tests.harness.sites import LOCAL, NewRun, small
from tests.harness.slurm_proc import Proc
from tests.harness.wait import until

pytestmark = [pytest.mark.engine, pytest.mark.parametrize("site", [LOCAL], indirect=True)]
FIRST, SECOND = "policy/replica-0", "policy/replica-1"


def routed(policy: str = "cache_aware", **model: Any) -> dict[str, Any]:
    """Two policy engines behind a router, a judge and a teacher without one."""
    changes: dict[str, Any] = {
        "engine": {"router_python": require_router()},
        "roles": {
            "rollout": {
                "models": {"policy": {"route_mode": "SGLANG_ROUTER", "router": {"policy": policy}, **model}},
            }
        },
    }
    return small(**changes)


def model_of(run: LaunchedRun) -> dict[str, Any]:
    """The routed model as discovery shows it."""
    model = run.http().get("/rollout/engines").raise_for_status().json()["models"]["policy"]
    assert isinstance(model, dict)
    return model


def workers_of(run: LaunchedRun) -> dict[str, Any]:
    """What the coordinator says of its router."""
    (router,) = (run.state() or {"routers": [{}]})["routers"]
    assert isinstance(router, dict)
    return router


def router_url(run: LaunchedRun) -> str:
    """The published URL, as soon as there is one."""
    found = until(lambda: model_of(run)["router_url"], 30.0, run.logs)
    assert isinstance(found, str)
    return found


def ask(run: LaunchedRun, text: str = "12 + 30 = ", **headers: str) -> httpx.Response:
    """One generation through the gateway."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 16}}
    return run.http().post("/rollout/generate", json=body, headers=headers)


def listed(run: LaunchedRun, url: str) -> dict[str, str]:
    """URL to worker id of all engines that the router itself lists."""
    headers = {"Authorization": f"Bearer {run.run_dir.engine_key_file.read_text().strip()}"}
    with httpx.Client(trust_env=False) as http:
        workers = http.get(f"{url}/workers", headers=headers).raise_for_status().json()["workers"]
    return {worker["url"]: worker["id"] for worker in workers}


def guards(run: LaunchedRun) -> list[str]:
    """The guards' URLs, by discovery."""
    return [engine["base_url"] for engine in model_of(run)["engines"]]


def test_a_router_serves_and_is_kept(new: NewRun) -> None:
    run = new(routed())
    document = run.up()
    (router,) = document["routers"]
    assert sorted(router["workers"]) == [FIRST, SECOND]
    url = router_url(run)
    assert url == router["url"]
    assert sorted(listed(run, url)) == sorted(guards(run))
    judge = run.http().get("/genrm/engines").json()["models"]["judge"]
    assert (judge["route_mode"], judge["router_url"]) == ("DIRECT", None)

    answer = ask(run).raise_for_status().json()
    assert answer["text"] == "42"
    body = {"text": "12 + 30 = ", "sampling_params": {"max_new_tokens": 16}, "stream": True}
    with run.http().stream("POST", "/rollout/generate", json=body) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["text"] == "42"
    chat = {"model": "policy", "messages": [{"role": "user", "content": "What is 6 * 7?"}], "max_tokens": 8}
    assert run.http().post("/rollout/v1/chat/completions", json=chat).raise_for_status().json()["choices"]

    log = (run.run_dir.logs / "head_router_policy.log").read_text()
    process = Proc.of(router["pid"])
    assert process is not None
    key = run.run_dir.engine_key_file.read_text().strip()
    assert key not in arguments(process.pid)
    assert key not in log
    with httpx.Client(trust_env=False) as http:
        without = http.post(f"{url}/generate", json={"text": "1"})
        assert without.status_code == 401

    _engine_dies(run, url)
    _router_dies(run)
    assert run.call("stop").rc == 0
    run.nothing_left()
    assert not process.alive


def _engine_dies(run: LaunchedRun, url: str) -> None:
    before = workers_of(run)["workers"][FIRST]
    engine = Proc.of(int(run.worker(f"{FIRST}#0")["pid"]))
    assert engine is not None
    with load_on(run.gateway_url, "/rollout/generate", run.token) as load:
        load.more(20)
        engine.send(signal.SIGKILL)
        run.wait_replica(FIRST, generation=2)
        load.more(20)
    # What an engine breaks off is a 500 of the router, and nothing is asked twice: that would be a right answer.
    assert [answer for answer in load.wrong if "call_upstream_request_error" not in answer] == []
    until(lambda: workers_of(run)["workers"].keys() == {FIRST, SECOND}, 20.0, run.logs)
    removed = [event for event in run.events("router_removed") if event["replica"] == FIRST]
    assert [event["worker_id"] for event in removed] == [before]
    after = workers_of(run)["workers"][FIRST]
    assert after != before
    assert sorted(listed(run, url).values()) == sorted(workers_of(run)["workers"].values())
    assert router_url(run) == url
    assert ask(run).status_code == 200


def _router_dies(run: LaunchedRun) -> None:
    before = workers_of(run)
    router = Proc.of(before["pid"])
    assert router is not None
    router.send(signal.SIGKILL)
    until(lambda: workers_of(run)["pid"] not in (None, before["pid"]), 20.0, run.logs)
    until(lambda: workers_of(run)["workers"].keys() == {FIRST, SECOND}, 20.0, run.logs)
    url = router_url(run)
    assert sorted(listed(run, url)) == sorted(guards(run))
    run.wait_state("READY")
    until(lambda: ask(run).status_code == 200, 10.0, run.logs)


def test_a_routing_key_sticks_with_policy_manual(new: NewRun) -> None:
    body = routed("manual")
    body["engine"]["sim"] = body["engine"]["sim"] | {"tokens_per_second": 50}
    run = new(body)
    run.up()
    slow = {"text": "x", "stream": True, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}}
    http = run.http()
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            stream = http.stream("POST", "/rollout/generate", json=slow, headers={"X-SMG-Routing-Key": "group-1"})
            assert stack.enter_context(stream).status_code == 200
        until(lambda: in_flight(run) == [0, 6], 8.0, lambda: f"{in_flight(run)}")
    until(lambda: in_flight(run) == [0, 0], 10.0, lambda: f"{in_flight(run)}")


def in_flight(run: LaunchedRun) -> list[int]:
    """Requests at the two engines, fewer first."""
    return sorted(run.worker(f"{replica}#0")["in_flight"] for replica in (FIRST, SECOND))


def test_a_coordinator_that_is_killed_leaves_no_router(new: NewRun) -> None:
    run = new(routed())
    run.up()
    run.coordinator().send(signal.SIGKILL)
    run.nothing_left(30.0)


def test_without_the_package_the_run_fails_and_says_what_to_install(new: NewRun) -> None:
    body = routed()
    body["engine"] = body["engine"] | {"router_python": sys.executable}
    done = new(body).launch("--json")
    assert done.rc == 6, done.said
    assert "pip install 'sglang-router" in done.err
    assert "engine.router_python" in done.err


def test_prefill_and_decode_are_reached_through_the_router_only(new: NewRun) -> None:
    groups = [{"worker_type": "prefill", "gpus": 1}, {"worker_type": "decode", "gpus": 1}]
    run = new(routed(groups=groups))
    run.up()
    model = model_of(run)
    assert model["engines"] == []
    assert (model["state"], model["route_mode"]) == ("READY", "SGLANG_ROUTER")
    url = router_url(run)
    assert workers_of(run)["workers"].keys() == {FIRST, SECOND}
    headers = {"Authorization": f"Bearer {run.run_dir.engine_key_file.read_text().strip()}"}
    with httpx.Client(trust_env=False) as http:
        rows = http.get(f"{url}/workers", headers=headers).json()["workers"]
    kinds = {row["worker_type"]: row.get("bootstrap_port") for row in rows}
    assert kinds.keys() == {"prefill", "decode"}
    assert isinstance(kinds["prefill"], int)
    assert kinds["decode"] is None
    assert ask(run).raise_for_status().json()["text"] == "42"

    engine = Proc.of(int(run.worker(f"{SECOND}#0")["pid"]))
    assert engine is not None
    engine.send(signal.SIGKILL)
    until(lambda: ask(run).status_code == 503, 10.0, run.logs)
    run.wait_replica(SECOND, generation=2)
    router_url(run)
    until(lambda: ask(run).status_code == 200, 10.0, run.logs)
    assert run.call("stop").rc == 0
    run.nothing_left()
