"""Three roles on a real Slurm of two nodes, all of them SmolLM2 on SGLang; the policy behind a real router.

One run serves all tests of this file: what is asked of it leaves it READY.
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.engine_program import real_sglang
from tests.harness.fixtures import require_slurm
from tests.harness.launch import LaunchedRun, new_run
from tests.harness.routers import require_router
from tests.harness.sites import SlurmSite, fresh_name
from tests.harness.slurm_cluster import SlurmCluster
from tests.harness.slurm_proc import Proc, processes, wait_gone
from tests.harness.wait import until
from tests.real.asking import OPENINGS, QUESTION, SCORE, Straight, generation, post, scored
from tests.unit.core.test_payload import REFUSED, VOCABULARY

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(1200)]
ENGINES = ("policy/replica-0#0", "policy/replica-1#0", "judge/replica-0#0", "math/replica-0#0")
REQUESTS = 200
KILLED_AFTER = 60
"""Answers, so that many more are still to come."""


def body_of(model: Path) -> dict[str, Any]:
    """Two policy engines, a judge and a teacher on two nodes of two GPUs."""
    real = real_sglang()
    # Every request that reaches an engine is in its log, with its id.
    args = {**real["engine_args"], "max_total_tokens": 8192, "log_requests": True, "log_requests_level": 0}
    one = {"model_path": str(model), "gpus": 1, "engine_args": args}
    policy = {
        **one,
        "gpus": 2,
        "gpus_per_engine": 1,
        "route_mode": "SGLANG_ROUTER",
        "router": {"policy": "round_robin"},
    }
    return {
        "placement": "split",
        "engine": {
            "program": "sglang",
            "python": real["python"],
            "router_python": require_router(),
            "env": real["env"],
            "startup_seconds": 400,
        },
        "pools": {"actor": {"nodes": 2, "gpus_per_node": 2}},
        "training": {"pool": "actor", "gpus": 4},
        "roles": {
            "rollout": {"pool": "actor", "models": {"policy": policy}},
            "genrm": {"pool": "actor", "models": {"judge": one}},
            "teacher": {"pool": "actor", "models": {"math": one}},
        },
        "slurm": {"time": "0:30:00"},
    }


@pytest.fixture(scope="module")
def run(chat_model: Path, straight: Straight, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    """The run, READY. When all tests are through, it is stopped and nothing of it may be left."""
    require_slurm()
    assert straight.texts, "asked before four engines take the memory"
    folder = tmp_path_factory.mktemp("two-nodes")
    with SlurmCluster(2, gpus=2) as cluster:
        site = SlurmSite(folder / "runs", cluster)
        with new_run(site, body_of(chat_model), folder, fresh_name()) as launched:
            done = launched.launch("--json", seconds=500)
            assert done.rc == 0, done.said + launched.logs()
            print(done.err)
            yield launched
            stopped = launched.call("stop", "--json", seconds=90)
            assert stopped.rc == 0, stopped.said + launched.logs()
            assert stopped.json["unproven"] == []
            launched.nothing_left()


def pids(run: LaunchedRun) -> dict[str, int]:
    """Pid of every engine."""
    return {worker: int(run.worker(worker)["pid"]) for worker in ENGINES}


def of_engine(run: LaunchedRun, worker: str) -> list[Proc]:
    """Every living process of one engine."""
    return [process for process in run.processes() if process.environ().get("RELAX_WORKER_TAG") == worker]


# ---- real text -----------------------------------------------------------------------------------------------------


def test_every_role_answers_with_real_text(run: LaunchedRun, straight: Straight) -> None:
    assert isinstance(run.site, SlurmSite)
    nodes = {row["replica"]: row["nodes"] for row in (run.state() or {})["replicas"]}
    assert {node for names in nodes.values() for node in names} == set(run.site.cluster.nodes)
    client = run.http(seconds=120)
    model = client.get("/rollout/engines").json()["models"]["policy"]
    assert (model["route_mode"], len(model["engines"])) == ("SGLANG_ROUTER", 2)
    assert model["router_url"]

    chat = post(client, "/rollout/v1/chat/completions", {"model": "policy", "messages": QUESTION, "temperature": 0})
    assert "Paris" in chat["choices"][0]["message"]["content"]
    for text, capital in OPENINGS.items():
        said = post(client, "/rollout/generate", generation(text))["text"]
        assert capital in said
        assert said == straight.texts[text]
    verdict = post(client, "/genrm/generate", {"messages": QUESTION, "sampling_params": {"temperature": 0}})
    assert set(verdict) == {"response"}
    assert "Paris" in verdict["response"]
    taught = post(client, "/teacher/generate", SCORE)
    assert scored(taught) == straight.scores, "a teacher's log-probs are the engine's own"


# ---- what would end an engine --------------------------------------------------------------------------------------


def scaled(value: Any, vocabulary: int) -> Any:
    """A request against the tiny model's vocabulary as one against another vocabulary."""
    if isinstance(value, dict):
        return {scaled(key, vocabulary): scaled(entry, vocabulary) for key, entry in value.items()}
    if isinstance(value, list):
        return [scaled(entry, vocabulary) for entry in value]
    if isinstance(value, str) and value in {str(VOCABULARY), str(VOCABULARY + 1)}:
        return str(int(value) - VOCABULARY + vocabulary)
    if type(value) is int and value in {VOCABULARY, VOCABULARY + 1}:
        return value - VOCABULARY + vocabulary
    return value


