"""Signals: the innermost sentence is said once, the code is that of the signal, and the old handler comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relax_slurm.cli.interrupted import Interrupted, exit_code, term_interrupts, told
from tests.unit.cli.stage import prepared


def test_term_is_an_interrupt_inside_only() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as caught, term_interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_code(caught.value) == 143
    assert exit_code(KeyboardInterrupt()) == 130
    assert signal.getsignal(signal.SIGTERM) == before


def test_other_threads_leave_signals_alone() -> None:
    seen: list[bool] = []

    def work() -> None:
        with term_interrupts():
            seen.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [True]


def test_the_innermost_sentence_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), told(lambda: "outer"), told(lambda: "inner"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "interrupted (SIGINT); inner\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_verb_that_waits_ends_with_a_sentence(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path, {"backend": "local", "tag": "x", "job_id": f"{os.getpid()}@1"})
    (run_dir.logs / "head_coordinator.log").write_text("a line\n")
    environ = os.environ | {"RELAX_RUNS_ROOT": str(tmp_path / "root"), "PYTHONUNBUFFERED": "1"}
    errors = tmp_path / "err"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "relax_slurm", "logs", "demo", "--follow"],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert "a line" in process.stdout.readline()
            process.send_signal(number)
            assert process.wait(60) == code
        finally:
            process.kill()
            process.communicate()
    assert errors.read_text().startswith(f"interrupted ({number.name})")
    assert "Traceback" not in errors.read_text()
