"""What the real lane costs: `pytest -p tests.harness.engine_meter` ends with its time, its engines and their memory.

Looks every two seconds at the engine processes that this pytest has started, however far down. What several processes
share counts once (PSS).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sidecars.command_line import RUN_TAG, WORKER_TAG
from tests.harness.slurm_proc import Proc, processes

EVERY_SECONDS = 2.0


def pss_megabytes(pid: int) -> float:
    """Memory of a process, what it shares counted in parts; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


@dataclass(slots=True)
class Peaks:
    """The highest that was seen at one moment."""

    megabytes: float = 0.0
    engines: int = 0
    names: set[tuple[str, str, int]] = field(default_factory=set)
    """Run, worker and pid of the leader's session: one per engine that was started."""
    began: float = field(default_factory=time.monotonic)


_peaks = Peaks()


def _look(base: str) -> None:
    """Measure SGLang's processes whose run lives in our temporary folder, or that a test started by hand."""
    by_hand = f"test-{os.getpid()}-"
    found: set[tuple[str, str, int]] = set()
    megabytes = 0.0
    for process in processes():
        environ = process.environ()
        tag = environ.get(RUN_TAG, "")
        simulated = "RELAX_SIM_OPTIONS" in environ
        if not simulated and (tag.startswith(by_hand) or base in tag):
            megabytes += pss_megabytes(process.pid)
            if worker := environ.get(WORKER_TAG):
                found.add((tag, worker, _session(process)))
    _peaks.megabytes = max(_peaks.megabytes, megabytes)
    _peaks.engines = max(_peaks.engines, len(found))
    _peaks.names |= found


def _session(process: Proc) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


@pytest.fixture(scope="session", autouse=True)
def _engine_meter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = str(tmp_path_factory.getbasetemp())
    over = threading.Event()

    def watch() -> None:
        while not over.wait(EVERY_SECONDS):
            _look(base)

    thread = threading.Thread(target=watch, name="engine-meter", daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(30.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line."""
    terminalreporter.section("what it cost")
    terminalreporter.line(
        f"engines: {time.monotonic() - _peaks.began:.0f} s, {len(_peaks.names)} started, "
        f"at most {_peaks.engines} at once, {_peaks.megabytes / 1024:.1f} GB of memory at most"
    )
