"""Start of the gateway process: discovery by subscription behind `gateway.app.Gateway`.

`python -m relax_slurm.control.gateway_process --run-dir DIR --socket FD`. It tells the coordinator where it listens,
and tells it again whenever the coordinator is a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from relax_slurm.config.load import from_resolved
from relax_slurm.config.models import RunConfig
from relax_slurm.control import logs
from relax_slurm.control.allocation import FILE, Allocation
from relax_slurm.control.external import external_keys
from relax_slurm.control.gateway_socket import url_of
from relax_slurm.control.run_dir import RunDir
from relax_slurm.core.placement_json import from_json
from relax_slurm.core.plan import InferencePlacementPlan, Role
from relax_slurm.errors import RelaxError, StartupFailed
from relax_slurm.forward.upstream import Upstream
from relax_slurm.gateway.app import Gateway
from relax_slurm.gateway.settings import GatewaySettings
from relax_slurm.gateway.sources import RenderSource, source_of
from relax_slurm.wire.client import ControlClient
from relax_slurm.wire.host import allow_many_files
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.parent import end_with_parent
from relax_slurm.wire.subscriber import DiscoverySubscriber

log = logging.getLogger(__name__)
STOP_SECONDS = 5.0
REGISTER_SECONDS = 1.0


async def serve(run_dir: RunDir, listener: socket.socket) -> int:
    """The whole life of a gateway; answers its exit code."""
    config = from_resolved((run_dir.path / "config.json").read_text())
    plan = from_json((run_dir.path / "plan.json").read_text())
    allocation = Allocation.model_validate_json((run_dir.path / FILE).read_text())
    endpoint = run_dir.read("endpoint.json")
    if endpoint is None:
        raise StartupFailed(f"{run_dir.path / 'endpoint.json'} is missing; the coordinator writes it first")
    keys = credentials(run_dir.keys, PeerKind.CLIENT)
    subscriber = DiscoverySubscriber(
        endpoint["control"],
        endpoint["discovery"],
        keys,
        [role.role for role in plan.roles],
        staleness_seconds=config.gateway.staleness_seconds,
    )
    subscriber.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    gateway = Gateway(subscriber, Upstream(), _settings(run_dir, config, plan))
    url = url_of(listener, allocation.head_address)
    await gateway.start(listener)
    log.info("gateway listens on %s", url)
    register = asyncio.create_task(_register(endpoint["control"], keys, url, subscriber))
    try:
        await stop.wait()
    finally:
        register.cancel()
        await asyncio.gather(register, return_exceptions=True)
        await gateway.stop(STOP_SECONDS)
        await subscriber.close()
    return 0


def _settings(run_dir: RunDir, config: RunConfig, plan: InferencePlacementPlan) -> GatewaySettings:
    wanted = config.gateway
    return GatewaySettings(
        token=run_dir.token_file.read_text().strip() if wanted.token else None,
        engine_key=run_dir.engine_key_file.read_text().strip(),
        roles=tuple(role.role for role in plan.roles),
        max_body_bytes=int(wanted.max_body_mb * (1 << 20)),
        deadline_seconds=wanted.deadline_seconds,
        doubt_seconds=wanted.doubt_seconds,
        staleness_seconds=wanted.staleness_seconds,
        judges=judges_of(plan),
        external_keys=external_keys(plan),
    )


def judges_of(plan: InferencePlacementPlan) -> dict[str, RenderSource | str]:
    """What the messages to each judge are rendered with."""
    role = plan.role(Role.GENRM)
    models = () if role is None else role.models
    return {
        model.name: source_of(model.model_path, model.engine_args)
        if model.model_path
        else "it is an external model without a model_path, so the engine alone knows its tokenizer"
        for model in models
    }


async def _register(control: str, keys: Any, url: str, subscriber: DiscoverySubscriber) -> None:
    """Tell every coordinator once, also one that was started again.

    Not before there is a view of every role: until then each request would be answered 503, and whoever waits for the
    run to be READY would take the URL for a promise.
    """
    while any(subscriber.current(role) is None for role in subscriber.states):
        await subscriber.changed()
    told = ""
    async with ControlClient(control, keys) as client:
        while True:
            try:
                epoch = (await client.request("ping", timeout_seconds=5.0))["epoch"]
                if epoch != told:
                    told = (await client.request("gateway_up", timeout_seconds=5.0, url=url))["epoch"]
            except RelaxError as error:
                log.warning("not registered yet: %s", error)
            await asyncio.sleep(REGISTER_SECONDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the supervisor starts it and starts it again when it ends."""
    parser = argparse.ArgumentParser(prog="relax_slurm.control.gateway_process")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--socket", type=int, required=True, help="inherited descriptor of the listening socket")
    arguments = parser.parse_args(argv)
    run_dir = RunDir(arguments.run_dir)
    logs.to_stderr("gateway")
    allow_many_files()
    end_with_parent()
    try:
        return uvloop.run(serve(run_dir, socket.socket(fileno=arguments.socket)))
    except RelaxError as error:
        log.error("%s", error.message)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
