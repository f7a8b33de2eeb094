"""`doctor`: findings as text and JSON, exit codes, what is said about a run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from relax_slurm.cli import doctor
from relax_slurm.errors import ConfigError, PlanRefused
from relax_slurm.slurm.site_check import Finding, Level
from tests.unit.cli.stage import RUN_FILE, prepared, run_file, state_of


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


@pytest.fixture
def recorded_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """scontrol that prints what a real Slurm printed; the other commands only have to be there."""
    recordings = Path(__file__).parents[1] / "slurm" / "recordings" / "24.11"
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sbatch", "srun", "squeue", "scancel", "scontrol"):
        (folder / name).write_text(f'#!/bin/sh\nexec /bin/cat {recordings}/scontrol-"$2".txt\n')
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("RELAX_CLUSTER_FILE", "none")
    return folder


def test_the_site_alone(recorded_site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.run(arguments("--site")) == 0
    shown = capsys.readouterr().out
    assert "note  partition main*: 4 nodes, 4 usable, 4 x gpu:h100:8" in shown
    assert shown.rstrip().endswith("to look at")


def test_a_run_file_that_can_never_start_here(
    recorded_site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run_file(tmp_path, RUN_FILE.replace("nodes: 1,", "nodes: 5,").replace("gpus: 2}", "gpus: 10}"))
    assert doctor.run(arguments(str(path), "--json")) == 4
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 4
    worst = [entry for entry in document["findings"] if entry["level"] == "bad"]
    assert worst[0]["what"] == "component 0 (p)"
    assert "wanted 5 nodes with 2 GPUs" in worst[0]["seen"]
    assert doctor.run(arguments(str(run_file(tmp_path)))) == 0


def test_mistakes_of_the_file_keep_their_own_exit_codes(recorded_site: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        doctor.run(arguments(str(tmp_path / "nope.yaml")))
    with pytest.raises(PlanRefused):
        doctor.run(arguments(str(run_file(tmp_path, RUN_FILE.replace("gpus: 2}", "gpus: 3}")))))


def test_a_run_that_serves(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "runs", tmp_path)
    found = doctor.of_run(state_of(run_dir))
    assert [(entry.level, entry.what) for entry in found] == [(Level.OK, "run"), (Level.WARN, "node p-1")]
    assert "nothing was heard of it yet" in found[1].seen


def test_a_run_that_failed_says_what_is_proven_and_what_to_do(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "runs", tmp_path)
    state = state_of(run_dir, "FAILED", error={"message": "policy ended with code 9"}, leases={"genrm": "BLOCKED"})
    state["replicas"][0] |= {"state": "FAILED", "reason": "exit code 9"}
    state["nodes"] = []
    found = {entry.what: entry for entry in doctor.of_run(state)}
    assert "starts the next attempt" in found["run"].advice
    assert found["error"].seen == "policy ended with code 9"
    assert "stay fenced" in found["lease of genrm"].advice
    assert found["replica m/replica-0"].seen == "FAILED: exit code 9; that its GPUs are free is not proven"
    shown = doctor.text(list(found.values()))
    assert shown.splitlines()[-1] == "4 bad, 0 to look at"


def test_nothing_wrong() -> None:
    assert doctor.text([Finding(Level.OK, "a", "b")]) == "ok    a: b\nnothing wrong was found"


def test_batches_that_cannot_begin_are_named_with_the_way_out(tmp_path: Path) -> None:
    state = state_of(
        prepared(tmp_path / "runs", tmp_path),
        lifecycle_failure="batch 3 failed at genrm: no",
        leases={"genrm": "BLOCKED"},
    )
    found = doctor.of_run(state)
    rows = {entry.what: entry for entry in found}
    assert rows["batches"].seen == "none begins: batch 3 failed at genrm: no"
    assert "--recover`" in (rows["batches"].advice or "")
    assert "--recover`" in (rows["lease of genrm"].advice or "")


@pytest.mark.parametrize("words", [(), ("configs/defer.yaml",)])
def test_recover_is_for_runs(words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--recover needs a run"):
        doctor.run(arguments("--recover", *words))
