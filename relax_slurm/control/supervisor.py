"""What Slurm (or the local backend) runs on the head node: it starts coordinator, gateway and node steps, and waits.

`python -m relax_slurm.control.supervisor --run-dir DIR --backend slurm|local`. It decides nothing about replicas: it
reports the end of a step to the coordinator, starts the step again when the coordinator says so, keeps the gateway
alive, and takes everything down when the coordinator is done. A signal (time limit, preemption, scancel) becomes a
stop.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from relax_slurm.children import end_child, signal_child
from relax_slurm.config.load import from_resolved
from relax_slurm.config.models import RunConfig
from relax_slurm.control import logs
from relax_slurm.control.allocation import FILE
from relax_slurm.control.gateway_socket import open_gateway_socket
from relax_slurm.control.head import failed_outcome, startup_failure, stopped_outcome
from relax_slurm.control.local_site import LocalSite
from relax_slurm.control.restarts import Restarts
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
from relax_slurm.wire.parent import PARENT_VARIABLE, end_with_parent

log = logging.getLogger(__name__)
COORDINATOR_UP_SECONDS = 120.0
"""Python and its packages may come from a slow shared file system."""
GATEWAY_RESTARTS = 5
STEP_RESTARTS = 3
TELL_SECONDS = 30.0
STOP_SECONDS = 10.0
LEAVING_SECONDS = 3.0
GRACE_SECONDS = 30.0
"""What a sidecar gets between being asked and being made to end: it ends its engines first."""


class Supervisor:
    """Children of one attempt."""

    def __init__(self, run_dir: RunDir, config: RunConfig, plan: InferencePlacementPlan, site: Site) -> None:
        self._run_dir, self._config, self._plan, self._site = run_dir, config, plan, site
        inherited = {name: value for name, value in os.environ.items() if name != PARENT_VARIABLE}
        self._environ = {**inherited, "RELAX_RUN_TAG": run_dir.tag, "PYTHONUNBUFFERED": "1"}
        self._client: ControlClient | None = None
        self._coordinator: Process | None = None
        self._ending = asyncio.Event()
        self._asked_to_end: str | None = None
        self._steps: dict[str, Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._proctrack = Proctrack.UNKNOWN

    async def run(self) -> int:
        """Start everything, wait for the coordinator, take everything down; answers the run's exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.add_signal_handler(number, self._on_signal, number)
        allocation = await self._site.allocate()
        self._proctrack = allocation.proctrack
        self._run_dir.write_json(FILE, allocation.model_dump(mode="json"))
        (self._run_dir.path / "outcome.json").unlink(missing_ok=True)
        listener = open_gateway_socket(self._config, self._plan, allocation.head_address)
        earlier = (self._run_dir.read("endpoint.json") or {}).get("epoch")
        coordinator = self._coordinator = await self._child("coordinator", "relax_slurm.control.head")
        runner = self._site.runner(self._environ, self._sidecar_command())
        try:
            if await self._endpoint(coordinator, earlier):
                self._spawn(self._keep_gateway(listener))
                for node in allocation.node_names:
                    self._spawn(self._keep_step(node, runner))
            code = await coordinator.wait()
        finally:
            self._ending.set()
            listener.close()
            await self._take_down(runner)
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if coordinator.returncode is None:
                signal_child(coordinator, signal.SIGKILL)
                await coordinator.wait()
            if self._client is not None:
                self._client.close()
        return self._exit_code(code)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run as a task; a fault in it ends the run instead of leaving it without what the task keeps."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            log.error("a task of the supervisor failed", exc_info=fault)
            if not self._ending.is_set():
                self._spawn(self._ask_stop(f"supervisor: {type(fault).__name__}: {fault}", failed=True))

    # --- children -------------------------------------------------------------------------------------------

    async def _child(self, name: str, module: str, *words: str, pass_fds: Sequence[int] = ()) -> Process:
        """One of our own head-node processes, with its own log file and tied to our life."""
        argv = [sys.executable, "-m", module, "--run-dir", str(self._run_dir.path), *words]
        with logs.open_log(self._run_dir.logs / f"head_{name}.log") as output:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=pass_fds,
                env={**self._environ, PARENT_VARIABLE: str(os.getpid())},
            )

    async def _endpoint(self, coordinator: Process, earlier: str | None) -> bool:
        """Wait for this coordinator's addresses, not those of an earlier start; False when it ended instead."""
        deadline = time.monotonic() + COORDINATOR_UP_SECONDS
        while coordinator.returncode is None:
            endpoint = self._run_dir.read("endpoint.json")
            if endpoint is not None and endpoint.get("epoch") != earlier:
                keys = credentials(self._run_dir.keys, PeerKind.CLIENT)
                self._client = ControlClient(endpoint["control"], keys)
                return True
            if time.monotonic() > deadline:
                raise StartupFailed(
                    f"the coordinator wrote no endpoint.json within {COORDINATOR_UP_SECONDS:g} s; "
                    f"see {self._run_dir.logs / 'head_coordinator.log'}"
                )
            await asyncio.sleep(0.02)
        return False

    def _sidecar_command(self) -> list[str]:
        return [sys.executable, "-m", "sidecars.node", "--run-dir", str(self._run_dir.path)]

    async def _keep_gateway(self, listener: socket.socket) -> None:
        """Start the gateway again when it ends, a bounded number of times; forwarding has no state to lose.

        The socket stays ours, so a new gateway goes on where the old one was.
        """
        restarts = Restarts(GATEWAY_RESTARTS)
        fd = listener.fileno()
        while True:
            module = "relax_slurm.control.gateway_process"
            process = await self._child("gateway", module, "--socket", str(fd), pass_fds=(fd,))
            try:
                code = await process.wait()
            finally:
                await end_child(process)
            self._run_dir.append_event({"event": "gateway_ended", "code": code, "final": restarts.last})
            if restarts.last:
                break
            await restarts.again()
        path = self._run_dir.logs / "head_gateway.log"
        await self._ask_stop(
            f"the gateway ended {1 + GATEWAY_RESTARTS} times with code {code}; see {path}", failed=True
        )

    async def _keep_step(self, node: str, runner: StepRunner) -> None:
        """Run the node's step; report its end; start it again when the coordinator wants that."""
        restarts = Restarts(0 if node in self._site.absent else STEP_RESTARTS)
        while True:
            code = await self._step(node, runner)
            self._run_dir.append_event({"event": "step_over", "node": node, "code": code, "final": restarts.last})
            if self._ending.is_set():
                return
            proof = step_proof(self._proctrack, node_answered=await self._site.node_answers(node))
            answer: dict[str, Any] | None = None
            while answer is None and not self._ending.is_set():
                # Until it is heard: a coordinator that never learns of it waits for the node for ever.
                answer = await self._tell(
                    "step_ended", node=node, returncode=code, proof=str(proof), final=restarts.last
                )
            if answer is None or not answer.get("again"):
                return
            await restarts.again()

    async def _step(self, node: str, runner: StepRunner) -> int:
        """One life of a node's step; its exit code, -1 when it could not be started."""
        if node in self._site.absent:
            return -1
        try:
            process = await runner.start(node, self._run_dir.logs / f"{node}_sidecar.log")
        except OSError as error:
            self._run_dir.append_event({"event": "step_failed", "node": node, "reason": str(error)})
            log.error("the step of node %s cannot be started: %s", node, error)
            return -1
        self._steps[node] = process
        try:
            return await process.wait()
        finally:
            del self._steps[node]

    # --- the coordinator ------------------------------------------------------------------------------------

    async def _tell(self, kind: str, seconds: float = TELL_SECONDS, **fields: Any) -> dict[str, Any] | None:
        """Tell the coordinator; None when it does not answer, which is no reason to fall over: its end will be seen."""
        if self._client is None:
            return None
        try:
            return await self._client.request(kind, timeout_seconds=seconds, **fields)
        except RemoteError as error:
            log.warning("%s: %s", kind, error)
            return {}  # it has heard
        except RelaxError as error:
            log.warning("%s: %s", kind, error)
            return None

    async def _ask_stop(self, reason: str, *, failed: bool = False) -> None:
        """Ask for the end of the run, with signals where no message arrives: a coordinator that hangs is ended."""
        answer = await self._tell("stop", STOP_SECONDS, reason=reason, failed=failed)
        if answer is None and self._coordinator is not None:
            await end_child(self._coordinator, GRACE_SECONDS)

    def _on_signal(self, number: int) -> None:
        """Slurm's warning, scancel, or the user: an orderly stop. Again = the same stop."""
        name = signal.Signals(number).name
        self._run_dir.append_event({"event": "signal", "signal": name})
        if self._coordinator is None:
            raise SystemExit(128 + number)  # nothing runs yet, so there is nothing to end in order
        self._asked_to_end = f"signal {name}"
        self._spawn(self._ask_stop(self._asked_to_end))

    async def _take_down(self, runner: StepRunner) -> None:
        """End what still runs: some were sent home and leave by themselves, others are asked, then made to."""
        for force, seconds in ((None, LEAVING_SECONDS), (False, GRACE_SECONDS), (True, GRACE_SECONDS)):
            left = dict(self._steps)
            if not left:
                return
            if force is not None:
                await runner.end(left, force=force)
            waits = [asyncio.create_task(process.wait()) for process in left.values()]
            await asyncio.wait(waits, timeout=seconds)
            for wait in waits:
                wait.cancel()

    def _exit_code(self, coordinator_code: int) -> int:
        outcome = self._run_dir.read("outcome.json")
        if outcome is None and self._asked_to_end is not None and coordinator_code < 0 and self._client is None:
            # It was told to end before it could write down where it is, so no node was started either.
            outcome = stopped_outcome(self._run_dir, self._asked_to_end)
            self._run_dir.write_outcome(outcome)
        if outcome is None:
            error = StartupFailed(
                f"the coordinator ended with code {coordinator_code} and left no outcome; "
                f"see {self._run_dir.logs / 'head_coordinator.log'}"
            )
            outcome = failed_outcome(self._run_dir, error)
            self._run_dir.write_outcome(outcome)
        return int(outcome["exit_code"])


