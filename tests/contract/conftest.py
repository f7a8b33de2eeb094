"""Engines of the contract suite: simulated ones always, SGLang as well when the environment names one.

A real engine takes its time to start. So what leaves an engine as it found it shares one (`engine`), what changes
weights shares another (`updatable`), and only what kills, or needs other flags, starts its own (`start`): three at a
time at most.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest

from tests.contract.engine_program import REAL, Launched, launch, spec_of

SLOW = {"tokens_per_second": 400}
"""Slow enough to be caught running."""
Shared = Callable[[str, str], Launched]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Whatever uses an engine is asked of each program there is."""
    if "program" in metafunc.fixturenames:
        real = pytest.param("sglang", marks=[pytest.mark.engine, pytest.mark.timeout(600)])
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
            _running.clear()
            _shared.close()


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """Running engines by program and purpose; one that has died is replaced, so that it fails one test only."""

    def get(program: str, purpose: str) -> Launched:
        found = _running.get((program, purpose))
        if found is None or found.process.poll() is not None:
            folder = tmp_path_factory.mktemp(purpose)
            backup = {"enable_weights_cpu_backup": True}
            found = _shared.enter_context(launch(spec_of(program, folder, sim=SLOW, engine_args=backup)))
            _running[program, purpose] = found
        return found

    yield get
    _shared.close()


@pytest.fixture
def engine(shared: Shared, program: str) -> Launched:
    """An engine that is left as it was found."""
    return shared(program, "plain")


@pytest.fixture
def updatable(shared: Shared, program: str) -> Launched:
    """An engine whose weights, and so whose served name, others have changed and will change."""
    return shared(program, "updatable")


@pytest.fixture
def start(program: str, tmp_path: Any) -> Iterator[Callable[..., Launched]]:
    """Start an engine of one's own, to be killed or to have other flags."""
    with contextlib.ExitStack() as stack:

        def begin(**changes: Any) -> Launched:
            return stack.enter_context(launch(spec_of(program, tmp_path, **changes)))

        yield begin
