"""A run that serves: the same questions on fake Slurm commands, on virtual nodes and on a real Slurm.

One run per site answers them all; nothing here changes it.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from relax_slurm.core.discovery import from_json
from relax_slurm.core.snapshot import ReplicaState
from tests.harness.launch import LaunchedRun, Site, new_run
from tests.harness.sites import fresh_name, small

ROLES = ("rollout", "genrm", "teacher")


@dataclass(frozen=True, slots=True)
class Serving:
    """A run that is READY, and what `launch --json` said of it."""

    run: LaunchedRun
    document: dict[str, Any]

    def ask(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """One POST to the gateway."""
        return self.run.http().post(path, json=body)

    def openai(self, role: str) -> openai.OpenAI:
        """The official SDK on one role."""
        url, http = f"{self.run.gateway_url}/{role}/v1", httpx.Client(trust_env=False)
        self.run.opened.append(http)
        return openai.OpenAI(base_url=url, api_key=self.run.token, max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def serving(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with new_run(site, small(), tmp_path_factory.mktemp("serving"), fresh_name()) as run:
        yield Serving(run, run.up())


def test_the_document_of_launch_has_the_keys_of_the_contract(serving: Serving) -> None:
    document, run = serving.document, serving.run
    assert {
        "run",
        "attempt",
        "epoch",
        "state",
        "gateway_url",
        "token_file",
        "run_dir",
        "roles",
        "leases",
        "batch",
    } <= document.keys()
    assert (document["run"], document["attempt"], document["state"]) == (run.name, 1, "READY")
    assert document["run_dir"] == str(run.run_dir.path)
    assert document["gateway_url"] == run.gateway_url
    assert {role: document["leases"][role] for role in ROLES} == dict.fromkeys(ROLES, "ACTIVE")
    assert document["batch"] == {"id": None, "state": None}
    for role in ROLES:
        snapshot = from_json(document["roles"][role])
        assert snapshot.epoch == document["epoch"]
    assert {node["state"] for node in document["nodes"]} == {"UP"}


def test_the_run_directory_is_private(serving: Serving) -> None:
    folder = serving.run.run_dir.path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    open_to_others = [
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if not path.is_symlink() and path.stat().st_mode & 0o077 and path.parent == folder / "keys"
    ]
    assert open_to_others == []
    assert stat.S_IMODE(serving.run.run_dir.token_file.stat().st_mode) == 0o600


def test_every_role_publishes_schema_2(serving: Serving) -> None:
    http = serving.run.http()
    for role, count in (("rollout", 2), ("genrm", 1), ("teacher", 1)):
        snapshot = from_json(http.get(f"/{role}/engines").raise_for_status().json())
        assert snapshot.role == role
        (model,) = snapshot.models.values()
        assert len(model.engines) == count
        assert {engine.state for engine in model.engines} == {ReplicaState.READY}
        assert all(engine.direct_eligible and engine.generation == 1 for engine in model.engines)
        health = http.get(f"/{role}/health", params={"schema": 2}).json()
        assert health["ready"] is True, health


def test_schema_1_lists_the_same_heads(serving: Serving) -> None:
    http = serving.run.http()
    document = http.get("/rollout/engines", params={"schema": 1}).raise_for_status().json()
    assert document["total_engines"] == 2
    (group,) = document["models"]["policy"]["engine_groups"]
    assert sorted(group["engines"][0]) == ["rank", "status", "url"]


@pytest.mark.parametrize("role", ROLES)
def test_every_role_generates(serving: Serving, role: str) -> None:
    body = {"text": "12 + 30 = ", "sampling_params": {"max_new_tokens": 16}}
    answer = serving.ask(f"/{role}/generate", body).raise_for_status().json()
    assert answer["meta_info"]["completion_tokens"] >= 1
    if role == "rollout":
        assert answer["text"] == "42"


def test_the_judge_takes_messages(serving: Serving) -> None:
    messages = [{"role": "user", "content": "Reference: 42\nAnswer: 42\nIs the answer right?"}]
    answer = serving.ask("/genrm/generate", {"messages": messages, "sampling_params": {"temperature": 0}})
    assert set(answer.raise_for_status().json()) == {"response"}
    both = serving.ask("/genrm/generate", {"messages": messages, "text": "x"})
    assert both.status_code == 400, both.text


@pytest.mark.parametrize(("role", "model"), [("rollout", "policy"), ("genrm", "judge")])
def test_the_openai_sdk_works_unmodified(serving: Serving, role: str, model: str) -> None:
    client = serving.openai(role)
    assert [entry.id for entry in client.models.list()] == [model]
    messages: Any = [{"role": "user", "content": "What is 6 * 7?"}]
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32)
    assert whole.model == model
    said = whole.choices[0].message.content
    assert said
    chunks = list(
        client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=32, stream=True)
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == said
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}


def test_the_teacher_scores_a_given_sequence(serving: Serving) -> None:
    tokens = list(b"the quick brown fox")
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
    }
    info = serving.ask("/teacher/generate", body).raise_for_status().json()["meta_info"]
    assert info["prompt_tokens"] == len(tokens)
    rows = info["input_token_logprobs"]
    assert [row[1] for row in rows] == tokens
    assert rows[0][0] is None
    assert all(row[0] < 0 for row in rows[1:])
    assert [len(row) for row in info["input_top_logprobs"][1:]] == [3] * (len(tokens) - 1)
    assert info["output_token_logprobs"] == []


@pytest.mark.parametrize("token", [None, "wrong"])
def test_without_the_token_nothing_is_answered(serving: Serving, token: str | None) -> None:
    http = serving.run.http(token=False)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    for method, path in (
        ("POST", "/rollout/generate"),
        ("POST", "/genrm/v1/chat/completions"),
        ("GET", "/teacher/engines"),
        ("GET", "/rollout/v1/models"),
    ):
        answer = http.request(method, path, headers=headers)
        assert answer.status_code == 401, (path, answer.text)
        assert answer.json()["error"]["code"] == "unauthorized"
    assert http.get("/health").status_code == 200


def test_an_engine_is_not_reachable_around_the_gateway_without_its_key(serving: Serving) -> None:
    http = serving.run.http()
    model = http.get("/rollout/engines").json()["models"]["policy"]
    url = model["engines"][0]["base_url"]
    with httpx.Client(trust_env=False) as direct:
        body = {"text": "1+1", "sampling_params": {"max_new_tokens": 1}}
        assert direct.post(f"{url}/generate", json=body).status_code == 401
        key = {"Authorization": f"Bearer {serving.run.run_dir.engine_key_file.read_text().strip()}"}
        assert direct.post(f"{url}/generate", json=body, headers=key).status_code == 200
        assert direct.post(f"{url}/release_memory_occupation", json={}, headers=key).status_code in {403, 404}


def test_what_cannot_be_routed_is_a_400(serving: Serving) -> None:
    for path, body in (
        ("/rollout/generate", {"text": "1", "model": "nope"}),
        ("/teacher/generate", {"text": "1", "route_key": "nope"}),
        ("/genrm/v1/chat/completions", {"model": "nope", "messages": [{"role": "user", "content": "x"}]}),
        ("/rollout/generate", {"text": "1", "model": ""}),
    ):
        answer = serving.ask(path, body)
        assert answer.status_code == 400, (path, body, answer.text)
        assert {"message", "type", "code"} <= answer.json()["error"].keys()
    broken = serving.run.http().post("/rollout/generate", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert serving.run.http().get("/rollout/nowhere").status_code == 404


def test_status_top_and_logs(serving: Serving) -> None:
    run = serving.run
    document = run.call("status", "--json").json
    assert document["state"] == "READY"
    assert document["roles"].keys() == set(ROLES)
    top = run.call("top", "--once")
    assert top.rc == 0, top.said
    for words in (run.name, "READY", "policy/replica-1", "judge/replica-0", "teacher/replica-0"):
        assert words in top.out
    newest = run.call("logs", "--role", "rollout")
    assert newest.rc == 0, newest.said
    assert "policy_replica-0_w0" in newest.out
    assert run.call("logs", "--role", "nope").rc == 2
    waited = run.call("status", "--wait", "READY", "--timeout", "5", "--json")
    assert waited.rc == 0, waited.said


def test_a_second_launch_of_the_same_name_is_refused(serving: Serving) -> None:
    again = serving.run.launch("--json")
    assert again.rc == 2, again.said
    assert "exists already" in again.err
    assert f"relax-slurm stop {serving.run.name}" in again.err
    assert serving.run.run_dir.attempt == 1
    assert again.json["exit_code"] == 2


def test_the_sites_own_records_show_one_step_per_node(serving: Serving) -> None:
    site, run = serving.run.site, serving.run
    nodes = [node["node"] for node in serving.document["nodes"]]
    assert len(nodes) == 2
    if site.kind == "local":
        assert all(run.sidecar(node).alive for node in nodes)
        return
    assert site.steps() == sorted((f"sidecar-{node}", node) for node in nodes)
    assert len(site.jobs()) == 1
