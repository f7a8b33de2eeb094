"""The run directory: private, whole files only, attempts, epochs, locks, and how a run is found."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.control.run_dir import (
    AlreadyRunning,
    RunDir,
    find,
    launch_lock,
    read_json,
    runs_root,
    why_not_writable,
    write_atomically,
)
from relax_slurm.errors import ConfigError, StartupFailed
from relax_slurm.wire.keys import read_pair, write_keys
from relax_slurm.wire.messages import PeerKind


def attempt(root: Path, run: str = "r") -> RunDir:
    run_dir = RunDir.create(root, run)
    write_keys(run_dir.keys)
    run_dir.write_secret(run_dir.token_file)
    run_dir.write_secret(run_dir.engine_key_file)
    for name in ("config.json", "plan.json"):
        write_atomically(run_dir.path / name, "{}\n")
    run_dir.make_latest()
    return run_dir


def test_everything_is_private(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir(mode=0o755)
    run_dir = attempt(tmp_path)
    run_dir.write_json("x.json", {"a": 1})
    run_dir.append_event({"event": "x"})
    for path in (tmp_path / "r").rglob("*"):
        if not path.is_symlink():
            assert path.stat().st_mode & 0o077 == 0, path
    assert (tmp_path / "r").stat().st_mode & 0o077 == 0
    assert run_dir.write_secret(run_dir.token_file) == run_dir.token_file.read_text().strip()


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigError, match="belongs to another user"):
        RunDir.create(tmp_path, "r")


def test_attempts_count_up_and_latest_is_the_one_that_is_complete(tmp_path: Path) -> None:
    first = attempt(tmp_path)
    second = RunDir.create(tmp_path, "r")
    assert (first.attempt, second.attempt) == (1, 2)
    assert find(tmp_path, "r") == first  # the second has nothing in it yet
    second.make_latest()
    assert (tmp_path / "r" / "latest").resolve() == second.path
    assert (first.run, second.run) == ("r", "r")
    assert first.tag != second.tag
    assert first.mark != second.mark


def test_two_launches_at_once_get_two_attempts(tmp_path: Path) -> None:
    made: list[int] = []
    threads = [threading.Thread(target=lambda: made.append(RunDir.create(tmp_path, "r").attempt)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 9))


def test_a_job_that_is_started_again_runs_in_a_new_attempt_with_the_same_secrets(tmp_path: Path) -> None:
    first = attempt(tmp_path)
    first.write_json("job.json", {"backend": "slurm", "job_id": "7"})
    first.write_json("endpoint.json", {"epoch": "x"})
    first.write_json("outcome.json", {"state": "STOPPED"})
    second = first.next_attempt()
    assert second.attempt == 2
    assert second.read("endpoint.json") is None
    assert second.read("outcome.json") is None
    for kind in PeerKind:
        assert read_pair(first.keys, kind) == read_pair(second.keys, kind)
    assert second.token_file.read_text() == first.token_file.read_text()
    assert all(path.stat().st_mode & 0o077 == 0 for path in second.path.rglob("*"))
    assert first.newest() == second
    assert second.newest() == second


def test_the_newest_attempt_of_another_job_is_another_run(tmp_path: Path) -> None:
    first = attempt(tmp_path)
    assert first.newest() == first
    first.write_json("job.json", {"backend": "slurm", "job_id": "7"})
    second = attempt(tmp_path)
    second.write_json("job.json", {"backend": "slurm", "job_id": "8"})
    assert first.newest() == first


def test_a_reader_sees_the_old_file_or_the_new_one_though_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_atomically(path, json.dumps({"n": -1, "fill": ""}))
    program = (
        "import sys, json; from pathlib import Path; from relax_slurm.control.run_dir import write_atomically\n"
        "n = 0\n"
        "while True:\n"
        "    write_atomically(Path(sys.argv[1]), json.dumps({'n': n, 'fill': 'x' * 200_000})); n += 1\n"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)])
        before = read_json(path)
        deadline = time.monotonic() + 20
        seen = 0
        while seen < 20 and time.monotonic() < deadline:
            value = read_json(path)
            assert value is not None
            seen += value != before
            before = value
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert read_json(path) is not None
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    with pytest.raises(StartupFailed, match=r"a\.json holds list"):
        read_json(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(StartupFailed, match=r"cannot read .*b\.json"):
        read_json(tmp_path / "b.json")
    assert read_json(tmp_path / "none.json") is None


def test_epochs_grow_over_all_attempts(tmp_path: Path) -> None:
    first, second = attempt(tmp_path), attempt(tmp_path)
    epochs = [first.next_epoch(), second.next_epoch(), first.next_epoch()]
    assert epochs == sorted(epochs)
    assert [epoch[:6] for epoch in epochs] == ["000001", "000002", "000003"]


@given(st.integers(1, 999_998))
def test_epochs_compare_as_text(number: int) -> None:
    assert f"{number:06d}-ffffff" < f"{number + 1:06d}-000000"


def test_one_coordinator_at_a_time(tmp_path: Path) -> None:
    run_dir = attempt(tmp_path)
    other = RunDir(run_dir.path).coordinator_lock()
    with run_dir.coordinator_lock(), pytest.raises(AlreadyRunning, match="another coordinator"), other:
        raise AssertionError("two at once")
    with run_dir.coordinator_lock():
        pass


def test_one_launch_of_a_name_at_a_time(tmp_path: Path) -> None:
    with launch_lock(tmp_path, "r"):
        with launch_lock(tmp_path, "other"):
            pass
        with pytest.raises(ConfigError, match="another launch of run 'r'"), launch_lock(tmp_path, "r"):
            raise AssertionError("two at once")
    with launch_lock(tmp_path, "r"):
        pass


def test_an_event_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    run_dir = attempt(tmp_path)
    (run_dir.path / "events.jsonl").mkdir()
    run_dir.append_event({"event": "x"})


def test_how_a_run_is_found(tmp_path: Path) -> None:
    old, _ = attempt(tmp_path, "old"), attempt(tmp_path, "new")
    assert find(tmp_path, "old") == old
    assert find(tmp_path, str(old.path)) == old
    assert find(tmp_path, f"{old.path.parent}/latest") == old
    with pytest.raises(ConfigError, match="known runs: new, old"):
        find(tmp_path, "other")
    with pytest.raises(ConfigError, match="no attempt's folder"):
        find(tmp_path, str(tmp_path / "old"))


def test_where_runs_are(tmp_path: Path) -> None:
    assert runs_root("/a", {"RELAX_RUNS_ROOT": "/b"}) == Path("/a")
    assert runs_root(None, {"RELAX_RUNS_ROOT": "/b"}) == Path("/b")
    assert runs_root(None, {}) == Path.home() / ".relax_slurm" / "runs"


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_found_out_and_an_outcome_that_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = attempt(tmp_path)
    assert why_not_writable(made.path) is None
    assert made.write_outcome({"state": "STOPPED"})
    monkeypatch.setattr(os, "fsync", full)
    assert why_not_writable(made.path) == (
        f"nothing can be written into {made.path} (No space left on device); free space there and launch again"
    )
    assert not made.write_outcome({"state": "FAILED"})
    assert "No space left on device" in caplog.text
    assert made.read("outcome.json") == {"state": "STOPPED"}
    assert not list(made.path.glob(".*"))
