"""What we rely on in submitit. A new version that breaks this must be looked at before the pin is raised."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from submitit.core import core, utils
from submitit.slurm import slurm

from relax_slurm.slurm.executor import HetSlurmExecutor
from relax_slurm.slurm.submit import Submission


def test_the_version_is_one_that_was_looked_at() -> None:
    major, minor = importlib.metadata.version("submitit").split(".")[:2]
    assert (int(major), int(minor)) >= (1, 5)
    assert int(major) < 2


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (slurm.SlurmExecutor, "__init__", ["self", "folder"]),
        (slurm.SlurmExecutor, "_make_submission_file_text", ["self", "command", "uid"]),
        (slurm.SlurmExecutor, "_make_submission_command", ["self", "submission_file_path"]),
        (slurm.SlurmExecutor, "_num_tasks", ["self"]),
        (slurm.SlurmExecutor, "_get_job_id_from_submission_command", ["string"]),
        (core.PicklingExecutor, "_submit_command", ["self", "command"]),
        (core.InfoWatcher, "update", ["self"]),
        (core.InfoWatcher, "get_info", ["self", "job_id", "mode"]),
        (core.InfoWatcher, "is_done", ["self", "job_id", "mode"]),
        (slurm.SlurmInfoWatcher, "get_state", ["self", "job_id", "mode"]),
        (core.Job, "__init__", ["self", "folder", "job_id", "tasks"]),
    ],
)
def test_hooks_have_the_shape_we_override(owner: type, name: str, parameters: list[str]) -> None:
    found = list(inspect.signature(getattr(owner, name)).parameters)
    assert found[: len(parameters)] == parameters


def test_attributes_we_use() -> None:
    watcher = slurm.SlurmInfoWatcher()
    for name in ("_registered", "_finished", "_info_dict", "_output", "_num_calls", "_last_status_check"):
        assert hasattr(watcher, name)
    assert issubclass(HetSlurmExecutor, slurm.SlurmExecutor)
    assert issubclass(utils.FailedSubmissionError, RuntimeError)
    assert utils.JobPaths("/x", job_id="7").submission_file == Path("/x/7_submission.sh")


def test_our_own_job_id_parser_is_behind_submitits_hook(tmp_path: Path) -> None:
    executor = HetSlurmExecutor(Submission("r", 1, "t", tmp_path, "#!/bin/sh\n", ("true",)))
    assert executor._get_job_id_from_submission_command(b"notice 1\n77;alpha\n") == "77"
    assert executor._make_submission_command(Path("/a b")) == ["sbatch", "--parsable", "/a b"]
    assert executor._make_submission_file_text("", "") == "#!/bin/sh\n"
    assert executor._num_tasks() == 1
    with pytest.raises(utils.FailedSubmissionError):
        executor._get_job_id_from_submission_command("no id")


def test_submitit_is_imported_only_to_submit() -> None:
    code = (
        "import sys, relax_slurm.slurm.backend, relax_slurm.slurm.script, relax_slurm.slurm.steps;"
        "sys.exit('submitit' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
