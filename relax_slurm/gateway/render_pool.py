"""Renderer processes of a gateway: few, started when there is something to render, ended when there is not.

The gateway's loop waits for them and does nothing else: neither the template language nor the tokenizer is ever
imported here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections import deque
from dataclasses import dataclass

import msgspec

from relax_slurm.children import signal_child
from relax_slurm.errors import BadRequest, DeadlineExceeded, StartupFailed, Unavailable, UpstreamFailed
from relax_slurm.gateway import render_frames as frames
from relax_slurm.gateway.render_frames import Loaded, NoRenderer, Refusal, Rendered, Task
from relax_slurm.wire.parent import PARENT_VARIABLE

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of rendering. Sizes in bytes, times in seconds."""

    processes: int = 2
    queue: int = 1024
    """Requests that wait for a process; one more is answered 503."""
    wait_seconds: float = 60.0
    """How long a request may wait for a process before it is answered 503."""
    load_seconds: float = 60.0
    """To start a process and read a tokenizer; then the process is killed, and the request answered 504."""
    render_seconds: float = 10.0
    """To render and tokenize one request; then the same."""
    idle_seconds: float = 600.0
    """A process that had nothing to do for so long is ended."""
    max_messages_bytes: int = 4 * 1024 * 1024
    """Largest `messages` with `chat_template_kwargs`; more is answered 400."""
    memory_bytes: int = 2 << 30
    """Address space of a process."""


class CannotRender(Exception):
    """Nothing can be rendered with this source on this machine; the text says why."""


@dataclass(slots=True)
class _Job:
    task: Task
    done: asyncio.Future[Rendered]
    started: bool = False


class RenderPool:
    """Renders messages in processes. Belongs to the loop in which it is first used."""

    def __init__(self, limits: RenderLimits | None = None) -> None:
        self.limits = limits or RenderLimits()
        self.processes = 0
        """Processes that take requests, or will when they have started."""
        self._jobs: deque[_Job] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._workers: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Requests that no process has taken yet."""
        return len(self._jobs)

    async def render(self, task: Task) -> Rendered:
        """The token ids of the task's messages.

        BadRequest when the messages are at fault, CannotRender when the source is; DeadlineExceeded, Unavailable,
        UpstreamFailed or StartupFailed when rendering did not come to an end. Nothing has been sent to an engine then.
        """
        size = len(task.messages) + len(task.chat_template_kwargs)
        if size > self.limits.max_messages_bytes:
            raise BadRequest(
                f"messages: {size} bytes with chat_template_kwargs, at most {self.limits.max_messages_bytes} are"
                " rendered; send less, or input_ids"
            )
        if len(self._jobs) >= self.limits.queue:
            raise Unavailable(f"{len(self._jobs)} requests wait to be rendered; nothing was sent, try again")
        job = _Job(task, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._wake()
        try:
            await asyncio.wait({job.done}, timeout=self.limits.wait_seconds)
            if not job.started and not job.done.done():
                raise Unavailable(
                    f"no renderer was free for {self.limits.wait_seconds:g} s; nothing was sent, try again"
                )
            return await job.done
        finally:
            job.done.cancel()

    async def close(self) -> None:
        """End all processes; what waits is answered 503."""
        for worker in tuple(self._workers):
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        while self._jobs:
            self._fail(self._jobs.popleft(), Unavailable("the gateway is stopping; nothing was sent"))

    def _wake(self) -> None:
        """Somebody has to look at the queue: a process that has nothing to do, or a new one."""
        while self._idle:
            sleeper = self._idle.popleft()
            if not sleeper.done():
                sleeper.set_result(None)
                return
        if self.processes < self.limits.processes:
            self.processes += 1
            worker = asyncio.get_running_loop().create_task(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    # --- one process ------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        """Serve the queue with one process at a time until there was nothing to do for a while."""
        process: asyncio.subprocess.Process | None = None
        try:
            while (job := await self._next()) is not None:
                job.started = True
                try:
                    if process is None:
                        process = await self._start()
                    answer = await self._ask(process, job.task)
                except (DeadlineExceeded, UpstreamFailed, StartupFailed) as error:
                    ended, process = process, None
                    self._fail(job, error)
                    await _end(ended)
                except asyncio.CancelledError:
                    self._fail(job, Unavailable("the gateway is stopping; nothing was sent"))
                    raise
                else:
                    self._settle(job, answer)
        finally:
            self.processes -= 1  # before the end is waited for: who comes meanwhile gets a new one
            await _end(process)

    async def _next(self) -> _Job | None:
        """The next request that somebody still waits for; None after a long time without one."""
        while True:
            while self._jobs:
                job = self._jobs.popleft()
                if not job.done.done():
                    return job
            sleeper = asyncio.get_running_loop().create_future()
            self._idle.append(sleeper)
            try:
                await asyncio.wait_for(sleeper, self.limits.idle_seconds)
            except TimeoutError:
                if not self._jobs:
                    return None

    async def _start(self) -> asyncio.subprocess.Process:
        keep = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONPATH") if name in os.environ}
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "relax_slurm.gateway.render_worker", str(self.limits.memory_bytes)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**keep, PARENT_VARIABLE: str(os.getpid()), "TOKENIZERS_PARALLELISM": "false"},
            )
        except OSError as error:
            raise StartupFailed(f"a renderer process could not be started ({error}); see the gateway's log") from None

    async def _ask(self, process: asyncio.subprocess.Process, task: Task) -> frames.Answer:
        assert process.stdin is not None
        where = task.source.folder
        try:
            process.stdin.write(frames.framed(task))
            async with asyncio.timeout(self.limits.load_seconds):
                await process.stdin.drain()
                answer = await self._read(process)
            if isinstance(answer, Loaded):
                async with asyncio.timeout(self.limits.render_seconds):
                    answer = await self._read(process)
        except TimeoutError:
            raise DeadlineExceeded(
                f"rendering messages with the template of {where} did not end in time"
                f" ({self.limits.load_seconds:g} s to load, {self.limits.render_seconds:g} s to render); nothing was"
                " sent to an engine"
            ) from None
        except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
            signal_child(process, signal.SIGKILL)
            code = await process.wait()
            raise UpstreamFailed(
                f"the renderer process ended with {code} over these messages; nothing was sent to an engine, see the"
                " gateway's log"
            ) from None
        return answer

    async def _read(self, process: asyncio.subprocess.Process) -> frames.Answer:
        assert process.stdout is not None
        size = int.from_bytes(await process.stdout.readexactly(frames.HEADER_BYTES), "big")
        return frames.decode_answer(await process.stdout.readexactly(size))

    # --- answers ----------------------------------------------------------------------------------------------

    def _settle(self, job: _Job, answer: frames.Answer) -> None:
        if isinstance(answer, Rendered):
            if not job.done.done():
                job.done.set_result(answer)
        elif isinstance(answer, Refusal):
            self._fail(job, BadRequest(f"messages: {answer.reason}"))
        elif isinstance(answer, NoRenderer):
            self._fail(job, CannotRender(answer.reason))
        else:
            self._fail(job, UpstreamFailed("the renderer process said nothing about these messages"))

    @staticmethod
    def _fail(job: _Job, error: Exception) -> None:
        if isinstance(error, DeadlineExceeded | UpstreamFailed | StartupFailed):
            log.warning("%s", error)
        if not job.done.done():
            job.done.set_exception(error)


async def _end(process: asyncio.subprocess.Process | None) -> None:
    """Kill it, whatever it does, and see it end."""
    if process is None:
        return
    if process.stdin is not None:
        process.stdin.close()
    signal_child(process, signal.SIGKILL)
    await process.wait()
