"""`top`: once, as JSON, or until the run is over or somebody has seen enough."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.__main__ import main
from relax_slurm.cli import top as verb
from relax_slurm.control.run_dir import RunDir
from tests.unit.cli.stage import prepared, state_of


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))
    run_dir = prepared(tmp_path / "root", tmp_path)
    left: list[Any] = [state_of(run_dir)]

    def look(run_dir: RunDir) -> dict[str, Any]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, BaseException):
            raise answer
        return dict(answer)

    monkeypatch.setattr(verb, "state_of", look)
    monkeypatch.setattr(verb.time, "sleep", lambda _: None)
    return left


def test_once(looks: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once"]) == 0
    assert "m/replica-0" in capsys.readouterr().out
    assert main(["top", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "READY"


def test_until_the_run_is_over(looks: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    looks += [looks[0], looks[0] | {"state": "STOPPED"}]
    assert main(["top"]) == 0
    assert "attempt 1  STOPPED" in capsys.readouterr().out


def test_until_ctrl_c(looks: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    looks += [KeyboardInterrupt(), looks[0]]
    assert main(["top"]) == 130
    out, err = capsys.readouterr()
    assert "attempt 1  READY" in out
    assert "interrupted (SIGINT); run demo was READY and is left alone" in err
