"""Renderer processes: real ones, killed, crowded and left alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.errors import BadRequest, DeadlineExceeded, Unavailable, UpstreamFailed
from relax_slurm.gateway.render_frames import Task
from relax_slurm.gateway.render_pool import CannotRender, RenderLimits, RenderPool
from relax_slurm.gateway.sources import RenderSource
from tests.unit.gateway.chat_folders import CHATML, write_folder
from tests.unit.gateway.test_render import GOLDEN

HELLO = b'[{"role":"user","content":"hello world"}]'
HANG = b'[{"role":"user","content":"hang"}]'
EXPLODE = b'[{"role":"user","content":"explode"}]'
TEMPLATE = (
    "{% if messages[0].content == 'hang' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif messages[0].content == 'explode' %}{% set x = 'x' * (8 * 10 ** 9) %}{% endif %}" + CHATML
)
Scenario = Callable[[RenderPool, RenderSource], Coroutine[Any, Any, None]]


def pooled(tmp_path: Path, scenario: Scenario, **limits: Any) -> None:
    """Run the scenario with a pool; no process may be left of it."""

    async def main() -> None:
        pool = RenderPool(RenderLimits(**{"processes": 1, **limits}))
        try:
            await asyncio.wait_for(scenario(pool, RenderSource(str(write_folder(tmp_path / "m", TEMPLATE)))), 60)
        finally:
            await pool.close()
        assert children() == set()
        assert pool.processes == 0

    asyncio.run(main())


def children() -> set[int]:
    """Renderer processes that this process has, whichever of its threads started them."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"render_worker" in (entry / "cmdline").read_bytes():
                found.add(int(entry.name))
        except OSError:  # it ended meanwhile
            continue
    return found


async def taken(pool: RenderPool, left: int = 0) -> None:
    """Return when all that were asked, but so many, have been given to a process."""
    while True:
        await asyncio.sleep(0.005)
        if pool.waiting == left:
            return


def test_ids_come_from_a_process(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        assert pool.processes == 0
        for _ in range(2):
            rendered = await pool.render(Task(source, HELLO))
            assert (rendered.ids, rendered.count) == (str(GOLDEN).replace(" ", "").encode(), len(GOLDEN))
            assert len(children()) == 1

    pooled(tmp_path, scenario)


def test_a_crowd_is_served_by_few(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        answers = await asyncio.gather(*(pool.render(Task(source, HELLO)) for _ in range(100)))
        assert {answer.count for answer in answers} == {len(GOLDEN)}
        assert pool.processes == len(children()) == 2

    pooled(tmp_path, scenario, processes=2)


def test_a_template_that_loops_is_killed(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        await pool.render(Task(source, HELLO))
        before = children()
        waiting = [asyncio.create_task(pool.render(Task(source, HELLO))) for _ in range(3)]
        with pytest.raises(DeadlineExceeded, match="nothing was sent"):
            await pool.render(Task(source, HANG))
        assert [(await each).count for each in waiting] == [len(GOLDEN)] * 3
        assert (await pool.render(Task(source, HELLO))).count == len(GOLDEN), "the next request has a new process"
        assert children().isdisjoint(before)

    pooled(tmp_path, scenario, render_seconds=0.5)


def test_memory_has_an_end(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        with pytest.raises(BadRequest, match="more memory"):
            await pool.render(Task(source, EXPLODE))
        assert (await pool.render(Task(source, HELLO))).count == len(GOLDEN)

    pooled(tmp_path, scenario)


def test_a_process_that_dies_fails_one_request(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        await pool.render(Task(source, HELLO))
        asked = asyncio.create_task(pool.render(Task(source, HANG)))
        await taken(pool)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(UpstreamFailed, match="ended with -9"):
            await asked
        assert (await pool.render(Task(source, HELLO))).count == len(GOLDEN)

    pooled(tmp_path, scenario)


def test_who_waits_too_long_is_told(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        await pool.render(Task(source, HELLO))
        hanging = asyncio.create_task(pool.render(Task(source, HANG)))
        await taken(pool)
        results = await asyncio.gather(*(pool.render(Task(source, HELLO)) for _ in range(4)), return_exceptions=True)
        assert {type(result) for result in results} == {Unavailable}
        assert sum("requests wait" in str(result) for result in results) == 1, "one more than the queue takes"
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)

    pooled(tmp_path, scenario, wait_seconds=0.3, queue=3)


def test_who_leaves_is_not_rendered_for(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        await pool.render(Task(source, HELLO))
        first = asyncio.create_task(pool.render(Task(source, HELLO)))
        left = [asyncio.create_task(pool.render(Task(source, HANG))) for _ in range(5)]
        await asyncio.sleep(0)
        for each in left:
            each.cancel()
        assert (await first).count == len(GOLDEN)
        assert (await asyncio.wait_for(pool.render(Task(source, HELLO)), 5)).count == len(GOLDEN)

    pooled(tmp_path, scenario, render_seconds=20)


def test_an_idle_process_ends(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        await pool.render(Task(source, HELLO))
        while children():
            await asyncio.sleep(0.02)
        assert pool.processes == 0
        assert (await pool.render(Task(source, HELLO))).count == len(GOLDEN)

    pooled(tmp_path, scenario, idle_seconds=0.1)


def test_refusals(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        with pytest.raises(CannotRender, match="tokenizer"):
            await pool.render(Task(RenderSource(str(tmp_path / "none")), HELLO))
        with pytest.raises(BadRequest, match="UndefinedError"):
            await pool.render(Task(source, b"[]"))
        for messages, variables in [(b"7", b"{}"), (HELLO, b"[]"), (b"[7]", b"{}"), (b"\xff", b"{}")]:
            with pytest.raises(BadRequest):
                await pool.render(Task(source, messages, variables))
        with pytest.raises(BadRequest, match="at most 100 are"):
            await pool.render(Task(source, b"[" + b" " * 100 + b"]"))
        with pytest.raises(BadRequest, match="is no variable"):
            await pool.render(Task(source, HELLO, b'{"tokenize":true}'))

    pooled(tmp_path, scenario, max_messages_bytes=100)


def test_closing_answers_everybody(tmp_path: Path) -> None:
    async def scenario(pool: RenderPool, source: RenderSource) -> None:
        asked = [asyncio.create_task(pool.render(Task(source, HANG))) for _ in range(3)]
        await taken(pool, 2)
        await pool.close()
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(result) for result in results} == {Unavailable}

    pooled(tmp_path, scenario)
