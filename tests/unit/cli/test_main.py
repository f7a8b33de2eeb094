"""The edge to the user: verbs, exit codes, one sentence, no traceback unless asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.__main__ import VERBS, main
from relax_slurm.cli import status
from relax_slurm.errors import RecoveryRequired


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAX_RUNS_ROOT", str(tmp_path / "root"))


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(args: Any) -> int:
        raise error

    monkeypatch.setattr(status, "run", run)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("relax-slurm 0.")
    assert main(["--help"]) == 0
    assert "launch" in capsys.readouterr().out
    assert main([]) == 2


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lanuch"]) == 2
    assert "did you mean 'launch'?" in capsys.readouterr().err
    assert main(["lanuch", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["exit_code"] == 2


@pytest.mark.parametrize("verb", ["drain", "doctor", "bench"])
def test_what_is_not_built_names_its_row(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb in VERBS
    assert main([verb]) == 1
    assert "is not built in this version (" in capsys.readouterr().err


def test_errors_are_sentences_with_their_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, RecoveryRequired("node n1: in doubt"))
    assert main(["status"]) == 9
    assert capsys.readouterr().err == "error: node n1: in doubt\n"
    with pytest.raises(RecoveryRequired):
        main(["status", "--debug"])


@pytest.mark.parametrize("fault", [KeyError("x"), PermissionError(13, "denied", "/runs"), ValueError("odd")])
def test_a_fault_of_ours_is_a_sentence_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: Exception
) -> None:
    failing(monkeypatch, fault)
    assert main(["status", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["code"] == "internal"
    assert type(fault).__name__ in err
    assert "--debug shows where" in err
    assert "Traceback" not in err
    with pytest.raises(type(fault)):
        main(["status", "--debug"])


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["status"]) == 130


def test_a_reader_that_has_gone_is_no_error(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from relax_slurm.cli import status\n"
        "def run(args):\n"
        "    for _ in range(100_000): print('x' * 100)\n"
        "    return 0\n"
        "status.run = run\n"
        "from relax_slurm.__main__ import main\n"
        "sys.exit(main(['status']))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.wait(20) == 0
    assert child.stderr.read() == b""
    child.stderr.close()


def test_a_signal_is_its_exit_code(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from relax_slurm.cli import status\n"
        "def run(args):\n"
        "    print('here', flush=True); time.sleep(60); return 0\n"
        "status.run = run\n"
        "from relax_slurm.__main__ import main\n"
        "sys.exit(main(['status']))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=os.environ)
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    child.stdout.close()
