"""How a node's sidecar is started and ended: under srun in a Slurm job, as a plain process for a virtual node.

A *step* here is one process that the supervisor waits for. Its end is a fact; what that fact proves is
`core.evidence`'s business.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from relax_slurm.children import signal_child
from relax_slurm.control.logs import open_log
from relax_slurm.slurm.command import run_async
from relax_slurm.slurm.environment import step_environment
from relax_slurm.slurm.steps import StepRow, list_steps, node_step, parse_steps, signal_step
from relax_slurm.wire.parent import PARENT_VARIABLE

AT_ONCE = 8
"""Slurm commands that run side by side; the controller serves other people too."""


class StepRunner(Protocol):
    """Starts and ends node steps."""

    async def start(self, node: str, output: Path) -> asyncio.subprocess.Process:
        """Start the node's step; its output is appended to `output`."""
        ...

    async def end(self, steps: Mapping[str, asyncio.subprocess.Process], *, force: bool) -> None:
        """Ask steps (by node) to end, or end them (KILL). Answers when asked, not when ended."""
        ...


@dataclass(slots=True)
class LocalSteps:
    """Virtual nodes of this machine: each sidecar is a process of its own session."""

    command: Sequence[str]
    environ: Mapping[str, str]
    virtual: Mapping[str, dict[str, object]]
    """What each node pretends to have (fields of `sidecars.probe.VirtualNode`)."""

    async def start(self, node: str, output: Path) -> asyncio.subprocess.Process:
        """See `StepRunner.start`."""
        argv = [*self.command, "--node", node, "--virtual", json.dumps(self.virtual[node])]
        with open_log(output) as log:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**self.environ, PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )

    async def end(self, steps: Mapping[str, asyncio.subprocess.Process], *, force: bool) -> None:
        """See `StepRunner.end`."""
        for process in steps.values():
            signal_child(process, signal.SIGKILL if force else signal.SIGTERM)


@dataclass(slots=True)
class SlurmSteps:
    """One srun per node. TERM to an srun would kill its task at once, so the polite way is INT (`slurm.steps`)."""

    command: Sequence[str]
    environ: Mapping[str, str]
    component_of: Mapping[str, int]
    """Component index of each node."""
    component_ids: Sequence[str]
    """Slurm job id of each component."""
    het: bool
    extra: Sequence[str] = ()

    async def start(self, node: str, output: Path) -> asyncio.subprocess.Process:
        """See `StepRunner.start`."""
        component = self.component_of[node]
        argv = node_step(
            node,
            list(self.command),
            het_group=component if self.het else None,
            name=f"sidecar-{node}",
            extra=[word for line in self.extra for word in shlex.split(line)],
            output=output,
        )
        open_log(output).close()  # srun would make it readable for others
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None,  # srun's own complaints belong to the supervisor's log
            env=step_environment(self.environ),
            start_new_session=True,
        )

    async def end(self, steps: Mapping[str, asyncio.subprocess.Process], *, force: bool) -> None:
        """See `StepRunner.end`."""
        if not force:
            for process in steps.values():
                signal_child(process, signal.SIGINT)  # srun hands it to the task and to nothing else
            return
        names = {f"sidecar-{node}" for node, process in steps.items() if process.returncode is None}
        done = await run_async(list_steps(self.component_ids), env=self.environ)
        few = asyncio.Semaphore(AT_ONCE)

        async def kill(row: StepRow) -> None:
            async with few:
                await run_async(signal_step(row.job_id, row.step_id, "KILL"), env=self.environ)

        await asyncio.gather(*(kill(row) for row in parse_steps(done.out) if row.name in names))
        for process in steps.values():
            signal_child(process, signal.SIGKILL)  # of the srun, whose task is dealt with
