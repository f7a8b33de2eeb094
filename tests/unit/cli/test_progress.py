"""Progress: one line per change, never the same twice."""

from __future__ import annotations

import io
import re

from relax_slurm.cli.progress import Progress
from relax_slurm.slurm.job import JobState, JobView


def test_only_changes_are_said() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.say("hello")
    progress.say("hello")
    for view in (
        JobView(JobState.PENDING, reason="Resources"),
        JobView(JobState.PENDING, reason="Resources"),
        JobView(JobState.PENDING, reason="Priority"),
        JobView(JobState.RUNNING),
    ):
        progress.job(view)
    state = {"state": "BOOTING", "nodes": [{"state": "AWAITED"}, {"state": "UP"}], "replicas": []}
    for replicas in ([], [], ["STARTING", "READY", "STARTING"]):
        progress.state(state | {"replicas": [{"state": name} for name in replicas]})
    lines = [re.sub(r"^\[ +\d+\.\ds\] ", "", line) for line in stream.getvalue().splitlines()]
    assert lines == [
        "hello",
        "hello",
        "job PENDING (Resources)",
        "job PENDING (Priority)",
        "job RUNNING",
        "BOOTING: 1/2 nodes",
        "BOOTING: 1/2 nodes, replicas 1 READY, 2 STARTING",
    ]
