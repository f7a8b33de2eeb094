"""What a router is told and what is published of it, with a router that does what a test says."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control import restarts, routers
from relax_slurm.control.router_api import Presence, RouterApi, RouterWorker
from relax_slurm.control.router_starter import NOT_INSTALLED
from relax_slurm.control.routers import ModelRouter, Routers
from relax_slurm.core.plan import Role, WorkerType
from relax_slurm.errors import EngineFailed, RelaxError, StartupFailed, UpstreamFailed
from relax_slurm.forward import Exchange, HttpServer, Upstream
from tests.unit.control.router_stage import KEY, FakeProgram, FakeRouter
from tests.unit.control.stage import run, until


def worker(number: int, generation: int = 1, kind: WorkerType = WorkerType.REGULAR) -> RouterWorker:
    port = 9000 if kind is WorkerType.PREFILL else None
    return RouterWorker(f"m/replica-{number}", f"http://node:{100 + number}", generation, kind, port)


class Kept:
    """A `ModelRouter` in front of a fake one, with what it said."""

    def __init__(self, program: FakeProgram) -> None:
        self.program = program
        self.urls: list[str | None] = []
        self.events: list[tuple[str, Any]] = []
        self.upstream = Upstream()
        self.router = ModelRouter(
            Role.ROLLOUT,
            program.as_program(),
            self.upstream,
            record=lambda event, **fields: self.events.append((event, fields.get("replica"))),
            changed=lambda router: self.urls.append(router.url),
            ports_taken=set(),
        )

    @property
    def fake(self) -> FakeRouter:
        return self.program.routers[-1]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("UP_POLL", 0.01), ("LOOK", 0.05), ("PASS", 0.01), ("AGAIN", 0.1)):
        monkeypatch.setattr(routers, f"{name}_SECONDS", seconds)
    monkeypatch.setattr(restarts, "PAUSE_SECONDS", (0.01, 0.02))


@asynccontextmanager
async def kept(monkeypatch: pytest.MonkeyPatch, **options: Any) -> AsyncIterator[Kept]:
    program = FakeProgram(**options)
    monkeypatch.setattr(routers, "url_of", lambda host, port: f"http://{host}:{program.port}")
    made = Kept(program)
    task = asyncio.create_task(made.router.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await made.upstream.close()


def test_an_engine_is_registered_published_and_removed_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            router = made.router
            await router.wait_answers(5.0)
            assert (router.url, router.complete) == (None, True)
            router.want(worker(0))
            assert not router.complete
            await router.wait_complete(5.0)
            assert router.url is not None
            assert router.registered == {"m/replica-0": "id-1"}
            router.want(worker(0))  # said again
            router.want(worker(1))
            await router.wait_complete(5.0)
            assert made.fake.urls() == ["http://node:100", "http://node:101"]
            router.unwant("m/replica-0")
            router.unwant("m/replica-9")
            await until(lambda: made.fake.urls() == ["http://node:101"])
            assert ("DELETE", "/workers/id-1") in made.fake.calls
            assert router.url is not None
            router.unwant("m/replica-1")
            assert router.url is None, "the URL goes before the engine does"
            await until(lambda: made.fake.urls() == [])
            assert made.urls == [made.urls[0], None]

    run(scenario)


def test_a_rebuilt_engine_at_the_same_url_is_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            made.router.want(worker(0))
            await made.router.wait_complete(5.0)
            made.router.unwant("m/replica-0")
            made.router.want(worker(0, generation=2))
            await made.router.wait_complete(5.0)
            assert made.router.registered == {"m/replica-0": "id-2"}
            assert list(made.fake.workers) == ["id-2"]

    run(scenario)


def test_a_registration_under_way_is_undone_when_it_comes_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            await made.router.wait_answers(5.0)
            made.fake.slow.add("http://node:100")
            made.router.want(worker(0))
            await until(lambda: made.fake.workers)
            with pytest.raises(StartupFailed, match=r"missing: m/replica-0"):
                await made.router.wait_complete(0.1)
            assert made.router.url is None
            made.router.unwant("m/replica-0")
            made.fake.slow.clear()
            await until(lambda: not made.fake.workers)
            assert made.router.registered == {}

    run(scenario)


def test_what_the_router_refuses_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            await made.router.wait_answers(5.0)
            made.fake.refuse.add("http://node:100")
            made.router.want(worker(0))
            await until(lambda: ("router_refused", "m/replica-0") in made.events)
            made.fake.refuse.clear()
            made.fake.workers.clear()
            await made.router.wait_complete(5.0)

    run(scenario)


def test_a_router_that_is_not_ready_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            made.router.want(worker(0))
            await made.router.wait_complete(5.0)
            made.fake.unhealthy = True
            await until(lambda: made.router.url is None)
            assert not made.router.complete
            made.fake.unhealthy = False
            await until(lambda: made.router.complete)

    run(scenario)


def test_prefill_and_decode_are_both_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch, disaggregated=True) as made:
            made.router.want(worker(0, kind=WorkerType.PREFILL))
            await until(lambda: made.router.registered)
            assert made.router.url is None
            made.router.want(worker(1, kind=WorkerType.DECODE))
            await made.router.wait_complete(5.0)
            ports = {body["worker_type"]: body.get("bootstrap_port") for body in made.fake.workers.values()}
            assert ports == {"prefill": 9000, "decode": None}

    run(scenario)


def test_a_router_that_ends_is_started_again_and_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            for number in range(3):
                made.router.want(worker(number))
            await made.router.wait_complete(5.0)
            made.program.processes[0].end(1)
            await until(lambda: made.router.url is None)
            await until(lambda: len(made.program.routers) == 2)
            await made.router.wait_complete(5.0)
            assert len(made.fake.urls()) == 3
            assert made.router.pid == made.program.processes[1].pid

    run(scenario)


def test_a_router_that_hangs_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_slurm.control.router_api.CALL_SECONDS", 0.05)

    async def scenario() -> None:
        async with kept(monkeypatch) as made:
            made.router.want(worker(0))
            await made.router.wait_complete(5.0)
            made.fake.mute = True
            await until(lambda: len(made.program.routers) == 2)
            await made.router.wait_complete(5.0)
            assert made.program.processes[0].returncode == -15

    run(scenario)


@pytest.mark.parametrize(("code", "error"), [(NOT_INSTALLED, StartupFailed), (1, EngineFailed)])
def test_a_router_that_cannot_be_kept_is_an_error(
    monkeypatch: pytest.MonkeyPatch, code: int, error: type[RelaxError]
) -> None:
    async def scenario() -> None:
        made = Kept(FakeProgram(code=code))
        monkeypatch.setattr(routers, "url_of", lambda host, port: f"http://{host}:{made.program.port}")
        with pytest.raises(error, match="sglang-router" if error is StartupFailed else "ended 6 times"):
            await made.router.run()
        assert len(made.program.processes) == (1 if error is StartupFailed else 6)
        assert made.program.asked == [set(), *({0} for _ in made.program.processes[1:])]
        await made.upstream.close()

    run(scenario)


def test_routers_of_a_run_are_found_settled_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        program = FakeProgram()
        monkeypatch.setattr(routers, "url_of", lambda host, port: f"http://{host}:{program.port}")
        all_of_them = Routers()
        assert all_of_them.complete
        all_of_them.start(
            {(Role.ROLLOUT, "m"): program.as_program()},
            record=lambda event, **fields: None,
            changed=lambda router: None,
            spawn=asyncio.create_task,
        )
        router = all_of_them.of(Role.ROLLOUT, "m")
        assert router is not None
        assert all_of_them.of(Role.GENRM, "m") is None
        router.want(worker(0))
        await all_of_them.settle(5.0, engines=False)
        await all_of_them.settle(5.0, engines=True)
        assert all_of_them.complete
        await all_of_them.stop()
        await all_of_them.stop()
        assert program.processes[0].returncode == -15

    run(scenario)


@pytest.mark.parametrize(
    ("document", "presence"),
    [
        ({"worker_type": "regular", "is_healthy": True}, Presence.PRESENT),
        ({"worker_type": "decode", "is_healthy": False, "job_status": {"status": "failed"}}, Presence.UNHEALTHY),
        ({"worker_type": "unknown", "job_status": {"status": "processing"}}, Presence.PENDING),
        ({"worker_type": "unknown", "job_status": {"status": "failed", "message": "no"}}, Presence.REFUSED),
        ({}, Presence.PENDING),
    ],
)
def test_what_the_router_says_of_a_worker(document: dict[str, Any], presence: Presence) -> None:
    async def scenario() -> None:
        def handle(exchange: Exchange) -> None:
            exchange.respond_json(200, document)

        server, upstream = HttpServer(handle), Upstream()
        port = await server.start()
        api = RouterApi(f"http://127.0.0.1:{port}", KEY, upstream)
        assert (await api.look("x")).presence is presence
        with pytest.raises(UpstreamFailed, match="wanted 202"):
            await api.add(worker(0))
        await api.remove("x")
        await upstream.close()
        await server.stop(0.0)

    run(scenario)


def test_the_starter_refuses_without_its_parent_or_the_package(tmp_path: Path) -> None:
    async def scenario() -> None:
        for parent, code in ((os.getpid(), NOT_INSTALLED), (1, 1)):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                str(Path(routers.__file__).with_name("router_starter.py")),
                str(parent),
                stderr=asyncio.subprocess.PIPE,
            )
            _, said = await process.communicate()
            assert process.returncode == code, said
            assert b"router_starter" in said

    run(scenario)
