"""Says at the end how many schedules were run."""

from __future__ import annotations

from collections import Counter
from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Sums of what the tests counted, over all workers."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        counts.update({name: value for name, value in report.user_properties if isinstance(value, int)})
    if counts:
        first = ("schedules", "steps", "committed", "failed", "blocked", "recovered")
        sums = ", ".join(f"{counts[name]:,} {name}" for name in first)
        terminalreporter.write_line(f"chaos: {sums}")
