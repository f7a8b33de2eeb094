"""`squeue --json` and `scontrol show job --json` as the records that the text gives (`scontrol.JobRecord`).

Two shapes are read. Slurm 22.05 prints scalars (`"het_job_offset": 1`, `"job_state": "RUNNING"`) and, in
`job_resources`, `nodes` as text. From 23 on numbers are `{"set", "infinite", "number"}`, states are lists and `nodes`
is an object with `list`. In both `gres_detail` is one text per node *without* names, in the order of the node list.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.hostlist import expand
from relax_slurm.slurm.scontrol import MAX_RECORDS, JobRecord, gres_indexes, gres_type


def _number(value: Any) -> Any:
    """A scalar, or the number of `{"set", "infinite", "number"}`; None when it is not set or infinite."""
    if not isinstance(value, dict):
        return value
    return value.get("number") if value.get("set") is True and value.get("infinite") is not True else None


def _first(value: Any) -> Any:
    """A text, or the first of a list of texts: the base state comes before its flags."""
    return (value[0] if value else "") if isinstance(value, list) else value


def _list(value: Any) -> Any:
    """A node list as text, or the `list` of an object."""
    return value.get("list", "") if isinstance(value, dict) else value


Number = Annotated[int | None, BeforeValidator(_number)]
State = Annotated[str, BeforeValidator(_first)]
Nodes = Annotated[str | None, BeforeValidator(_list)]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Resources(_Shape):
    nodes: Nodes = None


class _Job(_Shape):
    job_id: int = Field(ge=1, lt=2**63)
    het_job_id: Number = None
    het_job_offset: Number = None
    job_state: State = ""
    state_reason: str = ""
    nodes: Nodes = None
    comment: Any = ""
    name: str = ""
    gres_detail: list[str] = []
    job_resources: _Resources | None = None


class _Document(_Shape):
    jobs: list[_Job]


_DOCUMENT = TypeAdapter(_Document)


def show_job_json(job_id: str) -> list[str]:
    """scontrol for a job with all its components as JSON; Slurm before 23 has no such option and says so."""
    return ["scontrol", "show", "job", "--detail", "--json", job_id]


def parse_jobs_json(text: str) -> tuple[JobRecord, ...]:
    """The records, by job id and component. A site's notice before the document is skipped.

    ConfigError for anything that is no such document. A node list that cannot be read, or another number of GRES texts
    than nodes, leaves the GPUs of that job unknown.
    """
    begin = text.find("{")
    try:
        value = json.loads(text[begin:]) if begin >= 0 else None
        jobs = _DOCUMENT.validate_python(value).jobs
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"Slurm's JSON is in a form that is not known: {place}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"Slurm printed something that is no JSON ({str(error)[:100]})") from None
    if len(jobs) > MAX_RECORDS:
        raise ConfigError(f"Slurm printed {len(jobs)} jobs, at most {MAX_RECORDS} are read")
    return tuple(sorted((_record(job) for job in jobs), key=lambda job: (int(job.leader), job.offset)))


def _record(job: _Job) -> JobRecord:
    nodes = _names(job.nodes)
    placed = _names(job.job_resources.nodes) if job.job_resources is not None else nodes
    details = job.gres_detail if len(job.gres_detail) == len(placed) else []
    types = {node: kind for node, gres in zip(placed, details, strict=False) if (kind := gres_type(gres)) is not None}
    leader = job.het_job_id or job.job_id
    return JobRecord(
        job_id=str(job.job_id),
        leader=str(leader),
        offset=job.het_job_offset or 0 if job.het_job_id else 0,
        state=job.job_state,
        reason="" if job.state_reason == "None" else job.state_reason,
        nodes=nodes,
        gpus={node: gres_indexes(gres) for node, gres in zip(placed, details, strict=False)},
        gpu_types=types,
        comment=str(_number(job.comment) or ""),
        fields={"JobName": job.name},
    )


def _names(text: str | None) -> tuple[str, ...]:
    if not text or text in {"(null)", "None assigned"}:
        return ()
    try:
        return expand(text)
    except ConfigError:
        return ()
