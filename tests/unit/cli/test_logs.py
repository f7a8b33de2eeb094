"""`logs`: whose files they are, their last lines, and what is added while somebody looks."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from relax_slurm.__main__ import main
from relax_slurm.cli import logs as verb
from relax_slurm.control.run_dir import RunDir
from relax_slurm.slurm.job import JobState
from tests.unit.cli.stage import FakeBackend, prepared

FILES = {
    "head_coordinator": ["c1", "c2"],
    "head_gateway": ["g1"],
    "actor-0_sidecar": ["s1"],
    "actor-0_rollout_policy_replica-0_w0": ["r1", "r2", "r3"],
    "genrm-0_teacher_math_replica-0_w0": ["t1"],
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    made = prepared(tmp_path / "root", tmp_path)
    for name, lines in FILES.items():
        (made.logs / f"{name}.log").write_text("".join(f"{line}\n" for line in lines))
    return made


def test_all_and_by_role(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    for role, count in (("head", 3), ("sidecar", 1), ("rollout", 3), ("teacher", 1)):
        assert main(["logs", "--role", role]) == 0
        assert len(capsys.readouterr().out.splitlines()) == count, role
    assert main(["logs", "--role", "rollout", "--lines", "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "actor-0_rollout_policy_replica-0_w0: r2",
        "actor-0_rollout_policy_replica-0_w0: r3",
    ]
    assert main(["logs", "--lines", "0"]) == 0
    assert capsys.readouterr().out == ""


def test_json(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {Path(path).stem: lines for path, lines in document.items()} == FILES


def test_a_role_without_logs_names_those_that_have_some(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "--role", "genrm"]) == 2
    assert "there are head, rollout, sidecar, teacher" in capsys.readouterr().err


def test_follow_shows_new_lines_and_new_files_until_the_end(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        with (run_dir.logs / "head_coordinator.log").open("a") as stream:
            stream.write("half of ")
            stream.flush()
            time.sleep(0.4)
            stream.write("a line\nand more\n")
        (run_dir.logs / "actor-0_rollout_policy_replica-1_w0.log").write_bytes(b"n\xff1\n")
        run_dir.write_json("outcome.json", {"state": "STOPPED"})

    thread = threading.Thread(target=write)
    thread.start()
    assert main(["logs", "--follow", "--lines", "0"]) == 0
    thread.join()
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "actor-0_rollout_policy_replica-1_w0: n\ufffd1",
        "head_coordinator: and more",
        "head_coordinator: half of a line",
    ]


def test_follow_ends_with_a_job_that_left_no_outcome(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "JOB_SECONDS", 0.1)
    monkeypatch.setattr(verb, "backend_for", lambda kind, **_: FakeBackend(JobState.UNKNOWN, JobState.ENDED))
    assert main(["logs", "--follow"]) == 0