async def supervise(run_dir: RunDir, backend: Backend) -> int:
    """Read the attempt's files and run it."""
    config = from_resolved((run_dir.path / "config.json").read_text())
    plan = from_json((run_dir.path / "plan.json").read_text())
    site: Site = (
        LocalSite(run_dir, config, plan) if backend is Backend.LOCAL else SlurmSite(run_dir, config, plan, os.environ)
    )
    return await Supervisor(run_dir, config, plan, site).run()


def attempt_of(run_dir: RunDir, environ: dict[str, str]) -> RunDir:
    """Where this start belongs: a job that Slurm started again gets a new attempt, unless the first never ran."""
    restarted = environ.get("SLURM_RESTART_COUNT", "0")
    again = restarted.isdigit() and int(restarted) > 0 and (run_dir.path / FILE).exists()
    return run_dir.next_attempt() if again else run_dir


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
        run_dir = attempt_of(run_dir, dict(os.environ))
        return asyncio.run(supervise(run_dir, Backend(arguments.backend)))
    except (RelaxError, OSError, ValueError) as error:
        failure = startup_failure("supervisor", error)
        log.error("%s", failure.message)
        run_dir.write_outcome(failed_outcome(run_dir, failure))
        return failure.exit_code


if __name__ == "__main__":
    sys.exit(main())
