"""What `scontrol show job -d` and `scontrol show config` say, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.gres import GresError, gpu_counts, parse_idx
from relax_slurm.slurm.hostlist import HostListError, expand

JobGpus = dict[str, tuple[int, ...] | None]
"""Physical GPU indexes by node: () = none, None = Slurm does not tell which."""
MAX_RECORDS = 65_536
"""Records of one answer that are read, and nodes over all of them; an answer with more is refused."""

_PAIR = re.compile(r"(?:^|\s)([A-Za-z][\w/:.-]*)=")
_DETAIL = re.compile(r"^\s+Nodes=(\S+)\s+CPU_IDs=\S*\s+Mem=\S*\s+GRES=(.*)$")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One component (or an ordinary job) as the controller describes it."""

    job_id: str
    leader: str
    offset: int
    """Component index; 0 for an ordinary job."""
    state: str
    reason: str
    nodes: tuple[str, ...]
    gpus: JobGpus
    """Only filled while the job runs."""
    gpu_types: dict[str, str] = field(default_factory=dict)
    """GRES type by node, where the allocation names exactly one."""
    comment: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    """Every `Key=value` of the record, as printed."""


def show_job(job_id: str) -> list[str]:
    """scontrol for a job and, given its leader's id, all of its components, with GPU indexes."""
    return ["scontrol", "show", "job", "--detail", job_id]


def show_config() -> list[str]:
    """scontrol for the controller's configuration."""
    return ["scontrol", "show", "config"]


def parse_jobs(text: str) -> tuple[JobRecord, ...]:
    """The records of `show_job`, by component. Text that holds no record gives (). ConfigError for a broken
    node list."""
    records = [_record(chunk) for chunk in re.split(r"\n\s*\n", text) if re.match(r"\s*JobId=\d", chunk)]
    if len(records) > MAX_RECORDS:
        raise ConfigError(f"scontrol printed {len(records)} jobs, at most {MAX_RECORDS} are read")
    return tuple(sorted(records, key=lambda record: record.offset))


def end_time(record: JobRecord) -> int | None:
    """Unix time at which Slurm will end the job; None when it prints none (`Unknown`, `N/A`). Local time zone."""
    try:
        return int(datetime.fromisoformat(record.fields.get("EndTime", "")).timestamp())
    except ValueError:
        return None


def parse_config(text: str) -> dict[str, str]:
    """The `Key = value` lines of `show_config`."""
    found = {}
    for line in text.splitlines():
        key, separator, value = line.partition(" = ")
        if separator and re.fullmatch(r"[\w/]+", key.strip()):
            found[key.strip()] = value.strip()
    return found


def step_end_is_proof(config: dict[str, str]) -> bool | None:
    """Whether the end of a step proves that all its processes are gone. None when the configuration does not
    tell.

    With `proctrack/cgroup` it does. With `proctrack/linuxproc` and `proctrack/pgid` a process that leaves its
    session outlives the step, and even scancel.
    """
    kind = config.get("ProctrackType", "").removeprefix("proctrack/")
    return None if not kind or kind == "(null)" else kind == "cgroup"


def gres_type(gres: str) -> str | None:
    """The one type that a node's GRES string names; None when it names none, several, or cannot be read."""
    try:
        counts = gpu_counts(gres)
    except GresError:
        return None
    return counts.types[0] if counts is not None and len(counts.types) == 1 else None


def gres_indexes(gres: str) -> tuple[int, ...] | None:
    """The GPU indexes of a node's GRES string; None when it does not tell, or in a form that is not known yet."""
    try:
        return parse_idx(gres)
    except GresError:
        return None  # not verifiable, which is not the same as wrong


def parse_records(text: str, key: str) -> tuple[dict[str, str], ...]:
    """The records of `scontrol show partition`, `show node` and the like: chunks that begin with `key=`.

    ConfigError for more than 65,536 of them.
    """
    found: list[dict[str, str]] = []
    for chunk in re.split(r"\n\s*\n", text):
        if not chunk.lstrip().startswith(f"{key}="):
            continue
        if len(found) == MAX_RECORDS:
            raise ConfigError(f"scontrol printed more than {MAX_RECORDS} records beginning with {key}=")
        fields: dict[str, str] = {}
        for line in chunk.splitlines():
            _add_pairs(fields, line)
        found.append(fields)
    return tuple(found)


def _record(chunk: str) -> JobRecord:
    fields: dict[str, str] = {}
    gpus: JobGpus = {}
    types: dict[str, str] = {}
    seen = 0
    for line in chunk.splitlines():
        detail = _DETAIL.match(line)
        if detail is None:
            # The first one wins: what Slurm says of itself comes before texts that users choose.
            _add_pairs(fields, line)
            continue
        placed = _expand(detail[1])
        seen += len(placed)
        if seen > MAX_RECORDS:
            raise ConfigError(f"scontrol printed GPUs of more than {MAX_RECORDS} nodes for one job")
        indexes, kind = gres_indexes(detail[2]), gres_type(detail[2])
        for node in placed:
            gpus[node] = indexes
            if kind is not None:
                types[node] = kind
    job_id = fields.get("JobId", "")
    offset = fields.get("HetJobOffset", "0")
    names = fields.get("NodeList", "")
    return JobRecord(
        job_id=job_id,
        leader=fields.get("HetJobId", job_id),
        offset=int(offset) if re.fullmatch(r"[0-9]{1,6}", offset) else 0,
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        nodes=() if names in {"", "(null)", "None assigned"} else _expand(names),
        gpus=gpus,
        gpu_types=types,
        comment=fields.get("Comment", ""),
        fields=fields,
    )


def _add_pairs(fields: dict[str, str], line: str) -> None:
    """Adds `A=1 B=two words C=` to the fields, unless they are there; a value runs to the next key."""
    marks = list(_PAIR.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    for mark, end in zip(marks, ends, strict=True):
        fields.setdefault(mark[1], line[mark.end() : end].strip())


def _expand(names: str) -> tuple[str, ...]:
    try:
        return expand(names)
    except HostListError as error:
        raise ConfigError(f"scontrol printed a node list that cannot be read: {error.message}") from None
