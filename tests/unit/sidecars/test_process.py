"""Ending a process and everything it started, with real processes that resist."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop

from relax_slurm.errors import StartupFailed
from sidecars import proc, process
from sidecars.command_line import CommandLine, PrivateFile
from sidecars.process import OwnedProcess, find_tagged, kill_tagged, tail
from tests.harness.launch import arguments

HEAD = "import os, signal, subprocess, sys, time\n"
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def owned(tmp_path: Path, code: str, *, worker: str = "w#0", private: PrivateFile | None = None) -> OwnedProcess:
    env = {**os.environ, "RELAX_RUN_TAG": f"run-{tmp_path}", "RELAX_WORKER_TAG": worker}
    argv = (sys.executable, "-c", HEAD + textwrap.dedent(code))
    return OwnedProcess(CommandLine(argv, env, private), tmp_path / "log" / "engine.log")


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        await asyncio.sleep(0.01)


async def said(tmp_path: Path, word: str) -> None:
    await until(lambda: word in "\n".join(tail(tmp_path / "log" / "engine.log", 50)))


def test_code_signal_and_callbacks(tmp_path: Path) -> None:
    async def scenario() -> None:
        seen: list[str] = []
        for code, text in (("sys.exit(7)", "exit code 7"), ("os.kill(os.getpid(), 11)", "signal SIGSEGV")):
            child = owned(tmp_path, code)
            assert child.pid is None
            assert not child.running
            child.on_exit(lambda end: seen.append(str(end)))
            child.start()
            waiter = asyncio.create_task(asyncio.wait_for(child.exited, 20))
            impatient = asyncio.ensure_future(child.exited)
            impatient.cancel()
            assert str(await waiter) == text
            assert str(await child.wait_exit()) == text
            assert str(await child.stop(1, 5)) == text
        assert seen == ["exit code 7", "signal SIGSEGV"]

    asyncio.run(scenario())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_term_lets_the_leader_finish(tmp_path: Path, run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    async def scenario() -> None:
        child = owned(
            tmp_path,
            """
            def end(*_):
                time.sleep(0.2)
                print("drained", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, end)
            print("up", flush=True)
            time.sleep(600)
            """,
        )
        child.start()
        await said(tmp_path, "up")
        end = await child.stop(10, 5)
        assert end is not None
        assert end.code == 0
        assert tail(tmp_path / "log" / "engine.log")[-1] == "drained"

    run(scenario())


def test_what_ignores_term_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = owned(tmp_path, "signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)")
        child.start()
        await said(tmp_path, "up")
        end = await child.stop(0.1, 10)
        assert end is not None
        assert end.signal == signal.SIGKILL
        assert child.pid is not None
        assert proc.info(child.pid) is None, "reaped"

    asyncio.run(scenario())


ORPHANS = {
    "child in the session": "subprocess.Popen(SLEEPER)",
    "double fork": """
if os.fork() == 0:
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)
""",
    "session of its own": "subprocess.Popen(SLEEPER, start_new_session=True)",
    "session of its own, parent gone": """
if os.fork() == 0:
    subprocess.Popen(SLEEPER, start_new_session=True)
    os._exit(0)
""",
    "environment cleared, same session": "subprocess.Popen(SLEEPER, env={})",
    "deaf child": """
DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", DEAF])
""",
}


@pytest.mark.parametrize("kind", ORPHANS)
@pytest.mark.parametrize("leader_dies_first", [False, True])
def test_orphans_are_found_and_killed(tmp_path: Path, kind: str, leader_dies_first: bool) -> None:
    async def scenario() -> None:
        after = "sys.exit(3)" if leader_dies_first else "time.sleep(600)"
        code = f"SLEEPER = {SLEEPER!r}\n{ORPHANS[kind]}\nprint('up', flush=True)\ntime.sleep(0.3)\n{after}\n"
        child = owned(tmp_path, code)
        child.start()
        await said(tmp_path, "up")
        if leader_dies_first:
            await asyncio.wait_for(child.exited, 20)
        # A forked child may need longer than its parent for what it has to do.
        await until(lambda: len(child.members()) >= (1 if leader_dies_first else 2))
        left = child.members()
        await child.stop(0.2, 10)
        assert child.members() == []
        assert not any(proc.alive(item.pid, item.start_ticks) for item in left)

    asyncio.run(scenario())


def test_other_workers_of_the_run_are_left_alone(tmp_path: Path) -> None:
    async def scenario() -> None:
        mine, other = owned(tmp_path, "time.sleep(600)"), owned(tmp_path, "time.sleep(600)", worker="w#1")
        mine.start()
        other.start()
        run = f"run-{tmp_path}"
        await until(lambda: len(find_tagged(run)) == 2)
        await mine.stop(0.5, 10)
        assert other.running
        assert [item.pid for item in find_tagged(run)] == [other.pid]
        assert [item.pid for item in find_tagged(run, "w#1")] == [other.pid]
        assert await kill_tagged(run, "w#1", 10) == [other.pid]
        assert find_tagged(run) == []
        assert await kill_tagged(run, "w#1", 10) == []
        await other.stop(0, 5)

    asyncio.run(scenario())


def test_stopping_twice_and_stopping_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        child = owned(tmp_path, "time.sleep(600)")
        assert await child.stop(0.1, 1) is None
        child.start()
        first, second = await asyncio.gather(child.stop(0.1, 10), child.stop(0.1, 10))
        assert first == second
        assert await child.stop(0.1, 10) == first

    asyncio.run(scenario())


def test_a_killed_sidecar_takes_its_engine_along(tmp_path: Path) -> None:
    """SIGKILL leaves no time to clean up: the kernel does it."""
    parent = f"""
