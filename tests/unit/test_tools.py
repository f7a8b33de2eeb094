"""The scripts behind make: what they count, what they refuse, and that an interrupted tour leaves nothing."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASK = runpy.run_path(str(ROOT / "tools" / "ask_rollout.py"))
TOUR = runpy.run_path(str(ROOT / "tools" / "quickstart.py"))
PROMPTS = runpy.run_path(str(ROOT / "tools" / "reasoning_gym_prompts.py"))


@pytest.mark.parametrize(
    ("status", "body", "label", "wanted"),
    [
        (200, {"text": "the answer is 7.140"}, "7.14", "correct"),
        (200, {"text": "-4"}, "-4", "correct"),
        (200, {"text": "4"}, "-4", "wrong"),
        (200, {"text": "yes"}, " yes ", "correct"),
        (200, {"text": ""}, "3", "wrong"),
        (200, {"text": "3"}, None, "unlabelled"),
        (200, [], "3", "200 without text"),
        (503, None, "3", "status 503"),
    ],
)
def test_verdicts(status: int, body: Any, label: str | None, wanted: str) -> None:
    assert ASK["verdict"](status, body, label) == wanted


def test_every_prompt_is_accounted_for() -> None:
    counts = Counter({"correct": 3, "wrong": 1, "status 503": 2})
    document = ASK["summary"](counts.copy(), 6, 0.5)
    assert (document["ok"], document["errors"]) == (4, {"status 503": 2})
    with pytest.raises(AssertionError):
        ASK["summary"](counts, 7, 0.5)


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 + 1 ="}\n\n{"question": "?"}\n')
    with pytest.raises(ValueError, match="line 3"):
        ASK["read"](file)


def test_prompts_repeat_themselves(tmp_path: Path) -> None:
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file in files:
        assert PROMPTS["main"]([str(file), "--count", "10", "--seed", "3"]) == 0
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert files[0].read_text() == files[1].read_text()
    assert len(rows) == 10
    assert all(row.keys() == {"prompt", "label"} for row in rows)


def test_an_old_python_is_refused_in_one_sentence(tmp_path: Path) -> None:
    # A copy, so that a mistake in the script could not touch this checkout's environment.
    for name in ("tools", "Makefile", "pyproject.toml"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    command = ["make", "-C", str(tmp_path), "quickstart", f"PYTHON={python}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [f"error: PYTHON={python} is missing, wanted Python 3.11 or newer; name another one"]
    assert not (tmp_path / ".venv").exists()


def test_an_engine_that_there_is_not_is_refused() -> None:
    done = subprocess.run(
        ["bash", "tools/quickstart.sh"],
        cwd=ROOT,
        env={**os.environ, "ENGINE": "vllm"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 2
    assert "wanted sim or sglang" in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_interrupted_tour_leaves_nothing(tmp_path: Path) -> None:
    # The tour finds its folders from its own path, so that a linked checkout has runs of its own.
    (tmp_path / "tools").mkdir()
    for name in ("relax_slurm", "sidecars", "configs", "sbatch"):
        (tmp_path / name).symlink_to(ROOT / name)
    script = Path(shutil.copy(ROOT / "tools" / "quickstart.py", tmp_path / "tools"))
    with (tmp_path / "out").open("wb") as output:
        tour = subprocess.Popen([sys.executable, str(script)], stdout=output, stderr=output)
    try:
        attempt = tmp_path / ".quickstart" / "runs" / "quickstart" / "attempt_1"
        deadline = time.monotonic() + 60
        while not (attempt / "bound.json").exists():
            assert tour.poll() is None, (tmp_path / "out").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert TOUR["processes_of"](attempt)
        tour.send_signal(signal.SIGTERM)
        assert tour.wait(60) == 128 + signal.SIGTERM, (tmp_path / "out").read_text()
        assert TOUR["processes_of"](attempt) == []
    finally:
        tour.kill()
        tour.wait()


def test_a_timeline_of_leases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lease(holder: str, before: str, after: str, at: float) -> dict[str, Any]:
        return {"event": "lease", "holder": holder, "before": before, "after": after, "time": at}

    lines = [
        {"event": "batch", "holder": "batch", "before": "none", "after": "0 PENDING", "time": 10.0},
        lease("rollout", "SLEEPING", "ACTIVE", 10.0),
        {"event": "moved", "holder": "rollout", "move": "onload", "seconds": 0.25, "time": 10.25},
        lease("rollout", "ACTIVE", "SLEEPING", 12.0),
        lease("genrm", "SLEEPING", "ONLOADING", 12.5),
        lease("genrm", "ONLOADING", "BLOCKED", 13.0),
        {"event": "batch", "holder": "batch", "before": "0 PENDING", "after": "0 FAILED", "time": 13.0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    timeline = runpy.run_path(str(ROOT / "tools" / "timeline.py"))
    assert timeline["main"]([str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["at_once"] == 1
    (batch,) = document["batches"]
    assert (batch["batch"], batch["state"]) == (0, "FAILED")
    rows = [(row["holder"], row["from"], row["to"], row["state"], row["onload"]) for row in batch["leases"]]
    assert rows == [("rollout", 0.0, 2.0, "SLEEPING", 0.25), ("genrm", 2.5, None, "BLOCKED", 0.0)]
    assert timeline["main"]([str(tmp_path)]) == 0
    assert "still BLOCKED" in capsys.readouterr().out
    assert timeline["main"]([str(tmp_path / "nothing")]) == 2
