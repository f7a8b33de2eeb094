"""The process of one sglang-router: its command line, its environment, its ports, its log."""

from __future__ import annotations

import asyncio
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relax_slurm.config.models import RouterConfig, RunConfig
from relax_slurm.control.logs import open_log
from relax_slurm.control.router_starter import KEY_VARIABLE
from relax_slurm.core.plan import ModelPlan, WorkerType
from relax_slurm.errors import StartupFailed
from relax_slurm.wire.parent import PARENT_VARIABLE

STARTER = Path(__file__).with_name("router_starter.py")
METRICS_HOST = "127.0.0.1"
HEALTH = {"interval": 2, "timeout": 2}
"""Seconds; the router's own look at its engines. Its defaults keep a dead engine for three minutes."""
REGISTER_SECONDS = 30
"""How long the router may try to reach an engine that is being registered."""
GRACE_SECONDS = 5
"""What running requests get when the router is told to end; the engines have drained before."""
_PROXIES = frozenset({"http_proxy", "https_proxy", "all_proxy", "no_proxy"})


@dataclass(frozen=True, slots=True)
class RouterProgram:
    """How the router of one model is started. `log` is appended to."""

    model: str
    python: str
    host: str
    ports: tuple[int, ...]
    """Where it may listen, in order of preference."""
    log: Path
    key: str = field(repr=False)
    settings: RouterConfig
    disaggregated: bool
    request_seconds: float
    max_body_mb: float

    @classmethod
    def of(
        cls, model: ModelPlan, config: RunConfig, *, host: str, ports: Iterable[int], logs: Path, key: str
    ) -> RouterProgram:
        """The program for a model of the plan."""
        engine = config.engine
        return cls(
            model=model.name,
            python=engine.router_python or engine.python or sys.executable,
            host=host,
            ports=tuple(ports),
            log=logs / f"head_router_{model.name}.log",
            key=key,
            settings=config.roles[model.role.value].models[model.name].router,
            disaggregated=is_disaggregated(model),
            request_seconds=config.gateway.deadline_seconds,
            max_body_mb=config.gateway.max_body_mb,
        )

    def arguments(self, port: int, metrics_port: int) -> list[str]:
        """Everything but the key. Nothing is repeated and nothing is broken off: the caller decides about both."""
        own = {
            "--host": self.host,
            "--port": port,
            "--prometheus-host": METRICS_HOST,
            "--prometheus-port": metrics_port,
            "--policy": self.settings.policy,
            "--request-timeout-secs": math.ceil(self.request_seconds),
            "--max-payload-size": int(self.max_body_mb * (1 << 20)),
            "--health-check-interval-secs": HEALTH["interval"],
            "--health-check-timeout-secs": HEALTH["timeout"],
            "--health-failure-threshold": 2,
            "--health-success-threshold": 1,
            "--worker-startup-timeout-secs": REGISTER_SECONDS,
            "--worker-startup-check-interval": 1,
            "--shutdown-grace-period-secs": GRACE_SECONDS,
            "--log-level": "warn",
        }
        words = [word for option, value in own.items() for word in (option, str(value))]
        words += ["--disable-retries", "--disable-circuit-breaker"]
        if self.disaggregated:
            words.append("--pd-disaggregation")
        return words + list(self.settings.extra_args)

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Ours, without proxies: the router speaks to engines of the run and to nobody else."""
        env = {name: value for name, value in environ.items() if name.lower() not in _PROXIES}
        env.pop(PARENT_VARIABLE, None)
        # It would ask the hub for the tokenizer of every engine; what passes through it is text or ids already.
        return {"HF_ENDPOINT": "http://127.0.0.1:9", "RUST_BACKTRACE": "0", **env, KEY_VARIABLE: self.key}

    async def start(self, port: int, metrics_port: int) -> asyncio.subprocess.Process:
        """Start it. `StartupFailed` when there is no such interpreter."""
        argv = [self.python, str(STARTER), str(os.getpid()), *self.arguments(port, metrics_port)]
        with open_log(self.log) as output:
            try:
                return await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self.environment(os.environ),
                )
            except OSError as error:
                raise self.missing(error.strerror or str(error)) from None

    def missing(self, why: str) -> StartupFailed:
        """The error for an interpreter that cannot start a router."""
        return StartupFailed(
            f"the router of model {self.model} cannot be started with {self.python} ({why}); install it there "
            "(pip install 'sglang-router>=0.3.2') or name an interpreter that has it in engine.router_python"
        )

    def choose_ports(self, taken: Iterable[int]) -> tuple[int, int]:
        """Two ports that are free now: for requests and for metrics. `StartupFailed` when there are none."""
        used = set(taken)
        found: list[int] = []
        # The listener for requests may take a port on which old connections linger; the one for metrics may not.
        for host, lingering in ((self.host, True), (METRICS_HOST, False)):
            free = (port for port in self.ports if port not in used and is_free(host, port, lingering=lingering))
            port = next(free, None)
            if port is None:
                raise StartupFailed(
                    f"the router of model {self.model} found no free port on {host} in the head's part of the window "
                    f"({min(self.ports)}-{max(self.ports)}); free some or choose another window in ports"
                )
            used.add(port)
            found.append(port)
        return found[0], found[1]


def is_disaggregated(model: ModelPlan) -> bool:
    """Whether the model has prefill and decode engines."""
    return any(replica.worker_type in {WorkerType.PREFILL, WorkerType.DECODE} for replica in model.replicas)


def is_free(host: str, port: int, *, lingering: bool) -> bool:
    """Whether one could listen there now; with `lingering` also where ended connections are remembered."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(lingering))
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def url_of(host: str, port: int) -> str:
    """Base URL of a port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
