"""What a simulated engine is told: SGLang's own flags, plus options of its own as JSON in
`RELAX_SIM_OPTIONS`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from relax_slurm.errors import ConfigError

GIB = 1 << 30


class FaultKind(StrEnum):
    """A way to misbehave. `value` of the fault is the number named in the docstring."""

    DIE_AFTER_REQUESTS = "die_after_requests"
    """The process dies while it works on generation request number `value`."""
    FAIL_START = "fail_start"
    """The process ends with an error before it serves; `value` is the exit code."""
    HANG_START = "hang_start"
    """The process lives but never becomes healthy."""
    HANG_HEALTH = "hang_health"
    """Health requests stop being answered `value` seconds after the start."""
    HANG_GENERATE = "hang_generate"
    """Generation requests from number `value` on are accepted and never finish."""
    HANG_RELEASE = "hang_release"
    """A release is never answered and frees nothing."""
    SLOW_RELEASE = "slow_release"
    """Memory becomes free `value` seconds after the release was answered."""
    STUCK_RELEASE = "stuck_release"
    """A release is answered and memory never becomes free."""
    OOM_START = "oom_start"
    """The process asks for more memory than a card has."""
    BAD_JSON = "bad_json"
    """Generation answers from number `value` on are not JSON."""
    REFUSE_UPDATE = "refuse_update"
    """Every weight update is refused and changes nothing."""
    KEEP_VERSION = "keep_version"
    """A weight update succeeds and the version stays what it was."""
    IGNORE_TERM = "ignore_term"
    """SIGTERM does nothing."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault; `worker` is a shell pattern on the worker id, so that a run file can break a single
    replica.
    """

    kind: FaultKind
    value: float = 0.0
    worker: str = "*"


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Options of one simulated engine. Times in seconds, sizes in GiB per GPU."""

    role: str = "rollout"
    """`rollout` answers arithmetic, `genrm` grades, anything else continues text."""
    owner: str = "sim"
    """Worker id; the name in the ledger."""
    gpus: tuple[int, ...] = ()
    """Physical GPU indexes in the ledger."""
    seed: int = 0
    error_rate: float = 0.1
    """Share of arithmetic prompts that are answered wrongly."""
    tokens_per_second: float = 2000.0
    """Decode speed of one request; 0 is as fast as the loop turns."""
    prefill_tokens_per_second: float = 0.0
    """Prefill speed of one request; 0 takes no time."""
    startup_seconds: float = 0.0
    release_seconds: float = 0.0
    """Time between the answer to a release and the memory being free."""
    crash_seconds: float = 0.05
    """Time between a deadly request and the end of the process; about 5 on a real engine."""
    collective_seconds: float = 0.2
    """How long the head outlives a lost follower, and the other way round."""
    vocab_size: int = 512
    context_length: int = 32_768
    ledger: str | None = None
    """Folder of the memory ledger; none means that memory is not accounted for."""
    node: str = "localhost"
    capacity_gib: float = 80.0
    weights_gib: float = 16.0
    cuda_graph_gib: float = 2.0
    context_gib: float = 0.5
    """What a process keeps on the card until it ends, whatever it releases."""
    faults: tuple[Fault, ...] = ()

    def fault(self, kind: FaultKind) -> Fault | None:
        """The fault of that kind which is meant for this worker."""
        for fault in self.faults:
            if fault.kind is kind and fnmatchcase(self.owner, fault.worker):
                return fault
        return None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> SimOptions:
        """Options out of a JSON object. `ConfigError` names an unknown key, or a value of the wrong kind."""
        known = {entry.name: entry for entry in fields(cls)}
        data: dict[str, Any] = {}
        for key, item in value.items():
            if key not in known:
                near = get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
                raise ConfigError(f"sim options: unknown key {key!r}; {hint}")
            data[key] = _checked(key, item, known[key].default)
        options = cls(**data)
        size = options.vocab_size
        if size < 272 or size & (size - 1):
            raise ConfigError(f"sim options: vocab_size is {size}, wanted a power of two from 512 on")
        return options


