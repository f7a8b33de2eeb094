"""What Slurm's commands say about an installation: configuration, partitions, nodes. `site_check` judges them.

A command that fails leaves its part out (None), which is not the same as an empty one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.command import SECONDS, run
from relax_slurm.slurm.gres import GpuCounts, GresError, gpu_counts
from relax_slurm.slurm.hostlist import expand
from relax_slurm.slurm.scontrol import parse_config, parse_records, show_config

COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")
_BROKEN = re.compile(r"DOWN|DRAIN|FAIL|NOT_RESPONDING|POWERED_DOWN|MAINT|\*")


@dataclass(frozen=True, slots=True)
class Node:
    """One node. `gpus` is None when its GRES text cannot be read; sizes are MiB and CPUs."""

    name: str
    state: str
    gpus: GpuCounts | None
    cpus: int
    memory_mb: int
    features: frozenset[str] = frozenset()

    @property
    def usable(self) -> bool:
        """Not down, drained, failing, away or in maintenance."""
        return _BROKEN.search(self.state) is None


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition. Limits are None when there is none."""

    name: str
    nodes: tuple[str, ...]
    state: str
    default: bool
    max_nodes: int | None
    min_nodes: int
    max_minutes: int | None
    accounts: frozenset[str] | None = None
    """Accounts that may use it; None for all."""
    denied_accounts: frozenset[str] = frozenset()
    qos: frozenset[str] | None = None
    """QOS that may be used in it; None for all."""


@dataclass(frozen=True, slots=True)
class SiteFacts:
    """All that was learned. `failed` holds the complaints of commands that did not answer."""

    missing: tuple[str, ...] = ()
    """Slurm commands that are not on the PATH."""
    config: Mapping[str, str] | None = None
    partitions: Mapping[str, Partition] | None = None
    nodes: Mapping[str, Node] | None = None
    failed: tuple[str, ...] = field(default=())

    @property
    def default_partition(self) -> Partition | None:
        """The partition of jobs that name none."""
        return next((entry for entry in (self.partitions or {}).values() if entry.default), None)


def gather(environ: Mapping[str, str], *, seconds: float = SECONDS) -> SiteFacts:
    """Asks scontrol three times. Blocks, each time at most `seconds`; never raises for a failing command."""
    missing = tuple(name for name in COMMANDS if shutil.which(name, path=environ.get("PATH")) is None)
    if "scontrol" in missing:
        return SiteFacts(missing)
    failed: list[str] = []
    texts: list[str | None] = []
    for argv in (show_config(), ["scontrol", "show", "partition"], ["scontrol", "show", "node"]):
        done = run(argv, seconds=seconds, env=environ)
        if not done.ok:
            failed.append(f"{' '.join(argv)}: {done.words}")
        texts.append(done.out if done.ok else None)
    config, partitions, nodes = texts
    return SiteFacts(
        missing,
        None if config is None else parse_config(config),
        None if partitions is None else _keep(failed, "partition", partitions),
        None if nodes is None else _nodes(failed, nodes),
        tuple(failed),
    )


def _keep(failed: list[str], what: str, text: str) -> dict[str, Partition] | None:
    try:
        return parse_partitions(text)
    except ConfigError as error:
        failed.append(f"scontrol show {what}: {error.message}")
        return None


def _nodes(failed: list[str], text: str) -> dict[str, Node] | None:
    try:
        return parse_nodes(text)
    except ConfigError as error:
        failed.append(f"scontrol show node: {error.message}")
        return None


def parse_partitions(text: str) -> dict[str, Partition]:
    """`scontrol show partition` by name. ConfigError for a node list that cannot be read."""
    found = {}
    for fields in parse_records(text, "PartitionName"):
        names = fields.get("Nodes", "")
        accounts = fields.get("AllowAccounts", "ALL")
        found[fields["PartitionName"]] = Partition(
            name=fields["PartitionName"],
            nodes=() if names in {"", "(null)"} else expand(names),
            state=fields.get("State", ""),
            default=fields.get("Default") == "YES",
            max_nodes=_number(fields.get("MaxNodes")),
            min_nodes=_number(fields.get("MinNodes")) or 0,
            max_minutes=minutes(fields.get("MaxTime", "")),
            accounts=None if accounts in {"ALL", "(null)", ""} else frozenset(accounts.split(",")),
            denied_accounts=_words(fields.get("DenyAccounts")),
            qos=None if fields.get("AllowQos", "ALL") in {"ALL", "(null)", ""} else _words(fields["AllowQos"]),
        )
    return found


def parse_nodes(text: str) -> dict[str, Node]:
    """`scontrol show node` by name."""
    found = {}
    for fields in parse_records(text, "NodeName"):
        try:
            gpus = gpu_counts(fields.get("Gres", ""))
        except GresError:
            gpus = None
        found[fields["NodeName"]] = Node(
            name=fields["NodeName"],
            state=fields.get("State", "").partition(" ")[0],
            gpus=gpus,
            cpus=_number(fields.get("CPUTot")) or 0,
            memory_mb=_number(fields.get("RealMemory")) or 0,
            features=_words(fields.get("AvailableFeatures")),
        )
    return found


def minutes(text: str) -> int | None:
    """A Slurm time (`90`, `1:30:00`, `D-HH`, `D-HH:MM`, `D-HH:MM:SS`) in minutes, rounded up; None for no limit and for
    what is no time."""
    if "-" in text:
        days, _, rest = text.partition("-")
        parts = [*rest.split(":"), "0", "0"][:3]
        words = [days, *parts]
    else:
        parts = text.split(":")
        words = ["0", *(["0", parts[0], "0"] if len(parts) == 1 else ["0", *parts] if len(parts) == 2 else parts)]
    if len(words) != 4 or not all(re.fullmatch(r"\d{1,6}", word, re.ASCII) for word in words):
        return None
    day, hour, minute, second = (int(word) for word in words)
    return day * 1440 + hour * 60 + minute + (second > 0)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"\d{1,15}", text, re.ASCII) else None


def _words(text: str | None) -> frozenset[str]:
    return frozenset() if text in {None, "", "(null)", "NONE"} else frozenset(re.split(r"[,|&]", text or ""))
