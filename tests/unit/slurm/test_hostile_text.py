"""Every parser of Slurm's words against text that is wrong, enormous, or both: a value or a refusal of bounded size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.core.binding_mask import parse_indexes, parse_mask
from relax_slurm.errors import RelaxError
from relax_slurm.slurm import explain, gres
from relax_slurm.slurm.environment import read_job
from relax_slurm.slurm.hostlist import MAX_HOSTS, expand
from relax_slurm.slurm.job_json import parse_jobs_json
from relax_slurm.slurm.scontrol import MAX_RECORDS, parse_config, parse_jobs, parse_records
from relax_slurm.slurm.steps import parse_steps
from relax_slurm.slurm.submit import parse_sbatch
from relax_slurm.slurm.watch import fold, parse_rows


def rows(text: str) -> Any:
    found = parse_rows(text)
    return [fold(found, row.job_id) for row in found[:3]]


def het_environment(text: str) -> Any:
    names = {"SLURM_JOB_ID_HET_GROUP_0": text, "SLURM_JOB_NODELIST_HET_GROUP_0": text}
    return read_job({"SLURM_JOB_ID": text, "SLURM_HET_SIZE": text, "SLURM_JOB_NODELIST": text, **names})


PARSERS: dict[str, Callable[[str], Any]] = {
    "hostlist": expand,
    "gres": gres.parse,
    "gpu counts": gres.gpu_counts,
    "gpu indexes": gres.parse_idx,
    "index ranges": gres.parse_ranges,
    "mask": parse_mask,
    "step gpus": parse_indexes,
    "sbatch": parse_sbatch,
    "squeue": rows,
    "steps": parse_steps,
    "jobs": parse_jobs,
    "jobs as json": parse_jobs_json,
    "config": parse_config,
    "partitions": lambda text: parse_records(text, "PartitionName"),
    "environment": het_environment,
    "complaint": explain.refusal,
    "reason": explain.pending,
}
FRAGMENTS = st.sampled_from(
    [
        *["n", "[", "]", "0-1", "001", ",", "-", "(", ")", ":", "=", "|", "+", "_", ";", ".", " ", "\n", "\n\n"],
        *["\0", "²", "9" * 25, "gpu:h100:8(IDX:0-7)", "(null)", "N/A", "gres/gpu:2", "cpu=8", '{"jobs": [', "]}"],
        *["JobId=1", "   Nodes=n[1-2] CPU_IDs=0 Mem=0 GRES=", "PartitionName=a", "Submitted batch job 7"],
        *["12+0", "RUNNING", "CANCELLED by 0", "slurm_load_jobs error: Socket timed out on send/recv operation"],
    ]
)
text = st.lists(FRAGMENTS | st.text(max_size=3), max_size=40).map("".join)


@pytest.mark.parametrize("name", list(PARSERS))
@settings(max_examples=60)
@given(words=text)
def test_any_text_gives_a_value_or_a_refusal(name: str, words: str) -> None:
    refusal = None
    try:
        PARSERS[name](words)
    except RelaxError as error:
        refusal = error.message
    assert refusal is None or "\n" not in refusal


ENORMOUS = {
    "digits": "9" * 100_000,
    "brackets": "[" * 100_000,
    "open parentheses": "gpu:1(" * 50_000,
    "ranges": ",".join(["0-4095"] * 50_000),
    "products": "n" + "[0-9]" * 1_000,
    "entries": ",".join(f"n{number}" for number in range(100_000)),
    "masks": ",".join("0" * 100_000),
    "rows": "1+0|RUNNING|n|None\n" * 50_000,
    "keys": "JobId=1\n" + "".join(f"   K{number}=1\n" for number in range(50_000)),
    "nodes": "JobId=1\n" + "     Nodes=n[1-60000] CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)\n" * 10_000,
    "jobs": "JobId=1\n\n" * 70_000,
    "partitions": "PartitionName=a\n\n" * 70_000,
    "nested": '{"jobs":' * 50_000,
    "one line": "a" * 1_000_000,
    "blanks": " " * 1_000_000,
}


def size(value: Any) -> int:
    """Number of plain values inside."""
    if isinstance(value, dict):
        return sum(size(entry) for entry in value.values()) + len(value)
    if isinstance(value, tuple | list):
        return sum(size(entry) for entry in value)
    return 1


@pytest.mark.parametrize("kind", list(ENORMOUS))
@pytest.mark.parametrize("name", list(PARSERS))
def test_enormous_text_is_bounded(name: str, kind: str) -> None:
    words = ENORMOUS[kind]
    value: Any = ""
    try:
        value = PARSERS[name](words)
    except RelaxError as error:
        value = error.message
    assert not isinstance(value, str) or len(value) < 2_000, "a refusal does not print the whole input"
    assert size(value) <= 2 * max(len(words), MAX_HOSTS, MAX_RECORDS)