def _checked(key: str, item: Any, default: Any) -> Any:
    if key == "gpus" and isinstance(item, Sequence) and all(isinstance(gpu, int) for gpu in item):
        return tuple(item)
    if key == "faults" and isinstance(item, Sequence) and not isinstance(item, str):
        return tuple(_fault(entry) for entry in item)
    if key == "ledger" and (item is None or isinstance(item, str)):
        return item
    if isinstance(default, str) and isinstance(item, str):
        return item
    number = isinstance(item, int | float) and not isinstance(item, bool) and math.isfinite(item)
    if isinstance(default, float) and number and item >= 0:
        return float(item)
    if isinstance(default, int) and number and int(item) == item:
        return int(item)
    raise ConfigError(f"sim options: {key} is {item!r}, wanted something like {default!r}")


def _fault(entry: Any) -> Fault:
    kinds = ", ".join(FaultKind)
    data = {"kind": entry} if isinstance(entry, str) else entry
    if not isinstance(data, Mapping) or not set(data) <= {"kind", "value", "worker"}:
        raise ConfigError(f"sim options: fault {entry!r} is not a map of kind, value and worker; kinds: {kinds}")
    try:
        return Fault(FaultKind(data["kind"]), float(data.get("value", 0)), str(data.get("worker", "*")))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"sim options: fault {entry!r} is not usable; kinds: {kinds}") from error


@dataclass(frozen=True, slots=True)
class ServerArgs:
    """The SGLang flags that the simulator acts on; `given` is all of them, for /server_info."""

    model_path: str
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = 30_000
    dist_init_addr: str = ""
    nnodes: int = 1
    node_rank: int = 0
    mem_fraction_static: float = 0.85
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    enable_metrics: bool = False
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    given: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str] = os.environ) -> ServerArgs:
        """Flags of SGLang's command line; unknown ones are kept, `ConfigError` names an unusable one."""
        given = parse_flags(argv)
        known = {entry.name: entry.default for entry in fields(cls) if entry.name != "given"}
        data: dict[str, Any] = {"api_key": environ.get("RELAX_SIM_API_KEY"), "given": given}
        data["admin_api_key"] = environ.get("RELAX_SIM_ADMIN_KEY")
        for key, text in given.items():
            if key not in known:
                continue
            try:
                data[key] = _converted(text, known[key])
            except (TypeError, ValueError) as error:
                flag = key.replace("_", "-")
                raise ConfigError(f"--{flag}: {text!r} is not usable ({error}); give it one value") from error
        if "model_path" not in data:
            raise ConfigError("--model-path is missing; say which model to pretend")
        data.setdefault("served_model_name", data["model_path"])
        return cls(**data)


def _converted(text: Any, default: Any) -> Any:
    if isinstance(default, bool):
        return bool(text)
    if isinstance(default, int | float):
        return type(default)(text)
    if not isinstance(text, str):
        raise TypeError("no value")
    return text


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """`--a-b v` to {"a_b": "v"}; a bare flag is True, several values are a list."""
    out: dict[str, Any] = {}
    name: str | None = None
    for word in argv:
        if word.startswith("--"):
            name, has_value, value = word[2:].partition("=")
            name = name.replace("-", "_")
            out[name] = value if has_value else True
        elif name is None:
            raise ConfigError(f"argument {word!r} stands before any flag; the simulator takes flags only")
        elif out[name] is True:
            out[name] = word
        else:
            out[name] = [*(out[name] if isinstance(out[name], list) else [out[name]]), word]
    return out


def read_options(environ: Mapping[str, str] = os.environ) -> SimOptions:
    """The options in `RELAX_SIM_OPTIONS`; defaults when it is not set."""
    text = environ.get("RELAX_SIM_OPTIONS", "{}")
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"RELAX_SIM_OPTIONS is not JSON ({error}); give it one JSON object") from error
    if not isinstance(value, dict):
        raise ConfigError(f"RELAX_SIM_OPTIONS is {text[:80]!r}, wanted one JSON object")
    return SimOptions.from_json(value)
