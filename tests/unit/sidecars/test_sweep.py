"""What an earlier sidecar left is found by its tags, and nothing else is touched."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_slurm.errors import RecoveryRequired
from sidecars import proc, sweep


@contextmanager
def sleeper(run: str, node: str | None, worker: str = "w#0") -> Iterator[subprocess.Popen[bytes]]:
    env = os.environ | {"RELAX_RUN_TAG": run, "RELAX_WORKER_TAG": worker}
    if node is not None:
        env |= {sweep.NODE_TAG: node}
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], env=env, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def tag(tmp_path: Path) -> str:
    return f"sweep-{os.getpid()}-{tmp_path.name}"


def test_only_this_run_on_this_node(tmp_path: Path) -> None:
    run = tag(tmp_path)
    with (
        sleeper(run, "n1") as one,
        sleeper(run, "n1", "v#0") as two,
        sleeper(run, "n2") as beside,
        sleeper(f"{run}x", "n1") as other,
    ):
        assert asyncio.run(sweep.sweep(run, "n1")) == sorted([one.pid, two.pid])
        assert one.wait(5) == two.wait(5) == -9
        assert beside.poll() is other.poll() is None
        assert asyncio.run(sweep.sweep(run, "n1")) == []


def test_one_worker(tmp_path: Path) -> None:
    run = tag(tmp_path)
    with sleeper(run, "n1", "w#0") as mine, sleeper(run, "n1", "w#1") as other:
        assert asyncio.run(sweep.sweep(run, "n1", "w#0")) == [mine.pid]
        assert other.poll() is None


def test_what_survives_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tag(tmp_path)
    monkeypatch.setattr(sweep, "KILL_SECONDS", 0.2)
    monkeypatch.setattr(proc, "kill_exactly", lambda target: None)
    with sleeper(run, "n1") as child:
        began = time.monotonic()
        with pytest.raises(RecoveryRequired, match=str(child.pid)) as caught:
            asyncio.run(sweep.sweep(run, "n1"))
        assert caught.value.detail == {"pids": [child.pid]}
        assert time.monotonic() - began < 5
