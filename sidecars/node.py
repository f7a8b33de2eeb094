"""The node daemon: one per node, owner of the node's engines and of their admission guards.

`python -m sidecars.node --run-dir DIR` inside a Slurm step, with `--node` and `--virtual` for a virtual node. It says
what the node has, does what the coordinator asks, tells what happens, and holds every guard by its own deadline
when the head node falls silent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from relax_slurm.core.placement_json import from_json
from relax_slurm.errors import RelaxError, StartupFailed
from relax_slurm.forward.upstream import Upstream
from relax_slurm.wire.client import SidecarLink
from relax_slurm.wire.host import allow_many_files, ephemeral_range
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.parent import end_with_parent
from sidecars.daemon import NodeDaemon
from sidecars.hosted import HostSettings
from sidecars.port_block import take_port_block
from sidecars.probe import VirtualNode, probe
from sidecars.sweep import sweep

log = logging.getLogger(__name__)
ENDPOINT_SECONDS = 60.0
FAREWELL_SECONDS = 1.0


def _endpoint(run_dir: Path) -> dict[str, Any]:
    """The coordinator's addresses; the file is there before a sidecar is started, shared file systems may lag."""
    deadline = time.monotonic() + ENDPOINT_SECONDS
    while True:
        try:
            found: dict[str, Any] = json.loads((run_dir / "endpoint.json").read_text())
            return found
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise StartupFailed(f"cannot read {run_dir / 'endpoint.json'} on this node: {error}") from None
            time.sleep(0.1)


async def serve(run_dir: Path, virtual: VirtualNode | None) -> int:
    """The whole life of a sidecar; answers its exit code."""
    endpoint = _endpoint(run_dir)
    plan = from_json((run_dir / "plan.json").read_text())
    host, port = str(endpoint["control"]).removeprefix("tcp://").rsplit(":", 1)
    run_tag = os.environ.get("RELAX_RUN_TAG", str(run_dir))
    node = virtual.name if virtual is not None else os.environ.get("SLURMD_NODENAME", "")
    swept = await sweep(run_tag, node)
    if swept:
        log.warning("ended %d processes that an earlier sidecar of this node left: %s", len(swept), swept)
    try:
        block = take_port_block(plan.ports, ephemeral=ephemeral_range())
        busy: Sequence[int] = ()
    except StartupFailed as error:
        # Reported, so that the binding can name the ports in its table.
        log.error("%s", error.message)
        block, busy = None, error.detail.get("busy", ())
    report = probe(os.environ, virtual=virtual, head=(host, int(port)), port_block=block, busy_ports=busy)
    settings = HostSettings(
        run_tag=run_tag,
        node=report.node,
        logs=run_dir / "logs",
        ledger=run_dir.parent / "ledger",
        guard_key=(run_dir / "keys" / "engine.token").read_text().strip(),
        upstream=Upstream(),
    )
    link = SidecarLink(endpoint["control"], credentials(run_dir / "keys", PeerKind.SIDECAR))
    attempt = int(run_dir.name.rpartition("_")[2])
    daemon = NodeDaemon(report.node, attempt, report.to_wire(), link, settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, daemon.leaving.set)
    try:
        await daemon.run()
    finally:
        link.close(FAREWELL_SECONDS)
        await settings.upstream.close()
        if block is not None:
            block.close()
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of a node's step."""
    parser = argparse.ArgumentParser(prog="sidecars.node")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node", default=None, help="name of a virtual node")
    parser.add_argument("--virtual", default=None, help="what the virtual node pretends to have, as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    end_with_parent()
    allow_many_files()
    virtual = None
    if arguments.virtual is not None:
        told = json.loads(arguments.virtual)
        virtual = VirtualNode(told["name"], tuple(told["gpus"]), told.get("mask"), told.get("simulated", True))
    try:
        return uvloop.run(serve(arguments.run_dir, virtual))
    except RelaxError as error:
        log.error("%s", error.message)
        return error.exit_code
    except (OSError, ValueError) as error:
        log.error("the sidecar cannot run here: %s", error)
        return StartupFailed.exit_code


if __name__ == "__main__":
    sys.exit(main())