import asyncio, os, sys
from pathlib import Path
from sidecars.command_line import CommandLine
from sidecars.process import OwnedProcess
async def main():
    env = {{**os.environ, "RELAX_RUN_TAG": "orphaned-{tmp_path}", "RELAX_WORKER_TAG": "w#0"}}
    child = OwnedProcess(CommandLine(({sys.executable!r}, "-c", "import time; time.sleep(600)"), env),
                         Path({str(tmp_path)!r}) / "engine.log")
    child.start()
    print(child.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    sidecar = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert sidecar.stdout is not None
    engine = proc.info(int(sidecar.stdout.readline()))
    assert engine is not None

    async def scenario() -> None:
        # Not before it has become the program: what is forked shows its parent's arguments, then the launcher's.
        words = ["-c", "import time; time.sleep(600)"]
        await until(lambda: arguments(engine.pid)[1:] == words)
        sidecar.kill()
        await until(lambda: not proc.alive(engine.pid, engine.start_ticks))

    asyncio.run(scenario())
    sidecar.communicate(timeout=30)


def test_the_key_file_is_private_and_goes_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        keys = tmp_path / "keys" / "engine.keys.yaml"
        child = owned(tmp_path, "time.sleep(600)", private=PrivateFile(keys, b'{"api-key": "k"}'))
        child.start()
        assert keys.read_bytes() == b'{"api-key": "k"}'
        assert keys.stat().st_mode & 0o777 == 0o600
        child.remove_private()
        assert not keys.exists()
        await child.stop(0, 10)

    asyncio.run(scenario())


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        env = {"RELAX_WORKER_TAG": "w#0", "RELAX_RUN_TAG": "r"}
        child = OwnedProcess(CommandLine(("/no/such/python", "-m", "x"), env), tmp_path / "log")
        with pytest.raises(StartupFailed, match="/no/such/python"):
            child.start()

    asyncio.run(scenario())


def test_start_belongs_to_the_main_thread(tmp_path: Path) -> None:
    child = owned(tmp_path, "pass")
    caught: list[BaseException] = []

    def run() -> None:
        try:
            child.start()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])


@pytest.mark.parametrize("pid", [0, -1, -4])
def test_no_signal_goes_to_a_group_by_accident(pid: int) -> None:
    target = proc.ProcessInfo(pid=pid, start_ticks=1, session=1, state="S", name="sentinel")
    with pytest.raises(ValueError, match="not a process"):
        proc.kill_exactly(target)


def test_a_reused_pid_is_not_signalled() -> None:
    sleeper = subprocess.Popen(SLEEPER)
    found = proc.info(sleeper.pid)
    assert found is not None
    former = proc.ProcessInfo(found.pid, found.start_ticks - 1, found.session, found.state, found.name)
    proc.kill_exactly(former)
    with pytest.raises(subprocess.TimeoutExpired):
        sleeper.wait(0.2)
    proc.kill_exactly(found)
    assert sleeper.wait(10) == -signal.SIGKILL
    proc.kill_exactly(found)


def test_nothing_is_tagged_with_nothing() -> None:
    assert proc.find_tagged() == []
    assert proc.in_session(0) == []


def test_tail_of_logs(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert tail(path) == []
    path.write_bytes(b"one\n\n\xff two\n" + b"three\n" * 40)
    assert tail(path, 2) == ["three", "three"]
    assert process.tail(path, 50)[1] == "\ufffd two"
