"""Where settings come from besides the run file: `--set`, the environment, the cluster file; and how they
are merged."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_slurm.config.engine_args import canonical
from relax_slurm.config.explain import Path, dotted, has_part
from relax_slurm.config.hints import hint, nearest
from relax_slurm.config.models import RunConfig
from relax_slurm.config.yaml_text import MAX_DEPTH, parse
from relax_slurm.errors import ConfigError

CLUSTER_FILE = "RELAX_CLUSTER_FILE"
CLUSTER_KEYS = (
    "slurm",
    "head",
    "engine",
    "gateway",
    "control",
    "ports",
    "local",
    "job_shape",
    "runs_root",
)
"""Top-level keys a cluster file may have: what describes a site, never what a run is."""
TOP_LEVEL_VARIABLES = {"RELAX_RUNS_ROOT": "runs_root", "RELAX_JOB_SHAPE": "job_shape"}
OUR_OWN = frozenset(
    {
        "RELAX_NODE",
        "RELAX_PARENT_PID",
        "RELAX_ROUTER_KEY",
        "RELAX_RUN_TAG",
        "RELAX_SIM_ADMIN_KEY",
        "RELAX_SIM_API_KEY",
        "RELAX_SIM_OPTIONS",
        "RELAX_WORKER_TAG",
    }
)
"""What the tool sets for its own children: no settings, and there when a launch runs inside a run."""
TEST_PREFIX = "RELAX_TEST_"
_SEGMENT = re.compile(r'"([^"]+)"|([^".\s]+)')


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings of one source. `label` is what an error calls it."""

    label: str
    data: dict[str, Any]


def from_flags(settings: Sequence[str]) -> list[Layer]:
    """`a.b=c` per flag, weakest first. The value is YAML; a name with dots is quoted:
    `models."qwen2.5".gpus=4`."""
    layers = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting[:80]}: no '=' in it; write --set key.path=value")
        path = _split(key.strip())
        if path is None:
            raise ConfigError(f"--set {setting[:80]}: '{key[:80]}' is not a key path; write it like slurm.partition")
        layers.append(Layer("--set", _nest(path, parse(value, f"--set {key.strip()}"))))
    return layers


def from_environment(environ: Mapping[str, str]) -> list[Layer]:
    """`RELAX_SLURM__PARTITION=main` sets `slurm.partition`; the two plain names are in `TOP_LEVEL_VARIABLES`.

    Variables whose first part is no section are somebody else's and are left alone, unless they are so near to one of
    ours that they are probably meant (`check_variable`).
    """
    layers = []
    for variable in sorted(environ):
        check_variable(variable)
        if variable in TOP_LEVEL_VARIABLES:
            path: tuple[str, ...] = (TOP_LEVEL_VARIABLES[variable],)
        elif variable.startswith("RELAX_") and "__" in variable:
            path = tuple(variable.removeprefix("RELAX_").lower().split("__"))
            if path[0] not in RunConfig.model_fields or not all(path):
                continue
        else:
            continue
        value = environ[variable]
        text = variable in TOP_LEVEL_VARIABLES
        layers.append(Layer(f"${variable}", _nest(path, value if text else parse(value, f"${variable}"))))
    return layers


def check_variable(variable: str) -> None:
    """`ConfigError` for a misspelt setting: read as somebody else's it would silently do nothing."""
    if not variable.startswith("RELAX_") or variable in OUR_OWN or variable.startswith(TEST_PREFIX):
        return
    if variable in TOP_LEVEL_VARIABLES or variable == CLUSTER_FILE:
        return
    name = variable.removeprefix("RELAX_").lower()
    section, double, _ = name.partition("__")
    if double and section in RunConfig.model_fields:
        return  # an unknown key in it is found when the config is validated
    meant = _meant(variable, name, section if double else None)
    if meant is not None:
        raise ConfigError(
            f"${variable}: no such setting, so it would do nothing; did you mean {meant}? Rename it, or unset it "
            f"if it is not for relax-slurm"
        )


def _meant(variable: str, name: str, section: str | None) -> str | None:
    """The setting that a variable is near to. Short sections want a nearer spelling than whole names."""
    if section is not None:
        close = nearest(section, RunConfig.model_fields, cutoff=0.8)
        return None if close is None else f"RELAX_{close.upper()}__…"
    for key, field in RunConfig.model_fields.items():
        fields = getattr(field.annotation, "model_fields", {})
        rest = name.removeprefix(f"{key}_")
        if rest != name and rest in fields:
            return f"RELAX_{key.upper()}__{rest.upper()} (two underscores between section and key)"
    return nearest(variable, (*TOP_LEVEL_VARIABLES, CLUSTER_FILE), cutoff=0.8)


def check_cluster_keys(data: dict[str, Any], label: str) -> None:
    """A cluster file describes the site only."""
    for key in data:
        if key in CLUSTER_KEYS:
            continue
        if key in RunConfig.model_fields:
            raise ConfigError(
                f"{label}:{key}: the key '{key}' belongs in a run file, not in a cluster file; move it there "
                f"(a cluster file has {', '.join(CLUSTER_KEYS)})"
            )
        raise ConfigError(f"{label}:{key}: unknown key '{key}' at the top level; {hint(key, CLUSTER_KEYS)}")


def merge(layers: Sequence[Layer]) -> dict[str, Any]:
    """All layers, weakest first, as one mapping. Mappings merge key by key; anything else is replaced
    whole."""
    result: dict[str, Any] = {}
    for layer in layers:
        _merge(result, layer.data, layer.label, ())
    return result


def label_of(layers: Sequence[Layer], path: Path, default: str) -> str:
    """The label of the strongest layer that has a value at `path`, else `default`."""
    for layer in reversed(layers):
        node: Any = layer.data
        for part in path:
            if not has_part(node, part):
                break
            node = node[part]
        else:
            if path:
                return layer.label
    return default


def _merge(target: dict[str, Any], source: dict[str, Any], label: str, path: tuple[str, ...]) -> None:
    if len(path) > MAX_DEPTH:
        raise ConfigError(f"{label}: nested too deeply; at most {MAX_DEPTH} levels are read")
    for key, value in source.items():
        if path and path[-1] == "engine_args":
            for known in [other for other in target if other != key and canonical(other) == canonical(key)]:
                del target[known]  # the same argument, spelt differently in the weaker layer
        current = target.get(key)
        if isinstance(value, dict):
            if current is not None and not isinstance(current, dict):
                where = f"{label}:{dotted((*path, key))}"
                raise ConfigError(f"{where}: sets keys inside a value that is no mapping; set the whole value")
            nested = dict(current) if current else {}
            _merge(nested, value, label, (*path, key))
            target[key] = nested
        else:
            target[key] = value


def _split(key: str) -> tuple[str, ...] | None:
    parts: list[str] = []
    position = 0
    while True:
        match = _SEGMENT.match(key, position)
        if not match:
            return None
        parts.append(match.group(1) or match.group(2))
        position = match.end()
        if position == len(key):
            return tuple(parts) if len(parts) <= MAX_DEPTH else None
        if key[position] != ".":
            return None
        position += 1


def _nest(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for part in reversed(path[1:]):
        value = {part: value}
    return {path[0]: value}
