"""The complete command line and environment of one engine process.

Written for SGLang 0.5.23 and valid for 0.5.12. Three rules are kept here:

* Flags that the tool owns cannot be passed through: two writers of `--port` would mean that the plan lies.
* Keys never stand in argv, where every user of the machine can read them. SGLang has no environment variable
  for them, but reads any flag out of a YAML file (`--config`); the file is private and is deleted once the
  engine is up. The simulator takes them from its environment, which the kernel shows to the same user only.
* Every port is named. Without `--dist-init-addr` an engine with DP attention invents ports next to its HTTP
  port.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_slurm.config.engine_args import normalise, to_argv
from relax_slurm.core.engine_spec import spec_for
from relax_slurm.core.plan import WorkerType
from relax_slurm.errors import ConfigError
from relax_slurm.slurm.container import engine_environment, own_mounts, wrap
from sidecars.worker import WorkerSpec

RUN_TAG = "RELAX_RUN_TAG"
WORKER_TAG = "RELAX_WORKER_TAG"

_NOT_INHERITED = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "RELAX_")
"""Prefixes of variables that describe the sidecar's own Slurm step or run; everything else a site sets
goes on.
"""


@dataclass(frozen=True, slots=True)
class PrivateFile:
    """A file the process reads at its start and nobody else may read."""

    path: Path
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What to execute. `env` is the complete environment; `private` must exist before the process starts."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    private: PrivateFile | None = None


def build(worker: WorkerSpec, environ: Mapping[str, str] | None = None) -> CommandLine:
    """The command line of `worker`. `environ` is what the engine inherits, less what describes our own step.

    Raises `ConfigError` for an engine argument that the tool owns or that no flag can carry.
    """
    inherited = os.environ if environ is None else environ
    env = {key: value for key, value in inherited.items() if not key.startswith(_NOT_INHERITED)}
    env.update(worker.env)
    env.update(_owned_environment(worker))
    arguments = _arguments(worker)
    if worker.program == "sim":
        return _contained(worker, _sim(worker, arguments, env))
    private = _key_file(worker)
    argv = [worker.python, "-m", "sglang.launch_server"]
    if private is not None:
        argv += ["--config", str(private.path)]
    return _contained(worker, CommandLine(tuple(argv + arguments), env, private))


def _contained(worker: WorkerSpec, line: CommandLine) -> CommandLine:
    """The same inside the worker's container, if it has one."""
    if worker.container is None:
        return line
    env = engine_environment(line.env, worker.env)
    if worker.container.gpus:
        env["NVIDIA_VISIBLE_DEVICES"] = "all"  # enroot's hook; the mask stays CUDA_VISIBLE_DEVICES
    run_dir = Path(worker.log_path).parent.parent
    return CommandLine(tuple(wrap(worker.container, line.argv, env, own_mounts(run_dir))), env, line.private)


def _arguments(worker: WorkerSpec) -> list[str]:
    try:
        given = normalise(worker.engine_args)
    except ValueError as error:
        raise ConfigError(f"{worker.role}/{worker.model}: engine_args {error}") from error
    if worker.memory_saver:
        given = {**spec_for(worker.role, worker.weight_source).overrides, **given}
    if worker.gpus and "tp_size" not in given:
        given["tp_size"] = len(worker.gpus) * worker.nnodes // int(given.get("pp_size", 1))
    ports = worker.ports
    owned: dict[str, Any] = {
        "model_path": worker.model_path,
        "served_model_name": worker.served_model_name,
        "host": worker.host,
        "port": ports.http,
        "nccl_port": ports.nccl,
        "dist_init_addr": _endpoint(worker.rendezvous_host, ports.rendezvous),
        "nnodes": worker.nnodes,
        "node_rank": worker.node_rank,
        "enable_memory_saver": worker.memory_saver,
    }
    if worker.worker_type in {WorkerType.PREFILL, WorkerType.DECODE}:
        owned["disaggregation_mode"] = worker.worker_type.value
    if worker.worker_type is WorkerType.PREFILL:
        owned["disaggregation_bootstrap_port"] = ports.bootstrap
    return to_argv({**owned, **given})


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _owned_environment(worker: WorkerSpec) -> dict[str, str]:
    loopback = ["127.0.0.1", "localhost", "::1", worker.host, worker.rendezvous_host]
    no_proxy = ",".join(dict.fromkeys(loopback))
    env = {
        RUN_TAG: worker.run_tag,
        WORKER_TAG: worker.worker_id,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(worker.gpus),
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
        # /health then only says that the process serves; the default generates a token, which a paused engine
        # cannot.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # Engine children rename themselves; without this they overwrite the tags in their /proc/PID/environ.
        "SPT_NOENV": "1",
    }
    if worker.memory_saver:
        env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "true"
    return env


def _key_file(worker: WorkerSpec) -> PrivateFile | None:
    keys = {"api-key": worker.api_key, "admin-api-key": worker.admin_key}
    present = {key: value for key, value in keys.items() if value}
    if not present:
        return None
    # JSON is YAML, and SGLang insists on the suffix.
    return PrivateFile(Path(worker.log_path).with_suffix(".keys.yaml"), json.dumps(present).encode())


def _sim(worker: WorkerSpec, arguments: list[str], env: dict[str, str]) -> CommandLine:
    options = {
        "role": worker.role.value,
        "gpus": list(worker.gpu_indexes),
        "owner": worker.worker_id,
        **worker.sim,
    }
    env["RELAX_SIM_OPTIONS"] = json.dumps(options, sort_keys=True)
    if worker.api_key:
        env["RELAX_SIM_API_KEY"] = worker.api_key
    if worker.admin_key:
        env["RELAX_SIM_ADMIN_KEY"] = worker.admin_key
    return CommandLine((worker.python, "-m", "sidecars.sim", *arguments), env)
