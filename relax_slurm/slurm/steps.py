"""Steps of a job as text: the srun command of one node's sidecar, signals to a step, the list of steps.

Measured on Slurm 22.05:

- a step without any GPU option gets all GPUs of its component on the node, typed or not, requested either way; and
  two such steps with `--overlap` run beside each other;
- a het component's steps carry the *component's* job id in squeue (`18.7`), while the task sees the leader's;
- SIGINT to an srun with `--disable-status` reaches the task and only it, srun then ends with the task's exit code:
  the graceful way that needs no controller (SIGTERM to srun kills the task; a second SIGINT within 1 s does too);
- `scancel -s TERM 18.7` reaches the step and then complains "Invalid job id specified" with exit code 225;
  `17+1.7` and `17.7` return 0 and reach nothing. So the exit code of scancel is no evidence either way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relax_slurm.errors import ConfigError

STEP_FORMAT = "%i|%j|%N"


@dataclass(frozen=True, slots=True)
class StepRow:
    """One line of `squeue --steps`. `job_id` is the component's own id, `step_id` a number or `batch`, `extern`."""

    job_id: str
    step_id: str
    name: str
    nodes: str


def log_pattern(path: Path) -> str:
    """A path for srun's and sbatch's output options, in which `%` starts a replacement symbol.

    ConfigError for a path that they would change: a backslash turns replacement off and is removed.
    """
    text = str(path)
    if "\\" in text or "\n" in text:
        raise ConfigError(f"path {text!r} contains a backslash or a line break, which Slurm would drop; use another")
    return text.replace("%", "%%")


def node_step(
    node: str,
    command: Sequence[str],
    *,
    het_group: int | None,
    name: str = "sidecar",
    output: Path | None = None,
    extra: Sequence[str] = (),
) -> list[str]:
    """The srun command that runs `command` once on `node`.

    `het_group` is the component in a heterogeneous job and None in an ordinary one, where srun refuses the
    option. Run it with `environment.step_environment`. `extra` (`slurm.extra_srun`) comes last and therefore
    wins.
    """
    argv = ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}"]
    if het_group is not None:
        argv.append(f"--het-group={het_group}")
    argv += [
        "--mem=0",  # all that the component has on the node, instead of what component 0's request says
        "--cpu-bind=none",  # sites that bind tasks by default would put all engines of the node on one core
        "--mpi=none",  # no PMI server for a task that is alone
        "--export=ALL",  # also when the job was submitted with --export=NONE
        "--input=none",
        "--unbuffered",
        "--disable-status",  # SIGINT to srun is passed on to the task at once (see above)
        f"--job-name={name}",
    ]
    if output is not None:
        argv += [f"--output={log_pattern(output)}", f"--error={log_pattern(output)}", "--open-mode=append"]
    return [*argv, *extra, *command]


def list_steps(component_ids: Sequence[str]) -> list[str]:
    """squeue for the running steps of these components (each by its own job id)."""
    return ["squeue", "--steps", "--noheader", f"--jobs={','.join(component_ids)}", f"--format={STEP_FORMAT}"]


def parse_steps(text: str) -> tuple[StepRow, ...]:
    """The rows of `list_steps`; lines that are not rows (site notices) are skipped."""
    rows = []
    for line in text.splitlines():
        fields = line.strip().split("|")
        match = re.fullmatch(r"(\d+)(?:[+_]\d+)?\.(\w+)", fields[0], re.ASCII)
        if match is not None and len(fields) >= 3:
            rows.append(StepRow(match[1], match[2], "|".join(fields[1:-1]), fields[-1]))
    return tuple(rows)


def signal_step(job_id: str, step_id: str, signal: str = "TERM") -> list[str]:
    """scancel that signals one step. `job_id` must be the component's own, never `LEADER+n`."""
    if not re.fullmatch(r"[0-9]+", job_id) or not re.fullmatch(r"[0-9]+", step_id):
        raise ConfigError(f"{job_id}.{step_id} does not name a step, wanted NUMBER.NUMBER of the component itself")
    return ["scancel", f"--signal={signal}", f"{job_id}.{step_id}"]
