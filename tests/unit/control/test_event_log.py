"""The event log: never in the way, never without a bound, never the reason why a run ends."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.control.event_log import EARLIER, FILE, EventLog
from tests.unit.control.stage import run, until


def lines(folder: Path, name: str = FILE) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_events_keep_their_order_and_get_their_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path)
        task = asyncio.create_task(log.run())
        for number in range(500):
            log.add({"event": "x", "n": number})
            if number % 50 == 0:
                await asyncio.sleep(0)
        await log.flush()
        assert [event["n"] for event in lines(tmp_path)] == list(range(500))
        assert all(event["time"] > 1_600_000_000 for event in lines(tmp_path))
        assert (tmp_path / FILE).stat().st_mode & 0o077 == 0
        await log.flush()  # nothing to do: returns at once
        log.add({"event": "last"})
        await until(lambda: lines(tmp_path)[-1]["event"] == "last")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(scenario)


def test_flush_waits_for_the_batch_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path)
        gate = threading.Event()
        write = log._write

        def slow(batch: list[bytes]) -> None:
            gate.wait(5)
            write(batch)

        monkeypatch.setattr(log, "_write", slow)
        task = asyncio.create_task(log.run())
        log.add({"event": "first"})
        await asyncio.sleep(0.01)
        log.add({"event": "second"})
        task.cancel()
        flushing = asyncio.create_task(log.flush())
        await asyncio.sleep(0.01)
        assert not flushing.done()
        gate.set()
        await flushing
        assert [event["event"] for event in lines(tmp_path)] == ["first", "second"]

    run(scenario)


def test_a_log_that_cannot_be_written_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path / "gone")
        log.add({"event": "x"})
        await log.flush()
        assert log.lost == 1

    run(scenario)


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path, max_waiting=3)
        for number in range(5):
            log.add({"n": number})
        await log.flush()
        assert [event["n"] for event in lines(tmp_path)] == [0, 1, 2]
        assert log.lost == 2

    run(scenario)


def test_the_file_is_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = EventLog(tmp_path, max_bytes=1000)
        for number in range(100):
            log.add({"n": number, "fill": "x" * 50})
            await log.flush()
        assert (tmp_path / FILE).stat().st_size < 1200
        assert (tmp_path / EARLIER).stat().st_size < 1200
        assert lines(tmp_path)[-1]["n"] == 99
        assert lines(tmp_path, EARLIER)[-1]["n"] == lines(tmp_path)[0]["n"] - 1

    run(scenario)
