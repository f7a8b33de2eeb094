"""examples/trainer.py: consumers in several processes' stead, metrics, its turn on the GPUs, weights pushed."""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relax_slurm.workload.deferred import DeferredBatch, Scoring
from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
from relax_slurm.workload.validate import Expected
from tests.unit.workload.stage import FakeLifecycle, FixedReward, FixedTeacher, groups, sample

PATH = Path(__file__).resolve().parents[3] / "examples" / "trainer.py"


@pytest.fixture(scope="module")
def trainer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_trainer", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def make(lifecycle: FakeLifecycle, root: Path, number: int, made: Any) -> None:
    reward = FixedReward(lambda one: float(one.index % 2))
    scoring = Scoring(reward, None, FixedTeacher(), None, Expected(fields=frozenset({"teacher_log_probs"})))
    batch = DeferredBatch(number, lifecycle, scoring, SharedFilesystem(root), facts={"run": "r"})
    await batch.begin()
    await batch.complete(made)


def test_the_loop_is_closed(tmp_path: Path, trainer: ModuleType) -> None:
    async def body() -> None:
        lifecycle = FakeLifecycle()
        metrics: list[dict[str, Any]] = []
        pushed: list[tuple[str, str]] = []

        async def push(folder: Path, version: str) -> None:
            assert (folder / "weights.npz").exists()
            pushed.append((folder.name, version))

        training = asyncio.ensure_future(
            trainer.train(
                lifecycle,
                tmp_path / "p",
                count=2,
                checkpoints=tmp_path / "c",
                push=push,
                report=metrics.append,
                timeout_seconds=30.0,
            )
        )
        await make(lifecycle, tmp_path / "p", 0, groups())
        await make(lifecycle, tmp_path / "p", 1, groups(3))
        model = await asyncio.wait_for(training, 60)
        assert [one["samples"] for one in metrics] == [4, 6]
        assert [one["reward_mean"] for one in metrics] == [0.5, 0.5]
        assert [one["advantage_std"] for one in metrics] == pytest.approx([1.0, 1.0], abs=1e-4)
        assert metrics[0]["weight_versions"] == ["7"]
        assert metrics[0]["teacher_gap"] == pytest.approx(-0.25)
        assert pushed == [("step-0", "1"), ("step-1", "2")]
        assert lifecycle.calls.count("train") == lifecycle.calls.count("trained") == 2
        assert (model.weights != 0).any()

    asyncio.run(body())


def test_removed_samples_teach_nothing(tmp_path: Path, trainer: ModuleType) -> None:
    async def body() -> None:
        lifecycle = FakeLifecycle()
        await make(lifecycle, tmp_path, 0, [[sample(0, 0), sample(0, 1, remove_sample=True)]])
        metrics: list[dict[str, Any]] = []
        model = await trainer.train(lifecycle, tmp_path, report=metrics.append)
        assert metrics[0]["advantage_std"] == 0.0
        assert (model.weights == 0).all()

    asyncio.run(body())
