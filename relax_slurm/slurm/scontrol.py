"""What `scontrol show job -d` and `scontrol show config` say, as values."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.gres import GresError, parse_idx
from relax_slurm.slurm.hostlist import HostListError, expand

JobGpus = dict[str, tuple[int, ...] | None]
"""Physical GPU indexes by node: () = none, None = Slurm does not tell which."""

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


def _record(chunk: str) -> JobRecord:
    fields: dict[str, str] = {}
    gpus: JobGpus = {}
    for line in chunk.splitlines():
        detail = _DETAIL.match(line)
        if detail is not None:
            for node in _expand(detail[1]):
                gpus[node] = _indexes(detail[2])
        else:
            # The first one wins: what Slurm says of itself comes before texts that users choose.
            fields = _pairs(line) | fields
    job_id = fields.get("JobId", "")
    offset = fields.get("HetJobOffset", "0")
    names = fields.get("NodeList", "")
    return JobRecord(
        job_id=job_id,
        leader=fields.get("HetJobId", job_id),
        offset=int(offset) if offset.isascii() and offset.isdigit() else 0,
        state=fields.get("JobState", ""),
        reason=fields.get("Reason", ""),
        nodes=() if names in {"", "(null)", "None assigned"} else _expand(names),
        gpus=gpus,
        comment=fields.get("Comment", ""),
        fields=fields,
    )


def _pairs(line: str) -> dict[str, str]:
    """`A=1 B=two words C=` to a dictionary; a value runs to the next key."""
    marks = list(_PAIR.finditer(line))
    ends = [mark.start() for mark in marks[1:]] + [len(line)]
    return {mark[1]: line[mark.end() : end].strip() for mark, end in zip(marks, ends, strict=True)}


def _expand(names: str) -> tuple[str, ...]:
    try:
        return expand(names)
    except HostListError as error:
        raise ConfigError(f"scontrol printed a node list that cannot be read: {error.message}") from None


def _indexes(gres: str) -> tuple[int, ...] | None:
    try:
        return parse_idx(gres)
    except GresError:
        return None  # a form that is not known yet: not verifiable, which is not the same as wrong
