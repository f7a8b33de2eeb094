"""Start of the coordinator process: read the run directory, bind the sockets, walk the run, write the outcome."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import signal
import sys
from pathlib import Path
from typing import Any

import uvloop

from relax_slurm.config.load import from_resolved
from relax_slurm.control import logs
from relax_slurm.control.allocation import FILE, Allocation
from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.head_ports import head_ports
from relax_slurm.control.lifecycle import walk
from relax_slurm.control.run_dir import AlreadyRunning, RunDir
from relax_slurm.core.placement_json import from_json
from relax_slurm.errors import EngineFailed, RelaxError, StartupFailed
from relax_slurm.wire.host import allow_many_files
from relax_slurm.wire.keys import allowed, read_pair
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.parent import end_with_parent, parent_gone
from relax_slurm.wire.server import ControlServer

log = logging.getLogger(__name__)
PROTOCOL = "RLX1"


async def serve(run_dir: RunDir) -> int:
    """The whole life of a coordinator; answers its exit code."""
    config = from_resolved((run_dir.path / "config.json").read_text())
    plan = from_json((run_dir.path / "plan.json").read_text())
    allocation = Allocation.model_validate_json((run_dir.path / FILE).read_text())
    with run_dir.coordinator_lock():
        epoch = run_dir.next_epoch()
        server = ControlServer(read_pair(run_dir.keys, PeerKind.COORDINATOR), allowed(run_dir.keys))
        earlier = run_dir.read("endpoint.json") or {}
        preferred = [port for port in (earlier.get("control_port"), earlier.get("discovery_port")) if port]
        host = allocation.head_address
        control, discovery = server.bind(host, head_ports(plan.ports.first, plan.ports.last, preferred))
        endpoint = {
            "protocol": PROTOCOL,
            "epoch": epoch,
            "control": f"tcp://{host}:{control}",
            "control_port": control,
            "discovery": f"tcp://{host}:{discovery}",
            "discovery_port": discovery,
        }
        coordinator = Coordinator(run_dir, config, plan, allocation, server, endpoint)
        loop = asyncio.get_running_loop()
        for number, reason in ((signal.SIGTERM, "the head node was told to end"), (signal.SIGINT, "interrupted")):
            loop.add_signal_handler(number, coordinator.request_stop, reason)
        coordinator.start()  # from here on others know us, and may tell us to end
        try:
            outcome = _in_good_order(await walk(coordinator))
            coordinator.record("outcome", **{key: outcome[key] for key in ("state", "exit_code", "reason")})
            # The outcome comes last: who waits for it finds every event written.
            await coordinator.events.flush()
            run_dir.write_outcome(outcome)
        finally:
            await coordinator.close()
    return int(outcome["exit_code"])


def _in_good_order(outcome: dict[str, Any]) -> dict[str, Any]:
    """The outcome, corrected when the TERM that ended us was the kernel's word that the supervisor had been killed."""
    if outcome["exit_code"] != 0 or not parent_gone():
        return outcome
    error = EngineFailed("the supervisor ended without taking the run down; the run was ended behind it")
    return outcome | {"state": "FAILED", "exit_code": error.exit_code, "error": error.as_json()}


def main(argv: list[str] | None = None) -> int:
    """`python -m relax_slurm.control.head --run-dir DIR`."""
    parser = argparse.ArgumentParser(prog="relax_slurm.control.head")
    parser.add_argument("--run-dir", type=Path, required=True)
    run_dir = RunDir(parser.parse_args(argv).run_dir)
    logs.to_stderr("coordinator")
    allow_many_files()
    end_with_parent()
    try:
        return uvloop.run(serve(run_dir))
    except AlreadyRunning as error:
        log.error("%s", error.message)
        return error.exit_code  # no outcome: it would be taken for that of the run which goes on
    except (RelaxError, OSError, ValueError) as error:
        failure = startup_failure("coordinator", error)
        log.error("%s", failure.message)
        run_dir.write_outcome(failed_outcome(run_dir, failure))
        return failure.exit_code


def startup_failure(process: str, error: RelaxError | OSError | ValueError) -> RelaxError:
    """Whatever ended a process of ours at its start, as one sentence; a full disk says what to do about it."""
    if isinstance(error, RelaxError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" {error.filename}" if error.filename else ""
        return StartupFailed(f"{process}: cannot write{where} ({error.strerror}); free space there and launch again")
    return StartupFailed(f"{process}: {error}")


def failed_outcome(run_dir: RunDir, error: RelaxError) -> dict[str, Any]:
    """The outcome of a run that did not get as far as having one."""
    return {
        "run": run_dir.run,
        "attempt": run_dir.attempt,
        "state": "FAILED",
        "exit_code": error.exit_code,
        "reason": "",
        "unproven": [],
        "error": error.as_json(),
    }


def stopped_outcome(run_dir: RunDir, reason: str) -> dict[str, Any]:
    """The outcome of a run that was told to end before anything of it was up."""
    return {
        "run": run_dir.run,
        "attempt": run_dir.attempt,
        "state": "STOPPED",
        "exit_code": 0,
        "reason": reason,
        "unproven": [],
    }


if __name__ == "__main__":
    sys.exit(main())
