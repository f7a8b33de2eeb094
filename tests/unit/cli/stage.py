"""Runs on disk and a backend that does what a test says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_slurm.config.load import load
from relax_slurm.control.backends import BackendKind
from relax_slurm.control.prepare import prepare
from relax_slurm.control.run_dir import RunDir
from relax_slurm.core.placement import plan as make_plan
from relax_slurm.slurm.job import JobRef, JobState, JobView
from relax_slurm.slurm.submit import Submission

RUN_FILE = """
name: demo
placement: decoupled
engine: {program: sim, startup_seconds: 5}
pools: {p: {nodes: 1, gpus_per_node: 2}}
roles: {rollout: {pool: p, models: {m: {model_path: x, gpus: 2}}}}
"""


class FakeBackend:
    """A backend whose job is in the state that `states` names next (the last one stays)."""

    def __init__(self, *states: JobState, reason: str = "") -> None:
        self.states = list(states) or [JobState.RUNNING]
        self.reason = reason
        self.polls = 0
        self.cancelled: list[str] = []
        self.submitted: list[Submission] = []
        self.refusal: Exception | None = None
        self.after_cancel = JobState.ENDED

    def submit(self, submission: Submission) -> JobRef:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append(submission)
        return JobRef("7")

    def poll(self, job: JobRef, budget_seconds: float | None = None) -> JobView:
        self.polls += 1
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return JobView(state, reason=self.reason)

    def cancel(self, job: JobRef, budget_seconds: float | None = None) -> None:
        self.cancelled.append(job.job_id)
        self.states = [self.after_cancel]


def run_file(tmp_path: Path, text: str = RUN_FILE) -> Path:
    """A run file on disk."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def prepared(root: Path, tmp_path: Path, job: dict[str, Any] | None = None) -> RunDir:
    """An attempt as `launch` leaves it."""
    config = load(run_file(tmp_path))
    run_dir, submission = prepare(root, config, make_plan(config, ephemeral=None), BackendKind.SLURM)
    body = {"backend": "slurm", "tag": submission.tag, "job_id": "7", "cluster": None} if job is None else job
    if body:
        run_dir.write_json("job.json", body)
    return run_dir


def state_of(run_dir: RunDir, state: str = "READY", **changes: Any) -> dict[str, Any]:
    """A state document, as a coordinator answers it."""
    engine = {"engine_id": "m/replica-0", "base_url": "http://h:1", "state": "READY", "direct_eligible": True}
    return {
        "run": run_dir.run,
        "attempt": run_dir.attempt,
        "epoch": "000001-abcdef",
        "state": state,
        "reason": "",
        "gateway_url": "http://h:29999",
        "token_file": str(run_dir.token_file),
        "run_dir": str(run_dir.path),
        "job_ids": ["7", "8"],
        "roles": {
            "rollout": {
                "topology_revision": 5,
                "models": {"m": {"state": "READY", "engines": [engine | {"generation": 1}]}},
            }
        },
        "leases": {"rollout": "ACTIVE"},
        "batch": {"id": None, "state": None},
        "nodes": [
            {
                "node": "p-0",
                "state": "UP",
                "heard_seconds_ago": 0.4,
                "workers": [
                    {"worker_id": "m/replica-0#0", "state": "up", "in_flight": 3, "memory_bytes": 3 << 30},
                ],
            },
            {"node": "p-1", "state": "AWAITED", "heard_seconds_ago": None, "workers": []},
        ],
        "replicas": [
            {
                "replica": "m/replica-0",
                "role": "rollout",
                "model": "m",
                "state": "READY",
                "generation": 1,
                "base_url": "http://h:1",
                "reason": "",
                "nodes": ["p-0"],
                "release_proven": False,
            },
            {
                "replica": "m/replica-1",
                "role": "rollout",
                "model": "m",
                "state": "STARTING",
                "generation": 1,
                "base_url": None,
                "reason": "",
                "nodes": ["p-1"],
                "release_proven": True,
            },
        ],
    } | changes
