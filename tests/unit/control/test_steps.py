"""Node steps: real processes for virtual nodes, and what is asked of Slurm's commands for real ones."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from relax_slurm.control.steps import LocalSteps, SlurmSteps
from tests.unit.control.stage import run, until

NODE = (
    "import json, os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    "print(json.dumps([sys.argv[1:], os.environ['RELAX_PARENT_PID'], os.getsid(0) == os.getpid()]), flush=True)\n"
    "time.sleep(60)\n"
)


SRUN = (
    "import signal, sys, time\n"
    "signal.signal(signal.SIGINT, lambda *_: sys.exit(9))\n"
    "open('CALLS', 'a').write('srun ' + ' '.join(sys.argv[1:]) + chr(10))\n"
    "time.sleep(60)\n"
)


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_virtual_node_is_a_process_of_its_own_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        steps = LocalSteps((sys.executable, "-c", NODE), dict(os.environ), {"n1": {"name": "n1", "gpus": (0,)}})
        log = tmp_path / "n1.log"
        process = await steps.start("n1", log)
        try:
            await until(lambda: text(log))
            arguments, parent, own_session = json.loads(text(log))
            assert arguments == ["--node", "n1", "--virtual", '{"name": "n1", "gpus": [0]}']
            assert parent == str(os.getpid())
            assert own_session
            await steps.end({"n1": process}, force=False)
            assert await process.wait() == 7
            await steps.end({"n1": process}, force=True)  # gone already: no error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    run(scenario)


def test_a_virtual_node_that_hangs_is_killed(tmp_path: Path) -> None:
    async def scenario() -> None:
        steps = LocalSteps((sys.executable, "-c", NODE), dict(os.environ), {"n1": {"name": "n1", "gpus": (0,)}})
        process = await steps.start("n1", tmp_path / "n1.log")
        await until(lambda: text(tmp_path / "n1.log"))
        process.send_signal(signal.SIGSTOP)
        await steps.end({"n1": process}, force=True)
        assert await process.wait() == -9

    run(scenario)


def commands(tmp_path: Path) -> Mapping[str, str]:
    """srun, squeue and scancel that write down what they were asked."""
    calls = tmp_path / "calls"
    scripts = {
        "squeue": f'echo "squeue $*" >> {calls}; printf "77.0|sidecar-n1|n1\\n78.3|sidecar-n2|n2\\n77.batch|x|n1\\n"',
        "scancel": f'echo "scancel $*" >> {calls}',
    }
    for name, body in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
    (tmp_path / "srun").write_text(f"#!{sys.executable}\n{SRUN.replace('CALLS', str(calls))}")
    for name in ("srun", *scripts):
        (tmp_path / name).chmod(0o755)
    return dict(os.environ) | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4"}


def test_slurm_steps(tmp_path: Path) -> None:
    async def scenario() -> None:
        steps = SlurmSteps(
            ("python", "-m", "sidecars.node"),
            commands(tmp_path),
            {"n1": 0, "n2": 1},
            ("77", "78"),
            het=True,
            extra=("--cpus-per-task=4 --mem=1G",),
        )
        calls = tmp_path / "calls"
        running = {node: await steps.start(node, tmp_path / f"{node}.log") for node in ("n1", "n2")}
        await until(lambda: text(calls).count("srun") == 2)
        asked = {line.partition("--nodelist=")[2][:2]: line for line in text(calls).splitlines()}
        assert "--het-group=1" in asked["n2"]
        assert "--job-name=sidecar-n1" in asked["n1"]
        assert "--cpus-per-task=4 --mem=1G python -m sidecars.node" in asked["n1"]
        await steps.end({"n2": running["n2"]}, force=False)
        assert await running["n2"].wait() == 9  # INT, which srun hands on; TERM would kill its task at once
        assert "scancel" not in text(calls)
        await steps.end(running, force=True)
        assert await running["n1"].wait() == -9
        lines = text(calls).splitlines()[2:]
        assert [line.partition(" ")[0] for line in lines] == ["squeue", "scancel"]  # one question for all of them
        assert lines[1] == "scancel --signal=KILL 77.0"

    run(scenario)


def test_a_step_that_cannot_be_started_is_an_os_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        steps = SlurmSteps(("python",), {"PATH": "/nowhere"}, {"n1": 0}, ("77",), het=False)
        try:
            await steps.start("n1", tmp_path / "n1.log")
        except OSError:
            return
        raise AssertionError("srun was found nowhere")

    asyncio.run(scenario())
