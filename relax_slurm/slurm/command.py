"""The one way to run a Slurm command: always with a time limit, the outcome as a value.

Nothing here raises for a command that fails, hangs or does not exist. A command that failed tells *nothing*
about the job: the caller goes on with what it knew before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SECONDS = 30.0
"""Time limit of a command unless the caller says otherwise (`slurm.command_seconds`)."""
MAX_OUTPUT_BYTES = 16 * 2**20
NO_JOB = "Invalid job id specified"
"""What Slurm's commands print for a job that the controller does not know (any more)."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a command did. `rc` is None when it was not found or did not end in time."""

    argv: tuple[str, ...]
    rc: int | None
    out: str
    err: str
    timed_out: bool = False

    @property
    def ok(self) -> bool:
        """True when it ended by itself with 0."""
        return self.rc == 0

    @property
    def no_such_job(self) -> bool:
        """True when the controller answered that it does not know the job: the only failure that tells something."""
        return not self.ok and NO_JOB in self.err

    @property
    def words(self) -> str:
        """The command's own complaint on one line, or what went wrong with running it."""
        return " ".join(self.err.split()) or " ".join(self.out.split()) or f"{self.argv[0]} ended with {self.rc}"


def run(argv: Sequence[str], *, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> Done:
    """Run a command and wait at most `seconds`; then it is killed with everything it started."""
    words = tuple(argv)
    with _Output() as output:
        try:
            child = subprocess.Popen(
                words,
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output.out,
                stderr=output.err,
                start_new_session=True,
            )
        except OSError as error:
            return _not_run(words, error)
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill_group(child.pid)
            child.wait()
            return _too_slow(words, output, seconds)
        except BaseException:
            _kill_group(child.pid)
            child.wait()
            raise
        return Done(words, child.returncode, *output.texts())


async def run_async(argv: Sequence[str], *, seconds: float = SECONDS, env: Mapping[str, str] | None = None) -> Done:
    """`run` for an event loop; a cancelled call kills the command too."""
    words = tuple(argv)
    with _Output() as output:
        try:
            child = await asyncio.create_subprocess_exec(
                *words,
                env=None if env is None else dict(env),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.out,
                stderr=output.err,
                start_new_session=True,
            )
        except OSError as error:
            return _not_run(words, error)
        try:
            # wait_for of Python 3.11 swallows a cancellation that arrives together with the command's end.
            async with asyncio.timeout(seconds):
                await child.wait()
        except TimeoutError:
            _kill_group(child.pid)
            await child.wait()
            return _too_slow(words, output, seconds)
        except BaseException:
            _kill_group(child.pid)
            await child.wait()
            raise
        assert child.returncode is not None
        return Done(words, child.returncode, *output.texts())


class _Output:
    """Two nameless files for what a command prints.

    Files and not pipes: a process that the command left behind may hold a pipe open for ever.
    """

    def __enter__(self) -> _Output:
        self.out = tempfile.TemporaryFile()
        self.err = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        self.out.close()
        self.err.close()

    def texts(self) -> tuple[str, str]:
        """What was printed, at most 16 MiB of each."""
        found = []
        for stream in (self.out, self.err):
            stream.seek(0)
            found.append(stream.read(MAX_OUTPUT_BYTES).decode(errors="replace"))
        return found[0], found[1]


def _kill_group(pid: int) -> None:
    # The child leads its own session, and it has not been waited for: its pid and group id are still ours.
    if pid > 1:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _not_run(words: tuple[str, ...], error: OSError) -> Done:
    return Done(words, None, "", f"cannot run {words[0]}: {error.strerror or error}")


def _too_slow(words: tuple[str, ...], output: _Output, seconds: float) -> Done:
    out, _ = output.texts()
    return Done(words, None, out, f"{words[0]} did not answer within {seconds:g} s", timed_out=True)
