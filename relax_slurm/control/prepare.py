"""Writes everything a run needs into its run directory, before anything is submitted."""

from __future__ import annotations

import sys
from pathlib import Path

from relax_slurm.config.models import RunConfig
from relax_slurm.control.backends import BackendKind
from relax_slurm.control.run_dir import RunDir, cannot_write, write_atomically
from relax_slurm.core.binding import Backend
from relax_slurm.core.placement_json import to_json
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.slurm.script import ScriptPaths, render
from relax_slurm.slurm.submit import Submission
from relax_slurm.wire.keys import write_keys


def prepare(
    root: Path, config: RunConfig, plan: InferencePlacementPlan, kind: BackendKind
) -> tuple[RunDir, Submission]:
    """A new attempt with config, plan, script, keys and tokens; answers it with what a backend needs.

    ConfigError when the run directory cannot be written.
    """
    try:
        return _prepare(root, config, plan, kind)
    except OSError as error:
        raise cannot_write(root, error) from None


def _prepare(
    root: Path, config: RunConfig, plan: InferencePlacementPlan, kind: BackendKind
) -> tuple[RunDir, Submission]:
    run_dir = RunDir.create(root, config.name)
    write_atomically(run_dir.path / "config.json", config.resolved_json())
    write_atomically(run_dir.path / "plan.json", to_json(plan))
    write_keys(run_dir.keys)
    run_dir.write_secret(run_dir.token_file)
    run_dir.write_secret(run_dir.engine_key_file)
    steps = Backend.LOCAL if kind is BackendKind.LOCAL else Backend.SLURM
    module = "relax_slurm.control.supervisor"
    command = (sys.executable, "-m", module, "--run-dir", str(run_dir.path), "--backend", str(steps))
    tag = f"relax-{config.name}-{run_dir.attempt}-{run_dir.mark}"
    script = render(
        plan,
        config,
        ScriptPaths(command=command, log=run_dir.logs / "head_supervisor.log", tag=tag, chdir=run_dir.path),
    )
    write_atomically(run_dir.path / "job.sbatch", script)
    run_dir.make_latest()
    return run_dir, Submission(config.name, run_dir.attempt, tag, run_dir.path, script, command)
