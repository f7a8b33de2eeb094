"""What Slurm (or the local backend) runs on the head node: it starts coordinator, gateway and node steps, and waits.

`python -m relax_slurm.control.supervisor --run-dir DIR --backend slurm|local`. It decides nothing about replicas: it
reports the end of a step to the coordinator, starts the step again when the coordinator says so, keeps the gateway
alive, and takes everything down when the coordinator is done. A signal (time limit, preemption, scancel) becomes a stop.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_slurm.config.load import from_resolved
from relax_slurm.config.models import RunConfig
from relax_slurm.control import logs
from relax_slurm.control.allocation import FILE
from relax_slurm.control.head import failed_outcome
from relax_slurm.control.local_site import LocalSite
from relax_slurm.wire.parent import PARENT_VARIABLE, end_with_parent
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.slurm_site import Site, SlurmSite
from relax_slurm.control.steps import StepRunner
from relax_slurm.core.binding import Backend
from relax_slurm.core.evidence import Proctrack, step_proof
from relax_slurm.core.placement_json import from_json
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.errors import RelaxError, StartupFailed
from relax_slurm.wire.client import ControlClient, RemoteError
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind

log = logging.getLogger(__name__)
COORDINATOR_UP_SECONDS = 30.0
GATEWAY_RESTARTS = 5
STEP_RESTARTS = 3
GRACE_SECONDS = 10.0


class Supervisor:
    """Children of one attempt."""

    def __init__(self, run_dir: RunDir, config: RunConfig, plan: InferencePlacementPlan, site: Site) -> None:
        self._run_dir, self._config, self._plan, self._site = run_dir, config, plan, site
        inherited = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
        self._environ = {**inherited, "RELAX_RUN_TAG": run_dir.tag, "PYTHONUNBUFFERED": "1"}
        self._client: ControlClient | None = None
        self._ending = asyncio.Event()
        self._steps: dict[str, asyncio.subprocess.Process] = {}
        self._proctrack = Proctrack.UNKNOWN

    async def run(self) -> int:
        """Start everything, wait for the coordinator, take everything down; answers the run's exit code."""
        allocation = await self._site.allocate()
        self._proctrack = allocation.proctrack
        self._run_dir.write_json(FILE, allocation.model_dump(mode="json"))
        (self._run_dir.path / "outcome.json").unlink(missing_ok=True)
        coordinator = await self._child("coordinator", "relax_slurm.control.head")
        tasks: list[asyncio.Task[None]] = []
        try:
            await self._endpoint(coordinator)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
                loop.add_signal_handler(number, self._on_signal, number, tasks)
            runner = self._site.runner(self._environ, self._sidecar_command())
            tasks.append(asyncio.create_task(self._keep_gateway()))
            for node in allocation.node_names:
                tasks.append(asyncio.create_task(self._keep_step(node, runner)))
            code = await coordinator.wait()
            self._ending.set()
            await self._take_down(runner)
        finally:
            self._ending.set()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if coordinator.returncode is None:
                coordinator.kill()
                await coordinator.wait()
            if self._client is not None:
                self._client.close()
        return self._exit_code(code)

    # --- children -------------------------------------------------------------------------------------------

    async def _child(self, name: str, module: str) -> asyncio.subprocess.Process:
        """One of our own head-node processes, with its own log file and tied to our life."""
        argv = [sys.executable, "-m", module, "--run-dir", str(self._run_dir.path)]
        with (self._run_dir.logs / f"head_{name}.log").open("ab") as output:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**self._environ, PARENT_VARIABLE: str(os.getpid())},
            )

    async def _endpoint(self, coordinator: asyncio.subprocess.Process) -> None:
        """Wait for the coordinator's addresses; its death ends the wait."""
        ended = asyncio.create_task(coordinator.wait())
        before = self._run_dir.path / "endpoint.json"
        try:
            async with asyncio.timeout(COORDINATOR_UP_SECONDS):
                while not before.exists() and not ended.done():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise StartupFailed(
                f"the coordinator wrote no endpoint.json within {COORDINATOR_UP_SECONDS:g} s; "
                f"see {self._run_dir.logs / 'head_coordinator.log'}"
            ) from None
        finally:
            ended.cancel()
        endpoint = self._run_dir.read("endpoint.json")
        if endpoint is not None:
            self._client = ControlClient(endpoint["control"], credentials(self._run_dir.keys, PeerKind.CLIENT))

    def _sidecar_command(self) -> list[str]:
        return [sys.executable, "-m", "sidecars.node", "--run-dir", str(self._run_dir.path)]

    async def _keep_gateway(self) -> None:
        """Start the gateway again when it ends, a bounded number of times; forwarding has no state to lose."""
        for start in range(1 + GATEWAY_RESTARTS):
            process = await self._child("gateway", "relax_slurm.control.gateway_process")
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    process.terminate()
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(asyncio.shield(process.wait()), GRACE_SECONDS)
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
            self._run_dir.append_event({"event": "gateway_ended", "code": code, "start": start + 1})
        await self._ask_stop(f"the gateway ended {1 + GATEWAY_RESTARTS} times")

    async def _keep_step(self, node: str, runner: StepRunner) -> None:
        """Run the node's step; report its end; start it again when the coordinator wants that."""
        for start in range(1 + STEP_RESTARTS):
            if node in self._site.absent:
                code = -1
            else:
                process = await runner.start(node, self._run_dir.logs / f"{node}_sidecar.log")
                self._steps[node] = process
                code = await process.wait()
                del self._steps[node]
            self._run_dir.append_event({"event": "step_over", "node": node, "code": code, "start": start + 1})
            if self._ending.is_set():
                return
            proof = step_proof(self._proctrack, node_answered=await self._site.node_answers(node))
            answer = await self._tell("step_ended", node=node, returncode=code, proof=str(proof))
            if not answer.get("again") or node in self._site.absent:
                return

    async def _tell(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Tell the coordinator; an unreachable one is no reason to fall over, its own end will be seen."""
        if self._client is None:
            return {}
        try:
            return await self._client.request(kind, timeout_seconds=30.0, **fields)
        except (RemoteError, RelaxError) as error:
            log.warning("%s: %s", kind, error)
            return {}

    async def _ask_stop(self, reason: str) -> None:
        await self._tell("stop", reason=reason)

    def _on_signal(self, number: int, tasks: list[asyncio.Task[None]]) -> None:
        """Slurm's warning, scancel, or the user: an orderly stop. Again = the same stop."""
        name = signal.Signals(number).name
        self._run_dir.append_event({"event": "signal", "signal": name})
        tasks.append(asyncio.create_task(self._ask_stop(f"signal {name}")))

    async def _take_down(self, runner: StepRunner) -> None:
        """End what still runs: first asked, then made to."""
        for force in (False, True):
            left = dict(self._steps)
            if not left:
                return
            async with asyncio.TaskGroup() as group:
                for node, process in left.items():
                    group.create_task(runner.end(node, process, force=force))
            waits = [asyncio.create_task(process.wait()) for process in left.values()]
            await asyncio.wait(waits, timeout=GRACE_SECONDS)
            for wait in waits:
                wait.cancel()

    def _exit_code(self, coordinator_code: int) -> int:
        outcome = self._run_dir.read("outcome.json")
        if outcome is None:
            error = StartupFailed(
                f"the coordinator ended with code {coordinator_code} and left no outcome; "
                f"see {self._run_dir.logs / 'head_coordinator.log'}"
            )
            outcome = failed_outcome(self._run_dir, error)
            self._run_dir.write_json("outcome.json", outcome)
        return int(outcome["exit_code"])


async def supervise(run_dir: RunDir, backend: Backend) -> int:
    """Read the attempt's files and run it."""
    config = from_resolved((run_dir.path / "config.json").read_text())
    plan = from_json((run_dir.path / "plan.json").read_text())
    site: Site = (
        LocalSite(run_dir, config, plan) if backend is Backend.LOCAL else SlurmSite(run_dir, config, plan, os.environ)
    )
    return await Supervisor(run_dir, config, plan, site).run()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the batch script and of the local backend."""
    parser = argparse.ArgumentParser(prog="relax_slurm.control.supervisor")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--backend", choices=[str(entry) for entry in Backend], default=str(Backend.SLURM))
    arguments = parser.parse_args(argv)
    run_dir = RunDir(arguments.run_dir)
    logs.to_stderr("supervisor")
    end_with_parent()
    try:
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0:
            run_dir = run_dir.next_attempt()
        return asyncio.run(supervise(run_dir, Backend(arguments.backend)))
    except (RelaxError, OSError, ValueError) as error:
        failure = error if isinstance(error, RelaxError) else StartupFailed(f"supervisor: {error}")
        log.error("%s", failure.message)
        run_dir.write_json("outcome.json", failed_outcome(run_dir, failure))
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
