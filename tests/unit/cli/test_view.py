"""The state document as text, of every stage of a run."""

from __future__ import annotations

from pathlib import Path

from relax_slurm.cli.view import view
from tests.unit.cli.stage import prepared, state_of


def test_everything_is_there(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    text = view(state_of(run_dir, reason="a replica is missing", error={"message": "broken"}))
    for part in (
        "demo  attempt 1  READY  job 7 (2 components: 7, 8)  epoch 000001-abcdef",
        "reason   a replica is missing",
        "error    broken",
        "gateway  http://h:29999",
        "rollout  ACTIVE  m      READY  1/1    5",
        "m/replica-0  rollout  READY     1    3          3.0G    p-0    http://h:1",
        "m/replica-1  rollout  STARTING  1    -          -       p-1    -",
        "p-0   UP       0.4s ago  m/replica-0#0 up",
        "p-1   AWAITED  -",
    ):
        assert part in text, text


def test_a_run_that_has_nothing_yet(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    empty = state_of(run_dir, "JOB_PENDING", nodes=[], replicas=[], roles={}, gateway_url=None, epoch=None)
    del empty["job_ids"]
    assert view(empty) == f"demo  attempt 1  JOB_PENDING  epoch -\nfiles    {run_dir.path}"


def test_a_thousand_nodes_are_cut_and_counted(tmp_path: Path) -> None:
    run_dir = prepared(tmp_path / "root", tmp_path)
    nodes = [{"node": f"n{number}", "state": "UP", "heard_seconds_ago": 0.1, "workers": []} for number in range(1000)]
    text = view(state_of(run_dir, nodes=nodes))
    assert "and 936 more rows" in text
    assert len(text.splitlines()) < 100
