"""Commands by id: the same answer for the same id, in order per worker, urgent ones first, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import RecoveryRequired
from relax_slurm.wire.messages import IdReused
from sidecars.commands import CommandTable


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


class Work:
    """Does commands when told to, and remembers the order of beginnings and ends."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}
        self.held: set[str] = set()

    def hold(self, name: str) -> asyncio.Event:
        self.gates[name] = asyncio.Event()
        return self.gates[name]

    async def do(self, method: str, args: dict[str, Any]) -> dict[str, Any]:
        name = str(args.get("name", method))
        self.order.append(f"+{name}")
        if name in self.gates:
            await self.gates[name].wait()
        self.order.append(f"-{name}")
        if args.get("fails"):
            raise RecoveryRequired(f"{name} failed")
        return {"name": name}


def test_the_same_id_is_done_once_and_answered_every_time() -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable()
        args = {"worker_id": "w", "name": "a"}
        first, second = table.begin("1", "offload", args, work.do), table.begin("1", "offload", dict(args), work.do)
        assert await first == await second == {"name": "a"}
        assert await table.begin("1", "offload", args, work.do) == {"name": "a"}
        assert work.order == ["+a", "-a"]
        assert table.method_of("1") == "offload"
        assert table.method_of("2") is None

    run(scenario)


def test_a_failure_is_an_answer_too() -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable()
        args = {"worker_id": "w", "fails": True}
        for _ in range(2):
            with pytest.raises(RecoveryRequired):
                await table.begin("1", "offload", args, work.do)
        assert work.order == ["+offload", "-offload"]
        assert await table.begin("2", "onload", {"worker_id": "w"}, work.do)  # the next one is not held up

    run(scenario)


@pytest.mark.parametrize(("method", "args"), [("onload", {"worker_id": "w"}), ("offload", {"worker_id": "v"})])
def test_an_id_means_one_command(method: str, args: dict[str, Any]) -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable()
        await table.begin("1", "offload", {"worker_id": "w"}, work.do)
        with pytest.raises(IdReused) as caught:
            await table.begin("1", method, args, work.do)
        assert caught.value.code == "id_reused"
        assert len(work.order) == 2

    run(scenario)


def test_one_worker_in_order_others_side_by_side() -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable()
        gate = work.hold("a")
        tasks = [
            table.begin(str(number), "offload", {"worker_id": worker, "name": name}, work.do)
            for number, (worker, name) in enumerate([("w", "a"), ("w", "b"), ("v", "c")])
        ]
        await tasks[2]
        assert work.order == ["+a", "+c", "-c"]
        gate.set()
        await asyncio.gather(*tasks)
        assert work.order[3:] == ["-a", "+b", "-b"]

    run(scenario)


def test_a_stop_does_not_wait_but_what_follows_waits_for_everything_before() -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable()
        gate = work.hold("start")
        start = table.begin("1", "start_worker", {"worker_id": "w", "name": "start"}, work.do)
        await asyncio.sleep(0)
        await table.begin("2", "stop_worker", {"worker_id": "w", "name": "stop"}, work.do)
        again = table.begin("3", "start_worker", {"worker_id": "w", "name": "again"}, work.do)
        await asyncio.sleep(0.01)
        # The start that was overtaken still cleans up; a new one beside it could be cleaned away.
        assert work.order == ["+start", "+stop", "-stop"]
        gate.set()
        await asyncio.gather(start, again)
        assert work.order[3:] == ["-start", "+again", "-again"]

    run(scenario)


def test_results_are_bounded_and_what_runs_is_kept() -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable(kept=4)
        gate = work.hold("slow")
        slow = table.begin("slow", "start_worker", {"worker_id": "s", "name": "slow"}, work.do)
        for number in range(100):
            await table.begin(str(number), "offload", {"worker_id": "w"}, work.do)
        assert len(table._operations) == 4
        assert table.method_of("slow") == "start_worker"
        gate.set()
        assert await table.begin("slow", "start_worker", {"worker_id": "s", "name": "slow"}, work.do) == await slow
        assert table.method_of("99") == "offload"
        assert table.method_of("1") is None
        await asyncio.sleep(0)
        assert table._running == {}

    run(scenario)


@given(
    st.lists(st.tuples(st.sampled_from("wv"), st.sampled_from(["offload", "stop_worker"]), st.booleans()), max_size=12)
)
def test_order_holds_whatever_comes(script: list[tuple[str, str, bool]]) -> None:
    async def scenario() -> None:
        work, table = Work(), CommandTable(kept=3)
        tasks = []
        for number, (worker, method, fails) in enumerate(script):
            args = {"worker_id": worker, "name": f"{worker}{number}", "fails": fails}
            tasks.append(table.begin(f"o{number}", method, args, work.do))
            if number % 3 == 0:
                await asyncio.sleep(0)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(outcome, RecoveryRequired) for outcome in outcomes] == [fails for *_, fails in script]
        for number, (worker, method, _) in enumerate(script):
            if method == "stop_worker":
                continue
            began = work.order.index(f"+{worker}{number}")
            for earlier in range(number):
                if script[earlier][0] == worker:
                    assert work.order.index(f"-{worker}{earlier}") < began
        await asyncio.sleep(0)
        assert len(table._operations) <= 3

    run(scenario)
