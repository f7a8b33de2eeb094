from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import ConfigError
from relax_slurm.slurm.steps import StepRow, list_steps, log_pattern, node_step, parse_steps, signal_step


def test_one_node_of_a_het_component() -> None:
    argv = node_step(
        "node3",
        ["python", "-m", "sidecars.node", "run dir"],
        het_group=2,
        name="sidecar-node3",
        output=Path("/runs/a b/100%/node3.log"),
        extra=["--container-image=x y"],
    )
    assert argv == [
        "srun",
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--nodelist=node3",
        "--het-group=2",
        "--mem=0",
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "--unbuffered",
        "--disable-status",
        "--job-name=sidecar-node3",
        "--output=/runs/a b/100%%/node3.log",
        "--error=/runs/a b/100%%/node3.log",
        "--open-mode=append",
        "--container-image=x y",
        "python",
        "-m",
        "sidecars.node",
        "run dir",
    ]


def test_an_ordinary_job_has_no_group_and_no_step_asks_for_gpus() -> None:
    argv = node_step("n1", ["true"], het_group=None)
    assert not [word for word in argv if "het-group" in word or "gpu" in word or "gres" in word]
    assert "--output" not in " ".join(argv)


def test_a_log_path_that_slurm_would_change_is_refused() -> None:
    with pytest.raises(ConfigError, match="backslash"):
        log_pattern(Path("/a\\b"))


def test_the_list_of_steps() -> None:
    assert "--jobs=17,18" in list_steps(["17", "18"])
    text = "slurm notice\n17.batch|batch|node1\n18.7|side|car|node2\n 18.12|x|node[3-4]\n17.extern|e|node1\nx|y|z\n"
    assert parse_steps(text) == (
        StepRow("17", "batch", "batch", "node1"),
        StepRow("18", "7", "side|car", "node2"),
        StepRow("18", "12", "x", "node[3-4]"),
        StepRow("17", "extern", "e", "node1"),
    )


@pytest.mark.parametrize(("job", "step"), [("17+1", "7"), ("17", "batch"), ("", "1"), ("17", "-1"), ("17;x", "1")])
def test_only_a_components_own_step_is_signalled(job: str, step: str) -> None:
    with pytest.raises(ConfigError):
        signal_step(job, step)


def test_signal() -> None:
    assert signal_step("18", "7") == ["scancel", "--signal=TERM", "18.7"]
    assert signal_step("18", "7", "KILL")[1] == "--signal=KILL"


@given(st.text("0123456789.+_|batchnode[]\n ", max_size=60))
def test_any_text_is_parsed(text: str) -> None:
    for row in parse_steps(text):
        assert row.job_id.isdigit()
