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


def script_paths(run_dir: RunDir, config: RunConfig) -> ScriptPaths:
    """What the script of this attempt says of itself; `plan` shows it for the attempt that would be taken.

    The script is Slurm's whatever backend runs the attempt, so that all show and write the same one.
    """
    return ScriptPaths(
        command=supervisor_command(run_dir, Backend.SLURM),
        log=run_dir.logs / "head_supervisor.log",
        tag=f"relax-{config.name}-{run_dir.attempt}-{run_dir.mark}",
        chdir=run_dir.path,
    )


def supervisor_command(run_dir: RunDir, steps: Backend) -> tuple[str, ...]:
    """The supervisor's command line for this attempt."""
    module = "relax_slurm.control.supervisor"
    return (sys.executable, "-m", module, "--run-dir", str(run_dir.path), "--backend", str(steps))


def _prepare(
    root: Path, config: RunConfig, plan: InferencePlacementPlan, kind: BackendKind
) -> tuple[RunDir, Submission]:
    # Rendered first: a value that sbatch would not read is refused before anything is written.
    render(plan, config, script_paths(RunDir.upcoming(root, config.name), config))
    run_dir = RunDir.create(root, config.name)
    write_atomically(run_dir.path / "config.json", config.resolved_json())
    write_atomically(run_dir.path / "plan.json", to_json(plan))
    write_keys(run_dir.keys)
    run_dir.write_secret(run_dir.token_file)
    run_dir.write_secret(run_dir.engine_key_file)
    paths = script_paths(run_dir, config)
    script = render(plan, config, paths)
    write_atomically(run_dir.path / "job.sbatch", script)
    run_dir.make_latest()
    command = supervisor_command(run_dir, Backend.LOCAL if kind is BackendKind.LOCAL else Backend.SLURM)
    return run_dir, Submission(config.name, run_dir.attempt, paths.tag, run_dir.path, script, command)
