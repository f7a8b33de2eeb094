"""A hosted worker with a real simulated engine: start, doors, sleep, every way to end, and the races between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from relax_slurm.errors import ProtocolError, RecoveryRequired
from relax_slurm.forward import Upstream
from relax_slurm.wire.messages import WorkerState, WorkerStatus
from sidecars import hosted, proc
from sidecars.hosted import EngineExited, HostedWorker, HostSettings
from sidecars.process import find_tagged
from sidecars.sweep import leftovers
from tests.contract.engine_program import free_port, worker

KEY = "guard-key"
GENERATE = {"text": "1+1=", "sampling_params": {"max_new_tokens": 4}}


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


@dataclass
class Host:
    """One node's settings and what its workers told."""

    tmp: Path
    upstream: Upstream
    told: list[tuple[str, str]] = field(default_factory=list)
    workers: list[HostedWorker] = field(default_factory=list)

    def args(self, **changes: Any) -> dict[str, Any]:
        """The arguments of `start_worker`, as they come over the wire."""
        spec = worker(self.tmp, **changes).to_wire()
        guard = {"host": "127.0.0.1", "port": free_port(), "generation": 1}
        return {"worker_id": spec["worker_id"], "spec": spec, "guard": guard}

    @property
    def settings(self) -> HostSettings:
        return HostSettings(
            run_tag=f"hosted-{os.getpid()}-{self.tmp.name}",
            node="n1",
            logs=self.tmp,
            ledger=self.tmp / "ledger",
            guard_key=KEY,
            upstream=self.upstream,
        )

    def worker(self, args: dict[str, Any] | None = None, **changes: Any) -> HostedWorker:
        made = HostedWorker.from_args(
            args or self.args(**changes), self.settings, lambda w, event, detail: self.told.append((event, detail))
        )
        self.workers.append(made)
        return made


@asynccontextmanager
async def host(tmp: Path) -> AsyncIterator[Host]:
    made = Host(tmp, Upstream())
    try:
        yield made
    finally:
        for each in made.workers:
            await each.stop(0.0)
        await made.upstream.close()
        assert find_tagged(made.settings.run_tag) == []


def text(path: str) -> str:
    return Path(path).read_text(errors="replace")


async def ask(made: HostedWorker, path: str = "/generate", body: Any = GENERATE) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        answer = await client.post(f"{made.base_url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"})
        return answer.status_code


