"""What is known about the end of a child, however its end and our signal meet."""

from __future__ import annotations

import asyncio
import signal
import sys

from relax_slurm.children import end_child, signal_child


def test_a_signal_does_not_take_the_exit_code_of_a_child_that_just_ended() -> None:
    """The child is killed and signalled again at once, while its end is on its way to the event loop."""

    async def scenario() -> list[int]:
        codes = []
        for _ in range(20):
            child = await asyncio.create_subprocess_exec("cat", stdin=asyncio.subprocess.PIPE)
            signal_child(child, signal.SIGKILL)
            for _ in range(50):
                signal_child(child, signal.SIGTERM)
            codes.append(await asyncio.wait_for(child.wait(), 60))
        return codes

    assert asyncio.run(scenario()) == [-signal.SIGKILL] * 20


def test_a_child_that_ended_is_left_alone() -> None:
    async def scenario() -> None:
        child = await asyncio.create_subprocess_exec("false")
        assert await child.wait() == 1
        signal_child(child, signal.SIGKILL)
        await end_child(child)
        assert child.returncode == 1

    asyncio.run(scenario())


def test_who_does_not_listen_is_killed() -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"

    async def scenario() -> None:
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", deaf, stdout=asyncio.subprocess.PIPE)
        assert child.stdout is not None
        await child.stdout.readline()
        await end_child(child, 0.2)
        assert await asyncio.wait_for(child.wait(), 60) == -signal.SIGKILL

    asyncio.run(scenario())
