"""`batch`: the run's files, an injected coordinator, one JSON document, progress beside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.__main__ import main
from relax_slurm.cli import batch as verb
from relax_slurm.config.load import load
from relax_slurm.control.backends import BackendKind
from relax_slurm.control.prepare import prepare
from relax_slurm.control.run_dir import RunDir
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.workload.publishers.reader import partitions
from tests.unit.workload.engines import TOKEN, engines
from tests.unit.workload.stage import FakeLifecycle

RUN_FILE = """
name: demo
placement: decoupled
engine: {program: sim}
pools: {p: {nodes: 1, gpus_per_node: 2}}
roles: {rollout: {pool: p, models: {m: {model_path: x, gpus: 2}}}}
batch: {batch_size: 2, n_samples_per_prompt: 2}
"""


class Closing(FakeLifecycle):
    """Knows that it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    path = tmp_path / "run.yaml"
    path.write_text(RUN_FILE)
    config = load(path)
    made, _ = prepare(tmp_path / "root", config, make_plan(config, ephemeral=None), BackendKind.LOCAL)
    made.write_json("job.json", {"backend": "local", "tag": "t", "job_id": "7", "cluster": None})
    made.token_file.write_text(TOKEN)
    return made


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"What is {n} + 25?", "label": str(n + 25)} for n in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def lifecycle(monkeypatch: pytest.MonkeyPatch) -> Closing:
    fake = Closing()

    async def lifecycle_of(run_dir: RunDir) -> Closing:
        return fake

    monkeypatch.setattr(verb, "lifecycle_of", lifecycle_of)
    return fake


def run_verb(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """`main` inside a loop that also serves engines and gateway: the verb's own loop runs in a thread."""

    async def body() -> int:
        async with engines(error_rate=0.0) as stage:
            run_dir.write_json("endpoint.json", {"gateway_url": stage.gateway_url})
            return await asyncio.to_thread(main, ["batch", *words])

    return asyncio.run(asyncio.wait_for(body(), 90))


def test_one_document_and_progress(
    run_dir: RunDir,
    prompts: Path,
    lifecycle: Closing,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_verb(run_dir, monkeypatch, "demo", str(prompts), "--json") == 0
    out, err = capsys.readouterr()
    summary: dict[str, Any] = json.loads(out)
    # three prompts, two per batch: the second batch takes the first prompt again
    assert (summary["batches"], summary["samples"], summary["reward_mean"]) == (2, 8, 1.0)
    assert summary["teacher_coverage"] == 0.0
    assert partitions(run_dir.path / "partitions") == ["train_0", "train_1"]
    assert "batch 1 committed (2 of 2)" in err
    assert lifecycle.closed
    assert lifecycle.state == {0: "COMMITTED", 1: "COMMITTED"}


def test_as_text_of_the_newest_run(
    run_dir: RunDir,
    prompts: Path,
    lifecycle: Closing,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_verb(run_dir, monkeypatch, str(prompts), "--batches", "1") == 0
    out = capsys.readouterr().out
    assert "1 batches committed, 4 samples in 2 groups" in out
    assert "reward mean 1.000" in out
    assert "partitions train_0 to train_0 in" in out


def test_a_failed_batch_is_one_sentence(
    run_dir: RunDir,
    prompts: Path,
    lifecycle: Closing,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lifecycle.broken["offload"] = RuntimeError("a fault")
    assert run_verb(run_dir, monkeypatch, "demo", str(prompts), "--json") == 9
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "not_released"
    assert "release unconfirmed" in err
    assert "Traceback" not in err
    assert lifecycle.closed


@pytest.mark.parametrize(
    ("words", "code", "match"),
    [
        (["demo", "nowhere.jsonl"], 2, "nowhere.jsonl: cannot be read"),
        (["demo", "PROMPTS", "--batches", "0"], 2, "--batches is 0"),
        (["other", "PROMPTS"], 2, "no run called 'other'"),
        (["demo", "PROMPTS"], 1, "has no gateway (yet)"),
    ],
)
def test_mistakes(
    run_dir: RunDir,
    prompts: Path,
    lifecycle: Closing,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    match: str,
) -> None:
    assert main(["batch", *(str(prompts) if word == "PROMPTS" else word for word in words)]) == code
    assert match in capsys.readouterr().err
    assert lifecycle.calls == []
