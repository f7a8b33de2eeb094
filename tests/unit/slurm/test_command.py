from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_slurm.slurm.command import Done, run, run_async

Runner = Callable[..., Done]


def run_in_loop(*args: object, **kwargs: object) -> Done:
    return asyncio.run(run_async(*args, **kwargs))  # type: ignore[arg-type]


both = pytest.mark.parametrize("runner", [run, run_in_loop], ids=["sync", "async"])


@both
def test_outcome_is_a_value(runner: Runner) -> None:
    done = runner(["bash", "-c", "echo out; echo err >&2; exit 3"])
    assert (done.rc, done.out, done.err, done.timed_out) == (3, "out\n", "err\n", False)
    assert not done.ok
    assert done.words == "err"
    assert runner(["true"]).ok


@both
def test_only_the_given_environment_is_seen(runner: Runner) -> None:
    env = {"PATH": os.environ["PATH"], "ONLY": "this"}
    assert "ONLY=this" in runner(["env"], env=env).out.splitlines()
    assert "HOME=" not in runner(["env"], env=env).out


@both
def test_a_command_that_hangs_is_killed_with_its_children(runner: Runner, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    begin = time.monotonic()
    done = runner(["bash", "-c", f"sleep 60 & echo $! > '{mark}'; wait"], seconds=1.0)
    assert time.monotonic() - begin < 20
    assert done.timed_out
    assert done.rc is None
    assert not done.ok
    assert "did not answer within 1 s" in done.words
    state = Path(f"/proc/{int(mark.read_text())}/stat")
    deadline = time.monotonic() + 5
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@both
def test_a_process_that_left_the_session_does_not_hold_us(runner: Runner) -> None:
    begin = time.monotonic()
    done = runner(["bash", "-c", "echo said; setsid --fork sleep 8"], seconds=30)
    assert time.monotonic() - begin < 7
    assert done.ok
    assert done.out == "said\n"


@both
def test_a_missing_program_is_a_value_too(runner: Runner) -> None:
    done = runner(["no-such-slurm-command"])
    assert done.rc is None
    assert not done.timed_out
    assert "cannot run no-such-slurm-command" in done.words


@both
def test_bytes_that_are_no_text_do_not_break(runner: Runner) -> None:
    assert "�" in runner(["printf", r"\377"]).out


def test_no_such_job_is_the_only_telling_failure() -> None:
    said = "slurm_load_jobs error: Invalid job id specified"
    assert Done(("squeue",), 1, "", said).no_such_job
    assert not Done(("squeue",), 0, "", said).no_such_job
    assert not Done(("squeue",), 1, "", "slurm_load_jobs error: Socket timed out").no_such_job
    assert Done(("squeue",), 1, "", "").words == "squeue ended with 1"


def test_cancelling_the_caller_kills_the_command(tmp_path: Path) -> None:
    mark = tmp_path / "pid"

    async def main() -> None:
        task = asyncio.create_task(run_async(["bash", "-c", f"echo $$ > '{mark}'; exec sleep 60"]))
        while not mark.exists() or not mark.read_text().strip():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