def test_from_start_to_end(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            assert made.status()["state"] == "starting"
            value = await made.start()
            assert value == {"base_url": made.base_url, "pid": made.engine.pid}
            assert await ask(made) == 503  # a guard starts closed
            assert made.open_admission() == {"base_url": made.base_url}
            assert await ask(made) == 200
            await made.look_at_memory()
            status = WorkerStatus.model_validate(made.status())
            assert (status.state, status.admission_open, status.generation) == ("up", True, 1)
            assert status.resident_tags == ["cuda_graph", "kv_cache", "weights"]
            assert status.memory_bytes
            assert leftovers(at.settings.run_tag, "n1", made.spec.worker_id)[0].pid == made.engine.pid
            await made.stop(1.0)
            assert made.status()["state"] == "exited"
            assert made.status()["resident_tags"] == []
            await made.look_at_memory()
            assert made.memory_bytes == 0
            assert at.told == []

    run(scenario)


def test_sleep_and_wake(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(role="teacher", weight_source="STATIC")
            await made.start()
            made.open_admission()
            assert (await made.close_admission(1.0)) == {"drained": 0, "cancelled": 0}
            outcome = await made.offload({"deadline_seconds": 20.0})
            assert outcome["result"] == "released"
            assert made.state is WorkerState.ASLEEP
            with pytest.raises(RecoveryRequired, match="wanted up"):
                made.open_admission()
            assert (await made.onload({"deadline_seconds": 20.0}))["result"] == "ready"
            assert made.state is WorkerState.UP
            assert await ask(made) == 503  # resident is not open: that is the coordinator's decision
            made.open_admission()
            assert await ask(made) == 200

    run(scenario)


def test_a_held_door_opens_again_without_a_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            await made.start()
            made.hold("nothing to hold yet")
            made.open_admission()
            made.hold("the head node is silent")
            assert await ask(made) == 503
            assert not made.status()["admission_open"]
            made.open_admission()
            assert await ask(made) == 200

    run(scenario)


def test_a_failed_start_is_an_exit_with_the_engines_own_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(sim={"faults": ["fail_start"]})
            with pytest.raises(EngineExited, match="injected fault fail_start") as caught:
                await made.start()
            assert caught.value.code == "exited"
            assert made.state is WorkerState.EXITED
            assert "injected fault fail_start" in made.detail
            assert at.told == []  # the result says it better than an event would

    run(scenario)


def test_a_start_without_end_is_ended(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(sim={"faults": ["hang_start"]}, startup_seconds=0.5)
            with pytest.raises(EngineExited, match=r"was not healthy within 0\.5 s"):
                await made.start()
            assert find_tagged(at.settings.run_tag) == []

    run(scenario)


def test_a_guard_port_that_is_taken_ends_the_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            first = at.worker()
            await first.start()
            args = at.args(worker_id="policy/replica-1#0", gpus=("2",), gpu_indexes=(2,))
            args["guard"]["port"] = int(str(first.base_url).rpartition(":")[2])
            second = at.worker(args)
            with pytest.raises(EngineExited, match="admission guard is not to be had"):
                await second.start()
            assert first.state is WorkerState.UP

    run(scenario)


def test_a_log_that_cannot_be_written_is_a_failed_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            os.mkdir(made.spec.log_path)
            with pytest.raises(EngineExited, match="file systems"):
                await made.start()
            assert made.state is WorkerState.EXITED

    run(scenario)


def test_an_engine_that_dies_is_reported_once_nothing_of_it_is_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            await made.start()
            made.open_admission()
            os.kill(made.engine.pid or 0, signal.SIGKILL)
            async with asyncio.timeout(10):
                while not at.told:
                    await asyncio.sleep(0.01)
            assert at.told[0][0] == "exited"
            assert "signal SIGKILL" in at.told[0][1]
            assert made.state is WorkerState.EXITED
            assert "signal SIGKILL" in made.status()["detail"]

    run(scenario)


QUICK = {"every_seconds": 0.05, "idle_seconds": 0.05, "answer_seconds": 1.0, "generate_seconds": 0}
PATIENT = {"mute_failed": 10_000, "stalled_suspect": 2, "stalled_failed": 10_000}
LONG = {"text": "1+1=", "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}}


async def told(at: Host, count: int) -> list[str]:
    """The names of what was told, once there are so many."""
    async with asyncio.timeout(40):
        while len(at.told) < count:
            await asyncio.sleep(0.01)
    return [event for event, _ in at.told]


def test_a_frozen_engine_is_suspect_and_comes_back(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(at.args() | {"health": QUICK | PATIENT})
            await made.start()
            made.open_admission()
            os.kill(made.engine.pid or 0, signal.SIGSTOP)
            assert await told(at, 1) == ["suspect"]
            assert made.status()["suspect"] is True
            assert (made.state, made.status()["admission_open"]) == (WorkerState.UP, True)
            assert await ask(made) == 503
            os.kill(made.engine.pid or 0, signal.SIGCONT)
            assert await told(at, 2) == ["suspect", "healthy"]
            assert made.status()["suspect"] is False
            assert await ask(made) == 200

    run(scenario)


def test_an_engine_that_stays_frozen_fails_and_who_waits_for_it_hears_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            budget = QUICK | {"mute_suspect": 1, "mute_failed": 3}
            made = at.worker(at.args(sim={"tokens_per_second": 100}) | {"health": budget})
            await made.start()
            made.open_admission()
            waiting = asyncio.create_task(ask(made, body=LONG))
            async with asyncio.timeout(20):
                while made.status()["in_flight"] == 0:
                    await asyncio.sleep(0.01)
            os.kill(made.engine.pid or 0, signal.SIGSTOP)
            assert await waiting == 502
            assert await told(at, 2) == ["suspect", "unhealthy"]
            assert made.state is WorkerState.FAILED
            assert "did not answer 3 looks" in made.detail
            await made.stop(30.0)  # a stopped process cannot end by itself, and nobody waits that it does
            assert made.state is WorkerState.EXITED

    run(scenario)


def test_an_engine_that_answers_and_makes_no_token_is_stalled(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            budget = QUICK | {"stalled_suspect": 2, "stalled_failed": 6}
            faults = [{"kind": "hang_generate", "value": 1}]
            made = at.worker(at.args(sim={"faults": faults}) | {"health": budget})
            await made.start()
            made.open_admission()
            assert await ask(made) == 502
            assert await told(at, 2) == ["suspect", "unhealthy"]
            assert "work did not move" in made.detail

    run(scenario)


def test_a_long_answer_that_comes_whole_is_no_stall(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            budget = QUICK | {"stalled_suspect": 2, "stalled_failed": 3}
            made = at.worker(at.args(sim={"tokens_per_second": 20}) | {"health": budget})
            await made.start()
            made.open_admission()
            body = {"text": "1+1=", "sampling_params": {"max_new_tokens": 30, "ignore_eos": True}}
            assert await ask(made, body=body) == 200
            assert at.told == []

    run(scenario)


def test_an_idle_engine_proves_that_it_can_generate(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            budget = QUICK | {"generate_seconds": 0.1, "stalled_suspect": 2, "stalled_failed": 4}
            faults = [{"kind": "hang_generate", "value": 2}]
            made = at.worker(at.args(sim={"faults": faults}) | {"health": budget | {"answer_seconds": 0.3}})
            await made.start()
            made.open_admission()
            assert await told(at, 2) == ["suspect", "unhealthy"]

    run(scenario)


def test_nothing_is_asked_while_it_sleeps_or_an_operation_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(at.args() | {"health": QUICK | {"generate_seconds": 0.01, "mute_failed": 3}})
            await made.start()
            asked: list[float] = []

            async def never(seconds: float = 0.0) -> bool:
                asked.append(seconds)
                return False

            await made.offload({"deadline_seconds": 20.0})
            monkeypatch.setattr(made.engine, "health", never)
            await asyncio.sleep(0.5)
            assert (asked, made.state, at.told) == ([], WorkerState.ASLEEP, [])
            with made.operation():
                await made.onload({"deadline_seconds": 20.0})
                await asyncio.sleep(0.3)
                assert asked == []
            assert (await told(at, 1))[0] == "suspect"

    run(scenario)


@pytest.mark.parametrize("after", [0.0, 0.001, 0.02, 0.2])
def test_a_stop_during_the_start_leaves_nothing(tmp_path: Path, after: float) -> None:
    """Whatever the start had just done: when `stop` returns, no process is left and none comes after it."""

    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(sim={"startup_seconds": 1.0})
            starting = asyncio.create_task(made.start())
            await asyncio.sleep(after)
            await made.stop(0.0)
            assert find_tagged(at.settings.run_tag) == []
            with pytest.raises(EngineExited):
                await starting
            assert find_tagged(at.settings.run_tag) == []
            assert made.state is WorkerState.EXITED

    run(scenario)


def test_an_engine_that_ignores_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "TERM_SECONDS", 0.2)

    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(sim={"faults": ["ignore_term"]})
            await made.start()
            await made.stop(0.0)
            assert proc.info(made.engine.pid or 0) is None

    run(scenario)


def test_an_end_that_cannot_be_confirmed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            await made.start()

            async def stuck(*_: Any) -> None:
                raise RecoveryRequired("pid 7 survives SIGKILL")

            with monkeypatch.context() as patch:
                patch.setattr(made.engine, "stop", stuck)
                with pytest.raises(RecoveryRequired, match="pid 7"):
                    await made.stop(0.0)
                assert made.state is WorkerState.UNCONFIRMED
                assert made.status()["detail"] == "pid 7 survives SIGKILL"
            await made.stop(0.0)
            assert made.state is WorkerState.EXITED

    run(scenario)


def test_memory_that_is_not_given_back_is_a_failure_and_no_release(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker(sim={"faults": ["stuck_release"]})
            await made.start()
            with pytest.raises(RecoveryRequired, match="still holds"):
                await made.offload({"deadline_seconds": 0.5})
            assert made.state is WorkerState.FAILED

    run(scenario)


def test_a_meter_that_fails_or_hangs_costs_the_number_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted, "MEASURE_SECONDS", 0.05)

    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            await made.start()
            (tmp_path / "ledger" / "n1.ledger.json").write_text("not a ledger")
            await made.look_at_memory()
            assert made.status()["memory_bytes"] is None
            (tmp_path / "ledger" / "n1.ledger.json").unlink()
            release = asyncio.Event()
            loop = asyncio.get_running_loop()

            def hang() -> dict[int, int]:
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
                return {0: 5, 1: 6}

            monkeypatch.setattr(made.tenancy, "measure", hang)
            await made.look_at_memory()
            await made.look_at_memory()  # not a second thread
            assert made.memory_bytes is None
            release.set()
            async with asyncio.timeout(5):
                while made.memory_bytes is None:
                    await asyncio.sleep(0.01)
            assert made.memory_bytes == 11

    run(scenario)


@pytest.mark.parametrize(
    "broken", [{}, {"spec": {}}, {"guard": {}}, {"spec": {}, "guard": {}}, {"spec": 1, "guard": 2}]
)
def test_arguments_that_make_no_sense_are_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            with pytest.raises(ProtocolError):
                HostedWorker.from_args(broken, at.settings, lambda *_: None)

    run(scenario)


def test_secrets_stay_out_of_sight(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with host(tmp_path) as at:
            made = at.worker()
            await made.start()
            assert made.spec.api_key
            assert made.spec.admin_key
            pid = made.engine.pid
            shown = repr(made.spec) + str(made.status())
            shown += text(f"/proc/{pid}/cmdline") + text(made.spec.log_path)
            for secret in (made.spec.api_key, made.spec.admin_key, KEY):
                assert secret not in shown

    run(scenario)
