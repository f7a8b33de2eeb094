"""Everything that can fail in a batch, once each, on a live run: what its user sees, and which GPUs stay fenced.

The table in docs/batches.md (What fails, and what stays) is this file in words.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.cli.common import ask
from relax_slurm.client.lifecycle import LifecycleClient
from relax_slurm.config.load import from_resolved
from relax_slurm.core.lifecycle_errors import BatchFailed, NotRecovered
from relax_slurm.core.placement_json import from_json
from relax_slurm.errors import UpstreamFailed
from relax_slurm.workload import run as workload_run
from relax_slurm.workload.failures import BatchNotMade
from relax_slurm.workload.making import Access, Scorers, scorers
from relax_slurm.workload.publishers.reader import partitions
from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
from relax_slurm.workload.run import Event, run_batches
from relax_slurm.workload.samples import Sample
from relax_slurm.workload.source import PromptSource
from relax_slurm.workload.training_batch import TrainingBatch
from tests.harness.launch import LaunchedRun
from tests.harness.sites import LOCAL, NewRun
from tests.harness.wait import until
from tests.integration.test_batches import deferred, written

pytestmark = pytest.mark.parametrize("site", [LOCAL], indirect=True)
ASLEEP = dict.fromkeys(("rollout", "genrm", "teacher", "training"), "SLEEPING")
TIMES = {"operation_seconds": 8, "drain_seconds": 1, "silence_seconds": 30, "bind_seconds": 40}


def up(new: NewRun, **changes: Any) -> LaunchedRun:
    """A run that batches are made on."""
    run = new(deferred(batch={"consumers": []}, control=TIMES, **changes))
    run.up()
    return run


def attempt(run: LaunchedRun, tmp_path: Path, **injected: Any) -> BatchNotMade:
    """Make one batch, which fails, while somebody waits for it; both hear the same."""
    run_dir = run.run_dir
    config = from_resolved((run_dir.path / "config.json").read_text(), "config.json")
    plan = from_json((run_dir.path / "plan.json").read_text())
    access = Access(run.gateway_url, run.token, run_dir.engine_key_file.read_text().strip())
    root = run_dir.path / "partitions"

    async def both() -> BatchNotMade:
        prompts = PromptSource.of(Path(written(tmp_path)))
        async with await LifecycleClient.of(run_dir.path) as lifecycle:
            waiting = asyncio.create_task(lifecycle.wait_committed(0, 120.0))
            with pytest.raises(BatchNotMade) as caught:
                await run_batches(lifecycle, config, plan, prompts, access, root, **injected)
            with pytest.raises(BatchFailed, match="batch 0"):
                await waiting
            with pytest.raises(BatchFailed, match="`recover` comes first"):
                await lifecycle.begin_batch(1)
            return caught.value

    error = asyncio.run(both())
    assert not root.exists() or partitions(root) == [], "nobody may read anything of it"
    return error


def leases(run: LaunchedRun) -> dict[str, str]:
    """As `status` tells them."""
    found: dict[str, str] = ask(run.run_dir, "get_state")["leases"]
    return found


def recovered(run: LaunchedRun) -> list[str]:
    """Recover, asking until the evidence suffices; what was missing before."""
    missing: list[str] = []

    async def once() -> bool:
        async with await LifecycleClient.of(run.run_dir.path) as lifecycle:
            try:
                await lifecycle.recover()
            except NotRecovered as error:
                missing.append(error.message)
                return False
            return True

    until(lambda: asyncio.run(once()), 60.0, lambda: f"recovered, last {missing[-1:]}{run.logs()}")
    assert leases(run) == ASLEEP
    return missing


def next_one(run: LaunchedRun, tmp_path: Path) -> None:
    """The run is as good as before."""
    done = run.call("batch", written(tmp_path), "--batches", "1", "--json", seconds=110)
    assert done.rc == 0, done.said + run.logs()
    assert done.json["samples"] == 16
    assert run.call("stop").rc == 0
    run.nothing_left()


class At:
    """Does something when a phase begins, once."""

    def __init__(self, phase: str, act: Callable[[], None]) -> None:
        self._phase, self._act = phase, act
        self.done = False

    def __call__(self, event: Event) -> None:
        """Part of `run_batches`: progress."""
        if event.phase == self._phase and not self.done:
            self.done = True
            self._act()


def test_scoring_fails(new: NewRun, tmp_path: Path) -> None:
    faults = [{"kind": "bad_json", "value": 1, "worker": "judge/*"}]
    run = up(new, engine={"sim": {"faults": faults}})
    done = run.call("batch", written(tmp_path), "--batches", "1", seconds=110)
    assert done.rc == 7, done.said
    assert done.err.strip().splitlines()[-1].startswith("error: batch 0 failed at genrm: "), done.err
    assert leases(run) == ASLEEP
    assert not (run.run_dir.path / "partitions").exists()
    again = run.call("batch", written(tmp_path), "--batches", "1")
    assert (again.rc, "`recover` comes first" in again.err) == (7, True)
    told = run.call("doctor")
    assert "BAD   batches: none begins: batch 0 failed at genrm: " in told.out, told.said
    healed = run.call("doctor", "--recover")
    assert (healed.rc, "nothing wrong was found" in healed.out) == (0, True), healed.said


def test_the_teachers_answer_has_a_wrong_shape(new: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        """One value too few for one sample."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def score(self, samples: Sequence[Sample]) -> None:
            await self.inner.score(samples)
            samples[3].teacher_log_probs = (samples[3].teacher_log_probs or [])[:-1]

    def short(*words: Any) -> Scorers:
        parts = scorers(*words)
        return replace(parts, scoring=replace(parts.scoring, teacher=Short(parts.scoring.teacher)))

    run = up(new)
    with monkeypatch.context() as patch:
        patch.setattr(workload_run, "scorers", short)
        error = attempt(run, tmp_path)
    assert (error.exit_code, error.code) == (7, "score_invalid")
    assert error.message.startswith("batch 0 failed at validate: ")
    assert leases(run) == ASLEEP
    assert recovered(run) == []
    next_one(run, tmp_path)