def deadly(vocabulary: int) -> list[tuple[str, dict[str, Any]]]:
    """What SGLang does not survive, one of each kind, on the routes that the gateway has (docs/real-engine.md)."""
    chat = {"messages": QUESTION, "logprobs": True}
    return [
        ("/generate", {"input_ids": [504, vocabulary]}),
        ("/generate", {"input_ids": [504], "return_logprob": True, "logprob_start_len": -2}),
        ("/generate", {"input_ids": [504], "return_logprob": True, "top_logprobs_num": vocabulary + 1}),
        ("/generate", {"text": ""}),
        ("/generate", {"input_ids": [[504], []]}),
        ("/generate", {"input_ids": [], "text": "2"}),
        ("/v1/chat/completions", {**chat, "top_logprobs": vocabulary + 1}),
    ]


def test_the_deadly_are_answered_400_and_every_engine_lives(run: LaunchedRun, chat_model: Path) -> None:
    vocabulary = json.loads((chat_model / "config.json").read_text())["vocab_size"]
    before = pids(run)
    client = run.http(seconds=60)
    worst = deadly(vocabulary)
    refused = worst + [(path, scaled(body, vocabulary)) for path, _, body in REFUSED if path != "/v1/completions"]
    asked = Counter[str]()

    def refuse(role: str, model: str, path: str, body: dict[str, Any]) -> None:
        answer = client.post(f"/{role}{path}", json={**body, "model": model})
        assert answer.status_code == 400, (role, path, body, answer.status_code, answer.text)
        asked[role] += 1

    for path, body in worst:  # the rest hardly reaches an engine: the router reads bodies itself and writes them anew
        refuse("rollout", "policy", path, body)
    for path, body in refused:
        refuse("teacher", "math", path, body)
        if path != "/generate":  # where a judge takes messages
            refuse("genrm", "judge", path, body)
    print(f"refused: {dict(asked)}")
    assert pids(run) == before
    assert all(Proc.of(pid) is not None for pid in before.values())
    assert post(client, "/rollout/generate", generation(next(iter(OPENINGS))))["text"]
    assert scored(post(client, "/teacher/generate", SCORE))


# ---- a scheduler that is killed ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Said:
    """What one client got."""

    rid: str
    text: str
    status: int
    """0 when the connection ended."""
    body: Any


