"""Engines of the contract suite: simulated ones always, SGLang as well when the environment names one.

A real engine takes its time to start. So what leaves an engine as it found it shares one (`engine`), what changes
weights shares another (`updatable`), and only what kills, or needs other flags, gets its own (`start`). While such a
test runs, the engine of the next one is coming up: four at a time at most.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine_program import REAL, Launched, launch, spec_of, wait_ready

SLOW = {"tokens_per_second": 400}
"""Slow enough to be caught running."""
Shared = Callable[[str, str], Launched]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever uses an engine is asked of each program there is."""
    if "program" in metafunc.fixturenames:
        real = pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.timeout(900)])
        metafunc.parametrize("program", ["sim", real] if REAL else ["sim"])


_shared = contextlib.ExitStack()
_running: dict[tuple[str, str], Launched] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """The last test of this folder ends the shared engines: whatever comes next needs the memory for its own."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            end_engines()


@pytest.fixture(scope="session", autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Also when the run is broken off."""
    yield
    end_engines()


def end_engines() -> None:
    """End what no single test owns."""
    _running.clear()
    _shared.close()
    _spare.close()


PROGRAMS = ("sim", "sglang")


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many checks each program was asked, and how many it passed: the counts have to be equal."""
    for program in PROGRAMS:
        counts = {
            outcome: sum(
                program in re.split(r"[\[\]-]", report.nodeid) and "tests/contract/" in report.nodeid
                for report in terminalreporter.getreports(outcome)
                if report.when == "call" or outcome != "passed"
            )
            for outcome in ("passed", "failed", "skipped", "error")
        }
        if any(counts.values()):
            told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count)
            terminalreporter.write_line(f"contract checks of {program}: {told}")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Running engines by program and purpose; one that has died is replaced, so that it fails one test only."""

    def get(program: str, purpose: str) -> Launched:
        found = _running.get((program, purpose))
        if found is None or found.process.poll() is not None:
            folder = tmp_path_factory.mktemp(purpose)
            backup = {"enable_weights_cpu_backup": True}
            found = _shared.enter_context(launch(spec_of(program, folder, sim=SLOW, engine_args=backup)))
            _running[program, purpose] = found
        return found

    return get


@pytest.fixture
def engine(shared: Shared, program: str) -> Launched:
    """An engine that is left as it was found."""
    return shared(program, "plain")


@pytest.fixture
def updatable(shared: Shared, program: str) -> Launched:
    """An engine whose weights, and so whose served name, others have changed and will change."""
    return shared(program, "updatable")


class Spare:
    """One engine with the usual flags that is coming up for the test that will kill it."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._engine: Launched | None = None

    def begin(self, folder: Path) -> None:
        """Start it; nobody waits."""
        if self._engine is None:
            self._engine = self._stack.enter_context(launch(spec_of("sglang", folder), wait=False))

    def take(self) -> tuple[Launched, contextlib.ExitStack] | None:
        """The engine and what ends it, which are the caller's now; None when there is none."""
        if self._engine is None:
            return None
        engine, self._engine = self._engine, None
        return engine, self._stack.pop_all()

    def close(self) -> None:
        """End it unused."""
        self._engine = None
        self._stack.close()


_spare = Spare()


def usual(program: str, changes: dict[str, Any]) -> bool:
    """Whether SGLang is asked for with the usual flags; settings of the simulator are none of its."""
    return program == "sglang" and not changes.keys() - {"sim"}


def wanted_again(request: pytest.FixtureRequest) -> bool:
    """Whether a later test of this process starts an SGLang of its own."""
    items = request.session.items
    later = items[items.index(request.node) + 1 :]
    own = (item for item in later if "start" in getattr(item, "fixturenames", ()))
    return any(item.callspec.params.get("program") == "sglang" for item in own if hasattr(item, "callspec"))


@pytest.fixture
def start(
    program: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Launched]]:
    """Start an engine of one's own, to be killed or to have other flags."""
    with contextlib.ExitStack() as stack:

        def begin(**changes: Any) -> Launched:
            spare = _spare.take() if usual(program, changes) else None
            if spare is None:
                engine = stack.enter_context(launch(spec_of(program, tmp_path, **changes)))
            else:
                engine, end = spare
                stack.enter_context(end)
                wait_ready(engine)
            if program == "sglang" and wanted_again(request):
                _spare.begin(tmp_path_factory.mktemp("spare"))
            return engine

        yield begin
