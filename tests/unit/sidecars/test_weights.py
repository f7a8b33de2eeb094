"""Other weights for a simulated engine: the order of calls, and what is known after each way to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.core.engine_spec import OperationRefused
from relax_slurm.core.plan import Role, WeightSource
from relax_slurm.core.weights import GroupAction
from relax_slurm.errors import EngineFailed, UpstreamFailed
from sidecars.engine import SGLangEngine
from sidecars.weights import WeightChange
from tests.unit.sidecars.test_residency import Stage, stage

PART = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}


def order(source: str, payload: dict[str, Any], version: str = "2", **changes: Any) -> dict[str, Any]:
    return {
        "source": source,
        "payload": payload,
        "weight_version": version,
        "final": True,
        "deadline_seconds": 10.0,
        "drain_seconds": 0.0,
        **changes,
    }


def scenario(tmp_path: Path, work: Callable[[Stage], Coroutine[Any, Any, None]], **changes: Any) -> None:
    async def whole() -> None:
        async with stage(tmp_path, **{"weight_source": WeightSource.ACTOR, **changes}) as it:
            await work(it)

    asyncio.run(whole())


async def update(it: Stage, args: dict[str, Any]) -> tuple[str, str | None, str]:
    value = await WeightChange(it.engine, it.tenancy).run(args)
    return value["outcome"], value["weight_version"], value["reason"]


def test_a_checkpoint_is_loaded_by_a_closed_and_empty_engine(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        running = asyncio.create_task(it.request(it.engine._http._upstream))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert await update(it, order("disk", {"model_path": str(tmp_path)}, "0")) == ("updated", "0", "")
        assert await running == 200, "aborted with what it had"
        assert it.guard.calls == ["close", "open"], "open means: may be opened"
        assert (it.engine.paused, it.engine.weights_valid) == (False, True)
        # Again with another version; the engine's own name went with the path, which nobody outside sees.
        assert (await update(it, order("disk", {"model_path": str(tmp_path)}, "3")))[:2] == ("updated", "3")
        assert it.engine.served_model_name == str(tmp_path)

    scenario(tmp_path, work)


def test_a_checkpoint_that_is_not_there_leaves_the_old_weights(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        before = await it.engine.weight_version()
        outcome, version, reason = await update(it, order("disk", {"model_path": "/no/such"}))
        assert (outcome, version) == ("kept", before)
        assert "/no/such" in reason
        assert (it.engine.paused, it.engine.weights_valid) == (False, True)

    scenario(tmp_path, work)


def test_a_version_that_does_not_come_true_is_doubtful(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        outcome, _, reason = await update(it, order("disk", {"model_path": str(tmp_path)}))
        assert outcome == "doubtful"
        assert "wanted '2'" in reason
        assert (it.engine.paused, it.engine.weights_valid) == (True, False), "it is left as it is, to be ended"

    scenario(tmp_path, work, sim={"faults": [{"kind": "keep_version"}]})


def test_parts_keep_it_closed_until_the_last(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        await it.engine.change_group(
            GroupAction.INIT,
            {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2},
            5.0,
        )
        before = await it.engine.weight_version()
        assert await update(it, order("distributed", PART, final=False)) == ("taken", before, "")
        assert (it.engine.paused, it.engine.weights_valid) == (True, False)
        assert await update(it, order("distributed", PART)) == ("updated", "2", "")
        assert (it.engine.paused, it.engine.weights_valid) == (False, True)
        assert (await update(it, order("tensor", {"serialized_named_tensors": ["AAAA"]}, "4")))[:2] == ("updated", "4")
        await it.engine.change_group(GroupAction.DESTROY, {}, 5.0)
        with pytest.raises(EngineFailed, match="does not exist"):
            await it.engine.change_group(GroupAction.DESTROY, {}, 5.0)

    scenario(tmp_path, work)


def test_a_transfer_that_failed_may_have_left_parts(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        outcome, _, reason = await update(it, order("distributed", PART))
        assert outcome == "doubtful"
        assert "may hold parts" in reason

    scenario(tmp_path, work)


def test_an_engine_that_sleeps_is_not_touched(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        assert (await it.tenancy.offload(10.0)).ok
        calls = list(it.guard.calls)
        outcome, _, reason = await update(it, order("disk", {"model_path": str(tmp_path)}))
        assert outcome == "doubtful", "it is paused: nobody may take it for serving"
        assert "onload it first" in reason
        assert it.guard.calls == calls

    scenario(tmp_path, work)


def test_an_engine_that_ended_is_doubtful(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        await it.engine.stop(0.2, 10)
        assert (await update(it, order("disk", {"model_path": str(tmp_path)})))[0] == "doubtful"

    scenario(tmp_path, work)


def test_static_engines_refuse_before_anything_is_closed(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        for args in (
            order("disk", {"model_path": str(tmp_path)}),
            order("tensor", {"serialized_named_tensors": ["AAAA"]}),
            order("distributed", PART),
        ):
            with pytest.raises(OperationRefused, match="never change"):
                await update(it, args)
        with pytest.raises(OperationRefused, match="never change"):
            await it.engine.change_group(GroupAction.INIT, {}, 5.0)
        assert it.guard.calls == []

    scenario(tmp_path, work, role=Role.TEACHER, weight_source=WeightSource.STATIC)


class Cut:
    """An engine's HTTP that breaks on one path."""

    def __init__(self, inner: Any, path: str) -> None:
        self._inner, self._path = inner, path

    async def request(self, method: str, url: str, *rest: Any) -> Any:
        if url.endswith(self._path):
            raise UpstreamFailed("the connection broke")
        return await self._inner.request(method, url, *rest)


@pytest.mark.parametrize("path", ["/update_weights_from_disk", "/model_info"])
def test_a_connection_that_breaks_proves_nothing(tmp_path: Path, path: str) -> None:
    async def work(it: Stage) -> None:
        engine: SGLangEngine = it.engine
        engine._http._upstream = Cut(engine._http._upstream, path)
        outcome, _, reason = await update(it, order("disk", {"model_path": str(tmp_path)}))
        assert outcome == "doubtful"
        assert reason

    scenario(tmp_path, work)


def test_the_value_can_travel(tmp_path: Path) -> None:
    async def work(it: Stage) -> None:
        value = await WeightChange(it.engine, it.tenancy).run(order("disk", {"model_path": "/no/such"}))
        assert json.loads(json.dumps(value)) == value

    scenario(tmp_path, work)
