"""Which SGLang arguments belong to the tool, and how the others become a command line.

SGLang arguments are written in YAML as a mapping. Spelling is free (`tp_size`, `tp-size`, `--tp-size`);
what is not owned here reaches SGLang untouched. SGLang's parser accepts shortened options, so a shortened
owned one is refused too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

ALIASES = {
    "tp": "tp_size",
    "tensor_parallel_size": "tp_size",
    "pp": "pp_size",
    "pipeline_parallel_size": "pp_size",
    "dp": "dp_size",
    "data_parallel_size": "dp_size",
    "ep": "ep_size",
    "expert_parallel_size": "ep_size",
    "model": "model_path",
}
"""Second names SGLang gives to the same argument."""

_PORTS = "ports come from the plan, so that engines on one node never collide"
_SHAPE = "it follows from pools and gpus_per_engine"
_GPUS = "GPUs come from the binding that was checked on the node"
_HTTP = "the guard in front of the engine speaks plain HTTP to it"
_KEYS = "the run makes its own key and gives it only to the guard"
OWNED: dict[str, str] = {
    "host": "the engine listens where only its guard reaches it",
    "port": _PORTS,
    "nccl_port": _PORTS,
    "dist_init_addr": _PORTS,
    "nccl_init_addr": _PORTS,
    "disaggregation_bootstrap_port": _PORTS,
    "nnodes": _SHAPE,
    "node_rank": _SHAPE,
    "base_gpu_id": _GPUS,
    "gpu_id_step": _GPUS,
    "disaggregation_mode": "use groups with worker_type prefill and decode",
    "model_path": "use the model's own key model_path",
    "served_model_name": "use the model's own key served_model_name",
    "enable_memory_saver": "it follows from the placement mode",
    "api_key": _KEYS,
    "admin_api_key": _KEYS,
    "config": "a second configuration file could change any owned argument",
    "fastapi_root_path": "the gateway owns the routes",
    "enable_metrics_for_all_schedulers": "metrics are collected from the engine's head",
    "grpc_mode": _HTTP,
    "smg_grpc_mode": _HTTP,
    "ssl_keyfile": _HTTP,
    "ssl_certfile": _HTTP,
    "use_ray": "engines are processes of the sidecar",
}
"""Arguments the tool sets itself, each with the reason that is shown when a run file sets it."""

_NOT_SHORTENED = {"dp", "ep", "pp", "tp", "model", "device", "enable_metrics"}
MAX_ARGUMENTS = 256


def canonical(key: str) -> str:
    """`--tp-size`, `tp-size` and `tensor_parallel_size` all become `tp_size`."""
    name = key.strip().lstrip("-").replace("-", "_")
    return ALIASES.get(name, name)


def owned_reason(key: str) -> str | None:
    """Why a run file may not set `key`, or None when it may."""
    name = canonical(key)
    if name in OWNED:
        return f"sets {name}, which the tool owns: {OWNED[name]}"
    if len(name) >= 3 and name not in _NOT_SHORTENED:
        for full, reason in OWNED.items():
            if full.startswith(name):
                return f"sets {name}, which SGLang reads as a shortened {full}; the tool owns that: {reason}"
    return None


def normalise(args: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with canonical keys. ValueError for owned, repeated or impossible keys."""
    if len(args) > MAX_ARGUMENTS:
        raise ValueError(f"has {len(args)} arguments; at most {MAX_ARGUMENTS} are accepted")
    result: dict[str, Any] = {}
    for key, value in args.items():
        name = canonical(key)
        if not name.isidentifier() or not name.isascii():
            raise ValueError(f"has the key {key!r}, which is not an argument name; write it like tp_size")
        reason = owned_reason(key)
        if reason:
            raise ValueError(f"{reason}; remove it")
        if name in result:
            raise ValueError(f"sets {name} twice under two spellings; keep one")
        result[name] = value
    for name in ("tp_size", "pp_size", "dp_size"):
        size = result.get(name, 1)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"has {name}: {size!r}; it must be a whole number of at least 1")
    return result


def to_argv(args: Mapping[str, Any]) -> list[str]:
    """The arguments as SGLang's command line takes them.

    true is a bare flag; false and null are left out; a list becomes several words; a mapping becomes JSON.
    """
    words: list[str] = []
    for key, value in args.items():
        if value is None or value is False:
            continue
        words.append("--" + key.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, (list, tuple)):
            words.extend(_word(entry) for entry in value)
        else:
            words.append(_word(value))
    return words


def _word(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"))
