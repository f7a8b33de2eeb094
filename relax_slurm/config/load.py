"""Run file, cluster file, environment and flags to one `RunConfig`. Every mistake is a `ConfigError` (exit
2).

Precedence, strongest first: `--set`, `RELAX_…` variables, run file, cluster file, defaults.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from relax_slurm.config import layers as sources
from relax_slurm.config.explain import config_error
from relax_slurm.config.layers import CLUSTER_FILE, Layer
from relax_slurm.config.models import RunConfig
from relax_slurm.config.yaml_text import MAX_BYTES, parse
from relax_slurm.errors import ConfigError


def load(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig:
    """Reads and validates a run file.

    `overrides` are the texts of `--set` (`a.b=c`); `environ` defaults to this process's environment. The
    cluster file is named by `--set cluster=`, `RELAX_CLUSTER_FILE` or the run file's `cluster`, in that
    order.
    """
    variables = os.environ if environ is None else environ
    label = os.fspath(path)
    run = Layer(label, _mapping(label, label))
    _check_is_run_file(run)
    strong = [*sources.from_environment(variables), *sources.from_flags(overrides)]
    cluster_path = _cluster_path(run, strong, variables)
    weak: list[Layer] = []
    if cluster_path is not None:
        data = _mapping(cluster_path, cluster_path)
        sources.check_cluster_keys(data, cluster_path)
        weak.append(Layer(cluster_path, data))
    every = [*weak, run, *strong]
    merged = sources.merge(every)
    if cluster_path is not None:
        merged["cluster"] = os.path.abspath(cluster_path)
    return _validate(merged, every, label)


def _check_is_run_file(run: Layer) -> None:
    """A cluster file given as run file is told apart by what it lacks: everything that a run is."""
    needed = ("name", "placement", "pools", "roles")
    if run.data and not any(key in run.data for key in needed) and set(run.data) <= set(sources.CLUSTER_KEYS):
        raise ConfigError(
            f"{run.label}: this is a cluster file (it has only {', '.join(run.data)}); a run file has "
            f"{', '.join(needed)}. Name it in a run file as `cluster: {os.path.basename(run.label)}`, or in "
            f"${CLUSTER_FILE}"
        )


def from_mapping(data: Mapping[str, Any], label: str = "config") -> RunConfig:
    """Validates values that are already in memory; lists and tuples are both fine."""
    plain = json.loads(json.dumps(data))
    return _validate(plain, [Layer(label, plain)], label)


def from_resolved(text: str, label: str = "config.json") -> RunConfig:
    """Reads what `RunConfig.resolved_json()` wrote; nothing is merged, so the result is the config that was
    written."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: not the JSON this tool wrote ({str(error)[:100]}); restore it") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{label}: not the JSON this tool wrote (no object); restore it")
    return _validate(data, [Layer(label, data)], label)


def _validate(data: dict[str, Any], layers: Sequence[Layer], label: str) -> RunConfig:
    try:
        # JSON mode is the one in which strict typing still takes lists for tuples and text for literals.
        return RunConfig.model_validate_json(json.dumps(data))
    except ValidationError as error:
        raise config_error(error, RunConfig, data, lambda path: sources.label_of(layers, path, label)) from None


def _cluster_path(run: Layer, strong: Sequence[Layer], variables: Mapping[str, str]) -> str | None:
    for layer in reversed(strong):
        if "cluster" in layer.data:
            return _as_path(layer.data["cluster"], layer.label)
    if variables.get(CLUSTER_FILE):
        return variables[CLUSTER_FILE]
    named = _as_path(run.data.get("cluster"), run.label)
    if named is None:
        return None
    return os.fspath(Path(run.label).parent / Path(named).expanduser())


def _as_path(value: Any, label: str) -> str | None:
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{label}:cluster: seen {str(value)[:80]!r}, wanted the path of a cluster file; correct it")


def _mapping(path: str, label: str) -> dict[str, Any]:
    value = parse(_read(path, label), label)
    if value is None:
        raise ConfigError(f"{label}: the file is empty; a run file needs at least name, placement, pools and roles")
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else f"the single value {str(value)[:60]!r}"
        raise ConfigError(f"{label}: the file holds {kind}; wanted a mapping such as `name: my-run`")
    return value


def _read(path: str, label: str) -> str:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{label}: this is a folder; name the run file in it")
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
            raise ConfigError(f"{label}: this is a device or socket; name a run file")
        with open(path, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{label}: there is no such file (looked from {os.getcwd()}); check the path") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{label}: cannot be read ({reason}); check path and permissions") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{label}: larger than {MAX_BYTES} bytes; is this the run file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{label}: not text: byte {error.start} is 0x{raw[error.start]:02x}; wanted YAML in UTF-8"
        ) from None
