"""What `launch` and `stop` say while they wait: one line per change, never the same twice."""

from __future__ import annotations

import time
from typing import Any, TextIO

from relax_slurm.slurm import explain
from relax_slurm.slurm.job import JobState, JobView


class Progress:
    """Lines on a stream, each with the seconds since the start."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._start = time.monotonic()
        self._last: dict[str, str] = {}

    def say(self, text: str) -> None:
        """One line, always."""
        self._stream.write(f"[{time.monotonic() - self._start:6.1f}s] {text}\n")
        self._stream.flush()

    def job(self, view: JobView) -> None:
        """The job's state, when it changed; for one that waits also what to do where waiting does not help."""
        reason = f" ({view.reason})" if view.reason and view.reason != view.state else ""
        advice = explain.pending(view.reason) if view.state is JobState.PENDING else None
        unknown = "; Slurm does not answer, asking again" if view.state is JobState.UNKNOWN else ""
        self._changed("job", f"job {view.state}{reason}{f': {advice}' if advice else ''}{unknown}")

    def state(self, state: dict[str, Any]) -> None:
        """Run, nodes and replicas, when they changed."""
        up = sum(node["state"] == "UP" for node in state["nodes"])
        text = f"{state['state']}: {up}/{len(state['nodes'])} nodes"
        counts: dict[str, int] = {}
        for replica in state["replicas"]:
            counts[replica["state"]] = counts.get(replica["state"], 0) + 1
        if counts:
            text += ", replicas " + ", ".join(f"{number} {name}" for name, number in sorted(counts.items()))
        self._changed("state", text)

    def _changed(self, key: str, text: str) -> None:
        if self._last.get(key) != text:
            self._last[key] = text
            self.say(text)
