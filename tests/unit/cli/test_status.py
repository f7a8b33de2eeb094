"""`status`: one look, or a wait that ends when the state can no longer come."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.__main__ import main
from relax_slurm.cli import status as verb
from relax_slurm.control.run_dir import RunDir
from tests.unit.cli.stage import prepared, state_of


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    return prepared(tmp_path / "root", tmp_path)


def answers(monkeypatch: pytest.MonkeyPatch, *states: dict[str, Any]) -> list[RunDir]:
    left, asked = list(states), []

    def look(run_dir: RunDir) -> dict[str, Any]:
        asked.append(run_dir)
        return left.pop(0) if len(left) > 1 else left[0]

    monkeypatch.setattr(verb, "state_of", look)
    monkeypatch.setattr(verb.time, "sleep", lambda _: None)
    return asked


def test_text_and_json(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers(monkeypatch, state_of(run_dir))
    assert main(["status"]) == 0
    assert "demo  attempt 1  READY" in capsys.readouterr().out
    assert main(["status", "demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "READY"


def test_a_wait_sees_its_state_and_a_gateway_to_use_it(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, state_of(run_dir, "STARTING"), state_of(run_dir, gateway_url=None), state_of(run_dir))
    assert main(["status", "--wait", "READY"]) == 0
    assert len(asked) == 3


@pytest.mark.parametrize("state", ["STOPPED", "FAILED", "JOB_GONE", "JOB_ENDED"])
def test_a_state_that_cannot_come_any_more(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    monkeypatch.setattr(verb, "OUTCOME_SECONDS", 0.1)
    answers(monkeypatch, state_of(run_dir, state, reason="so it is"))
    assert main(["status", "--wait", "READY"]) == 6
    assert f"is {state}, wanted READY; it will not get there any more (so it is)" in capsys.readouterr().err


@pytest.mark.parametrize("code", [2, 3, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("late", [False, True], ids=["with its outcome", "the outcome comes later"])
def test_a_run_that_failed_gives_its_own_code_and_reason(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int, late: bool
) -> None:
    ended = {"exit_code": code, "error": {"message": "model m has no replica left", "detail": {"rows": []}}}
    run_dir.write_json("outcome.json", ended)
    answers(monkeypatch, state_of(run_dir, "FAILED") | ({} if late else ended))
    assert main(["status", "--wait", "READY", "--json"]) == code
    out, err = capsys.readouterr()
    assert "run 'demo' is FAILED, wanted READY: model m has no replica left" in err
    assert json.loads(out)["exit_code"] == code


def test_term_is_143(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answers(monkeypatch, state_of(run_dir, "STARTING"))
    monkeypatch.setattr(verb.time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["status", "--wait", "READY"]) == 143
    assert "interrupted (SIGTERM); run demo is STARTING" in capsys.readouterr().err


def test_a_wait_has_an_end(
    run_dir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, state_of(run_dir, "STARTING"))
    assert main(["status", "--wait", "READY", "--timeout", "0"]) == 6
    assert "within 0 s" in capsys.readouterr().err


def test_a_wait_follows_a_job_that_is_started_again(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, state_of(run_dir, "STARTING"), state_of(run_dir))
    again = run_dir.next_attempt()
    assert main(["status", str(run_dir.path), "--wait", "READY"]) == 0
    assert asked == [run_dir, again]


def test_a_wait_goes_on_while_a_job_waits_to_run_again(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = state_of(run_dir, "JOB_PENDING", gateway_url=None, reason="requeued; attempt 1 ended with STOPPED")
    asked = answers(monkeypatch, waits, waits, state_of(run_dir))
    assert main(["status", "--wait", "READY"]) == 0
    assert len(asked) == 3
