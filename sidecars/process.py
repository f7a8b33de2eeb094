"""One engine process and everything it started: begun in a session of its own, ended by proof.

"Ended" means three things at once: the leader is reaped, nothing is left in its session, and nothing of this
user carries the worker's tags any more. Engine children that outlive their parent keep their GPU memory, so
the leader's exit alone proves nothing. Every wait is on a pidfd; nothing is found by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from relax_slurm.errors import RecoveryRequired, StartupFailed
from sidecars import launcher, proc
from sidecars.command_line import RUN_TAG, WORKER_TAG, CommandLine

LOOKS = 2
"""Times in a row that nothing may be found before an end is believed: one look can miss a process that is just being
forked by one that ends, or is between two programs and shows no environment."""
LOOK_AGAIN_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Exit:
    """How the leader ended: a code (0 to 255) or the signal that ended it."""

    code: int | None
    signal: int | None

    def __str__(self) -> str:
        if self.signal is None:
            return f"exit code {self.code}"
        try:
            return f"signal {signal.Signals(self.signal).name}"
        except ValueError:
            return f"signal {self.signal}"


class OwnedProcess:
    """A process group that this object started and is answerable for.

    `exited` resolves with an `Exit` when the leader ends; it may be awaited by any number of tasks. The
    zombie is kept until `stop()`, so that its pid, session and group cannot be anybody else's in between.
    """

    def __init__(self, command: CommandLine, log_path: Path) -> None:
        self._command = command
        self._log_path = log_path
        self._popen: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._tags = tuple(f"{key}={command.env[key]}" for key in (RUN_TAG, WORKER_TAG) if key in command.env)
        self._name = command.env.get(WORKER_TAG, "engine")
        self._callbacks: list[Callable[[Exit], None]] = []
        self._exit: asyncio.Future[Exit] | None = None
        self._gone = False

    @property
    def pid(self) -> int | None:
        """The leader's pid (also its session and group id), or None before `start`."""
        return None if self._popen is None else self._popen.pid

    @property
    def exited(self) -> asyncio.Future[Exit]:
        """Resolves when the leader has ended. Shielded: cancelling a waiter does not cancel it for the
        others.
        """
        if self._exit is None:
            raise RuntimeError("the process was never started")
        return asyncio.shield(self._exit)

    async def wait_exit(self, timeout_seconds: float | None = None) -> Exit | None:
        """How the leader ended, or None when it lives after `timeout_seconds`."""
        if self._exit is None:
            raise RuntimeError("the process was never started")
        await asyncio.wait({self._exit}, timeout=timeout_seconds)
        return self._exit.result() if self._exit.done() else None

    @property
    def running(self) -> bool:
        """Whether the leader was started and has not ended."""
        return self._exit is not None and not self._exit.done()

    def on_exit(self, callback: Callable[[Exit], None]) -> None:
        """Call `callback` once, in the event loop, when the leader ends."""
        self._callbacks.append(callback)

    def start(self) -> None:
        """Start the program; raises `StartupFailed` when it cannot be executed at all.

        Must run in the main thread: the kernel ties the child to the *thread* that created it, and the main
        thread is the one that ends with the process.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("start() belongs in the main thread, whose end is the sidecar's end")
        if self._popen is not None:
            raise RuntimeError("the process was already started")
        self._write_private()
        program = self._command.argv
        tied = (program[0], "-I", "-S", launcher.__file__, str(os.getpid()), *program)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        log = os.open(self._log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._popen = subprocess.Popen(
                tied,
                env=self._command.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            self.remove_private()
            raise StartupFailed(
                f"{self._name}: cannot execute {program[0]} ({error.strerror}); check that the Python of the "
                "run file exists on this node"
            ) from error
        finally:
            os.close(log)
        self._pidfd = os.pidfd_open(self._popen.pid)
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        loop.add_reader(self._pidfd, self._leader_ended)

    def _leader_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        found = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT)
        if found is None or self._exit is None or self._exit.done():
            return
        by_signal = found.si_code in {os.CLD_KILLED, os.CLD_DUMPED}
        end = Exit(None, found.si_status) if by_signal else Exit(found.si_status, None)
        self._exit.set_result(end)
        for callback in self._callbacks:
            callback(end)

    def members(self) -> list[proc.ProcessInfo]:
        """Live processes of the leader's session or with this worker's tags, the leader included."""
        found = {item.pid: item for item in proc.find_tagged(*self._tags)}
        if self._popen is not None and not self._gone:
            found.update((item.pid, item) for item in proc.in_session(self._popen.pid))
        return list(found.values())

    async def stop(self, term_seconds: float, kill_seconds: float) -> Exit | None:
        """End everything and return how the leader ended; None if it was never started.

        SIGTERM goes to the leader alone, which lets it drain; after `term_seconds`, or as soon as the leader
        is gone, whatever is left gets SIGKILL. Raises `RecoveryRequired` naming the processes that are still
        there after another `kill_seconds`; calling again tries again.
        """
        if self._popen is not None and self.running and term_seconds > 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            await self.wait_exit(term_seconds)
        deadline = time.monotonic() + kill_seconds
        empty = 0
        while True:
            left = await asyncio.to_thread(self.members)
            if not left and not self.running:
                empty += 1
                if empty == LOOKS or self._gone:
                    break
                await asyncio.sleep(LOOK_AGAIN_SECONDS)
                continue
            empty = 0
            for target in left:
                proc.kill_exactly(target)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise self._still_there(left)
            await wait_gone(left, remaining)
            if self.running:
                await self.wait_exit(max(0.0, deadline - time.monotonic()))
        return self._reap()

    def _reap(self) -> Exit | None:
        self.remove_private()
        if self._popen is None or self._exit is None:
            return None
        if not self._gone:
            self._popen.wait()
            os.close(self._pidfd)
            self._gone = True
        return self._exit.result()

    def _still_there(self, left: Iterable[proc.ProcessInfo]) -> RecoveryRequired:
        named = ", ".join(f"{item.pid} ({item.name}, state {item.state})" for item in left) or f"{self.pid}"
        return RecoveryRequired(
            f"{self._name}: processes {named} are still alive after SIGKILL; they may hold GPU memory, so the "
            "GPUs stay fenced; see what they wait for (state D: a driver or file system) and stop again",
            detail={"pids": [item.pid for item in left]},
        )

    def _write_private(self) -> None:
        private = self._command.private
        if private is None:
            return
        private.path.parent.mkdir(parents=True, exist_ok=True)
        private.path.unlink(missing_ok=True)
        fd = os.open(private.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(private.content)

    def remove_private(self) -> None:
        """Delete the key file; the engine reads it only while it starts."""
        if self._command.private is not None:
            self._command.private.path.unlink(missing_ok=True)


def find_tagged(run_tag: str, worker_id: str | None = None) -> list[proc.ProcessInfo]:
    """Processes of this user that belong to a run, or to one worker of it, whoever their parent is now."""
    tags = [f"{RUN_TAG}={run_tag}"]
    if worker_id is not None:
        tags.append(f"{WORKER_TAG}={worker_id}")
    return proc.find_tagged(*tags)


async def kill_tagged(run_tag: str, worker_id: str, kill_seconds: float) -> list[int]:
    """Kill what an earlier life of this worker left behind; the pids that were killed.

    Raises `RecoveryRequired` when one of them survives `kill_seconds`.
    """
    deadline = time.monotonic() + kill_seconds
    killed: set[int] = set()
    empty = 0
    while empty < LOOKS:
        left = await asyncio.to_thread(find_tagged, run_tag, worker_id)
        if not left:
            empty += 1
            await asyncio.sleep(LOOK_AGAIN_SECONDS if empty < LOOKS and killed else 0)
            continue
        empty = 0
        if time.monotonic() >= deadline:
            named = ", ".join(f"{item.pid} ({item.name}, state {item.state})" for item in left)
            raise RecoveryRequired(
                f"{worker_id}: orphans {named} of an earlier start survive SIGKILL; the GPUs stay fenced "
                "until they are gone; drain the node if they never end",
                detail={"pids": [item.pid for item in left]},
            )
        for target in left:
            proc.kill_exactly(target)
            killed.add(target.pid)
        await wait_gone(left, deadline - time.monotonic())
    return sorted(killed)


async def wait_gone(targets: Iterable[proc.ProcessInfo], timeout_seconds: float) -> None:
    """Return when all `targets` have ended, or after `timeout_seconds`; look again to know which."""
    loop = asyncio.get_running_loop()
    opened: list[int] = []
    waits: list[asyncio.Future[None]] = []
    try:
        for target in targets:
            try:
                fd = os.pidfd_open(target.pid)
            except ProcessLookupError:
                continue
            opened.append(fd)
            if proc.alive(target.pid, target.start_ticks):
                done: asyncio.Future[None] = loop.create_future()
                loop.add_reader(fd, _ended, loop, fd, done)
                waits.append(done)
        if waits:
            await asyncio.wait(waits, timeout=max(0.0, timeout_seconds))
    finally:
        for fd in opened:
            loop.remove_reader(fd)
            os.close(fd)


def _ended(loop: asyncio.AbstractEventLoop, fd: int, done: asyncio.Future[None]) -> None:
    # An ended process keeps its pidfd readable for ever; without this the loop would spin until the last one
    # ends.
    loop.remove_reader(fd)
    if not done.done():
        done.set_result(None)


def tail(path: Path, lines: int = 20, limit: int = 16_384) -> list[str]:
    """The last lines of a log, at most `limit` bytes of it; empty when there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - limit))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-lines:]
