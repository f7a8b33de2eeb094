"""Keys of engines that somebody else runs, and looks at one that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control.external import ExternalEngines, external_keys
from relax_slurm.control.external import _version as version_of
from relax_slurm.core.plan import InferencePlacementPlan, Role
from relax_slurm.core.snapshot import ReplicaState
from relax_slurm.errors import StartupFailed
from relax_slurm.forward import Exchange
from relax_slurm.forward.call import Response
from relax_slurm.forward.http import Headers
from relax_slurm.forward.server import HttpServer
from tests.unit.control.stage import config_of, plan_of, run, until

ENGINE = (Role.TEACHER, "math/external-0")


def plan_with(url: str, **engine: Any) -> InferencePlacementPlan:
    rollout = {"pool": "p", "models": {"m": {"model_path": "sim/m", "gpus": 4}}}
    teacher = {"models": {"math": {"external": [{"url": url, **engine}]}}}
    return plan_of(config_of(roles={"rollout": rollout, "teacher": teacher}))


def test_a_key_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret\n")
    assert external_keys(plan_with("http://x"), {}) == {}
    assert external_keys(plan_with("http://x", api_key_env="THEIRS"), {"THEIRS": "secret"}) == {ENGINE: "secret"}
    assert external_keys(plan_with("http://x", api_key_file=str(path)), {}) == {ENGINE: "secret"}


@pytest.mark.parametrize("value", ["", "two words", "line\nbreak", "naïve"])
def test_a_key_that_is_none_is_named_and_not_shown(tmp_path: Path, value: str) -> None:
    path = tmp_path / "key"
    path.write_text(value)
    for plan, place in (
        (plan_with("http://x", api_key_env="THEIRS"), "variable THEIRS"),
        (plan_with("http://x", api_key_file=str(path)), f"file {path}"),
    ):
        with pytest.raises(StartupFailed, match="math/external-0") as failed:
            external_keys(plan, {"THEIRS": value})
        assert place in failed.value.message
        assert not value or value not in failed.value.message
    with pytest.raises(StartupFailed, match="cannot be read"):
        external_keys(plan_with("http://x", api_key_file=str(tmp_path / "none")), {})


class Head:
    """An engine's head that answers as it is told."""

    def __init__(self) -> None:
        self.status = {"/health": 200, "/model_info": 200}
        self.asked: list[tuple[str, str, str | None]] = []
        self.server = HttpServer(self._handle)

    def _handle(self, exchange: Exchange) -> None:
        request = exchange.request
        key = request.headers.get(b"authorization")
        self.asked.append((request.method, request.path, None if key is None else key.decode()))
        exchange.respond_json(self.status.get(request.path, 404), {"weight_version": "7"})


def test_looks_are_gets_of_two_paths_with_their_key(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("secret")

    async def scenario() -> None:
        head = Head()
        url = f"http://127.0.0.1:{await head.server.start('127.0.0.1')}"
        published: list[ReplicaState] = []
        tasks: list[asyncio.Task[None]] = []

        def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
            tasks.append(asyncio.get_running_loop().create_task(work))
            return tasks[-1]

        engines = ExternalEngines(
            plan_with(url, api_key_file=str(path)),
            seconds=0.02,
            publish=lambda role: published.append(engines.entry(role, "math").state),
            record=lambda event, /, **fields: None,
            spawn=spawn,
        )
        try:
            await engines.start()
            assert engines.complete
            head.status["/health"] = 503
            await until(lambda: not engines.complete)
            (row,) = engines.rows()
            assert "answered 503" in row["reason"]
            head.status["/health"] = 200
            await until(lambda: engines.complete)
            head.status["/model_info"] = 401
            await until(lambda: not engines.complete)
            assert "does not accept its api key" in engines.rows()[0]["reason"]
            head.status["/model_info"] = 404  # neither spelling: no SGLang, but healthy
            await until(lambda: engines.complete)
            assert engines.rows()[0]["generation"] == 3
        finally:
            await engines.stop()
            await head.server.stop(0.1)
        assert published == [ReplicaState.READY, ReplicaState.FAILED] * 2 + [ReplicaState.READY]
        paths = {path for _, path, _ in head.asked}
        assert paths == {"/health", "/model_info", "/get_model_info"}
        assert {(method, key) for method, _, key in head.asked} == {("GET", "Bearer secret")}
        assert all(task.done() for task in tasks)

    run(scenario)


def test_without_external_engines_nothing_is_looked_at() -> None:
    async def scenario() -> None:
        def never(*_: Any, **__: Any) -> Any:
            raise AssertionError

        engines = ExternalEngines(plan_of(config_of()), seconds=1.0, publish=never, record=never, spawn=never)
        await engines.start()
        assert (engines.complete, engines.rows()) == (True, [])
        await engines.stop()

    run(scenario)


@pytest.mark.parametrize(
    ("body", "version"),
    [
        (b'{"weight_version": "7"}', "7"),
        (b"[" * 200_000, None),
        (b'{"weight_version": "\\ud800x"}', None),
        (b'{"weight_version": "a\\u0000b"}', None),
        (b"1" * 10_000, None),
        (b"NaN", None),
        (b"\xff", None),
    ],
)
def test_whatever_it_says_of_itself_ends_nothing(body: bytes, version: str | None) -> None:
    assert version_of(Response(200, Headers(()), body)) == version
