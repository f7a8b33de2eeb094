"""Shared test settings: one hypothesis profile, the fixtures of the harness, what may be skipped, times by lane.

REQUIRE in the environment names the markers (`slurm`, `engine`, separated by commas) whose tests must run: one that
is skipped fails. `engine` is the whole demand: with it no test at all may be skipped, except for want of a Slurm that
is not named.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.harness.fixtures", "tests.harness.sites"]

# Two busy cores make wall-clock deadlines of single examples meaningless; the seed is fixed so that CI repeats itself.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

REQUIRABLE = frozenset({"slurm", "engine"})
_required = frozenset(os.environ.get("REQUIRE", "").replace(",", " ").split())
_seconds: dict[str, float] = defaultdict(float)
_tests: dict[str, set[str]] = defaultdict(set)


def pytest_configure() -> None:
    """A misspelt REQUIRE would require nothing."""
    if unknown := _required - REQUIRABLE:
        raise pytest.UsageError(
            f"REQUIRE names {', '.join(sorted(unknown))}; known are {', '.join(sorted(REQUIRABLE))}"
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A skipped test that is required has failed."""
    report = yield
    marks = {mark.name for mark in item.iter_markers()}
    needs = _required & marks
    if "engine" in _required and "slurm" not in marks:
        needs |= {"engine"}
    if report.skipped and needs:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"REQUIRE names {', '.join(sorted(needs))}, and this test was skipped: {why}"
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add set-up, call and tear-down of a test to its lane, the folder under tests/."""
    parts = report.nodeid.split("::", 1)[0].split("/")
    lane = parts[1] if len(parts) > 2 else "tests"
    _seconds[lane] += report.duration
    _tests[lane].add(report.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line per lane; with several workers the sum of what each of them spent."""
    if len(_seconds) > 1 or max(_seconds.values(), default=0.0) > 10:
        terminalreporter.section("lanes")
        for lane in sorted(_seconds):
            terminalreporter.line(f"{lane:12} {len(_tests[lane]):5} tests {_seconds[lane]:8.1f} s")