def ask(url: str, token: str, number: int) -> Said:
    """One request of its own id, sent once."""
    rid, text = f"load-{number:06d}", tuple(OPENINGS)[number % len(OPENINGS)]
    headers = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=url, headers=headers, timeout=120.0, trust_env=False) as client:
        try:
            answer = client.post("/rollout/generate", json=generation(text, rid=rid))
        except httpx.TransportError as error:
            return Said(rid, text, 0, repr(error))
        return Said(rid, text, answer.status_code, answer.json() if answer.status_code == 200 else answer.text)


def received(run: LaunchedRun) -> Counter[str]:
    """How often each request has reached an engine, by the engines' own logs."""
    found = Counter[str]()
    for name in run.engine_logs():
        log = (run.run_dir.logs / name).read_text(errors="replace")
        found.update(re.findall(r"Receive: obj=GenerateReqInput\(.*?rid='(load-\d+)'", log))
    return found


def engine_of(run: LaunchedRun, replica: str) -> dict[str, Any]:
    """A replica as discovery shows it."""
    engines = run.http().get("/rollout/engines").json()["models"]["policy"]["engines"]
    return next(dict(engine) for engine in engines if engine["engine_id"] == replica)


def test_a_killed_scheduler_costs_errors_and_nothing_else(run: LaunchedRun, straight: Straight) -> None:
    replica = "policy/replica-1"
    before, pids_before = engine_of(run, replica), pids(run)
    members = of_engine(run, f"{replica}#0")
    (scheduler,) = [process for process in members if "sched" in process.comm()]
    url, token = run.gateway_url, run.token
    answers: list[Said] = []
    with ThreadPoolExecutor(8) as pool:

        def one(number: int) -> None:
            answers.append(ask(url, token, number))

        futures = [pool.submit(one, number) for number in range(REQUESTS)]
        until(lambda: len(answers) >= KILLED_AFTER, 120.0, lambda: f"only {answers}{run.logs()}")
        assert len(answers) < REQUESTS - 50, "mid-load"
        scheduler.send(signal.SIGKILL)
        for future in futures:
            future.result(300)

    statuses = Counter(said.status for said in answers)
    print(f"{REQUESTS} requests, one scheduler killed after {KILLED_AFTER} answers: {dict(statuses)}")
    assert len(answers) == REQUESTS
    assert set(statuses) <= {200, 0, 500, 502, 503, 504}
    assert statuses[200] > KILLED_AFTER, "the other engine serves on"
    assert statuses[200] < REQUESTS, "what the killed one had is an error"
    for said in answers:
        if said.status == 200:
            assert said.body["meta_info"]["id"] == said.rid, "an answer to another request"
            assert OPENINGS[said.text] in said.body["text"], said
            assert not any(other in said.body["text"] for text, other in OPENINGS.items() if text != said.text), said
    times = received(run)
    assert max(times.values()) == 1, "sent twice to an engine"
    answered = {said.rid for said in answers if said.status == 200}
    assert answered <= set(times)

    state = run.wait_replica(replica, generation=before["generation"] + 1, seconds=500)
    run.wait_state("READY", seconds=120)
    assert wait_gone(members, 5.0) == [], "nothing of the old one is left"
    walked = [event for event in run.events("replica") if event["replica"] == replica]
    states = [event["after"] for event in walked]
    assert (states[0], states[-2], states[-1]) == ("READY", "GONE", "READY"), "proven gone before it is built again"
    assert set(states[1:-2]) <= {"FAILED", "STOPPING"}
    assert "ended" in walked[1]["reason"]
    after = engine_of(run, replica)
    assert (after["state"], after["generation"]) == ("READY", before["generation"] + 1)
    assert after["base_url"] != before["base_url"], "nothing that was meant for the old one reaches the new one"
    generations = {row["replica"]: row["generation"] for row in state["replicas"]}
    assert [count for name, count in generations.items() if name != replica] == [1, 1, 1]
    pids_after = pids(run)
    assert {worker for worker in ENGINES if pids_after[worker] != pids_before[worker]} == {f"{replica}#0"}
    client = run.http(seconds=120)
    for text in OPENINGS:
        assert post(client, "/rollout/generate", generation(text))["text"] == straight.texts[text]
    assert {process.pid for process in processes()} >= set(pids_after.values())