def test_publishing_fails(new: NewRun, tmp_path: Path) -> None:
    class Full(SharedFilesystem):
        """Everything is written, and then the disk is full."""

        async def publish(self, partition: str, batch: TrainingBatch) -> None:
            await super().publish(partition, batch)
            raise OSError(28, "No space left on device")

    run = up(new)
    error = attempt(run, tmp_path, publisher=Full(run.run_dir.path / "partitions"))
    assert (error.exit_code, error.code) == (7, "publish_failed")
    assert error.message == "batch 0 failed at publish: OSError: [Errno 28] No space left on device"
    assert leases(run) == ASLEEP
    assert recovered(run) == []
    next_one(run, tmp_path)


def test_the_finalizer_fails(new: NewRun, tmp_path: Path) -> None:
    run = up(new)
    root = run.run_dir.path / "partitions"
    seen: list[list[str]] = []

    def finalizer(*_: Any) -> None:
        seen.append(partitions(root))
        raise UpstreamFailed("the tracker is down")

    error = attempt(run, tmp_path, finalizer=finalizer)
    assert seen == [["train_0"]], "it was written by then"
    assert (error.exit_code, error.message) == (7, "batch 0 failed at finalize: the tracker is down")
    assert leases(run) == ASLEEP
    assert recovered(run) == []
    next_one(run, tmp_path)


@pytest.mark.parametrize(
    ("phase", "engine", "lease"),
    [("offload", "policy/replica-0", "rollout"), ("genrm_off", "judge/replica-0", "genrm")],
)
def test_an_offload_is_too_slow(new: NewRun, tmp_path: Path, phase: str, engine: str, lease: str) -> None:
    run = up(new)
    pid = run.worker(f"{engine}#0")["pid"]
    error = attempt(run, tmp_path, progress=At(phase, lambda: os.kill(pid, signal.SIGSTOP)))
    assert error.exit_code == 9, error.message
    assert error.message.startswith(f"batch 0 failed at {phase}: ")
    assert "release unconfirmed" in error.message
    assert leases(run) == ASLEEP | {lease: "ACTIVE" if lease == "rollout" else "BLOCKED"}
    # Nobody else gets the GPUs on the word of the book; the engine is ended, and its end is the evidence.
    recovered(run)
    next_one(run, tmp_path)


def test_a_late_answer_changes_nothing(new: NewRun, tmp_path: Path) -> None:
    run = up(new)
    sidecars = [run.sidecar(str(node["node"])) for node in (run.state() or {})["nodes"]]

    def freeze() -> None:
        for proc in sidecars:
            proc.send(signal.SIGSTOP)

    error = attempt(run, tmp_path, progress=At("genrm_off", freeze))
    assert error.exit_code == 9, error.message
    assert "did not end within 8 s" in error.message
    assert leases(run) == ASLEEP | {"genrm": "BLOCKED"}
    early = run.call("doctor", "--recover")
    assert (early.rc, "no release is proven of judge" in early.err) == (9, True), early.said
    for proc in sidecars:
        proc.send(signal.SIGCONT)
    until(
        lambda: all(row["state"] in ("SLEEPING", "GONE", "DEAD") for row in (run.state() or {})["replicas"]),
        60.0,
        lambda: f"{(run.state() or {})['replicas']}{run.logs()}",
    )
    assert leases(run) == ASLEEP | {"genrm": "BLOCKED"}, "the answer came, and nobody took it for a release"
    recovered(run)
    next_one(run, tmp_path)


def test_the_student_does_not_come_back(new: NewRun, tmp_path: Path) -> None:
    run = up(new, engine={"max_restarts": 0})
    pid = run.worker("policy/replica-1#0")["pid"]
    error = attempt(run, tmp_path, progress=At("student_on", lambda: os.kill(pid, signal.SIGKILL)))
    assert error.exit_code == 7, error.message
    assert error.message.startswith("batch 0 failed at student_on: ")
    assert leases(run) == ASLEEP, "its end is proven, and the other replica sleeps again"
    assert recovered(run) == []


def test_nobody_knows_whether_the_student_comes_back(new: NewRun, tmp_path: Path) -> None:
    run = up(new)
    pid = run.worker("policy/replica-1#0")["pid"]
    error = attempt(run, tmp_path, progress=At("student_on", lambda: os.kill(pid, signal.SIGSTOP)))
    assert error.exit_code == 9, error.message
    assert error.message.startswith("batch 0 failed at student_on: onload_rollout of batch 0 did not end within 8 s")
    assert "rollout is not released" in error.message
    assert leases(run) == ASLEEP | {"rollout": "ACTIVE"}
    recovered(run)
    next_one(run, tmp_path)
