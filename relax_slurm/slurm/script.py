"""The sbatch script of a plan: one `#SBATCH` block per component, then a template with the supervisor's
command.

sbatch stops reading options at the first line that is neither blank nor a comment, cuts the script wherever a
directive contains `hetjob`, and takes `#` inside a directive as the start of a comment. Values that contain
such text are refused here, whatever way they came in.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_slurm import resources
from relax_slurm.config.base import directive_fault
from relax_slurm.config.models import RunConfig
from relax_slurm.config.options import is_option
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan
from relax_slurm.errors import ConfigError, PlanRefused
from relax_slurm.slurm.steps import log_pattern

TEMPLATE = "run.sbatch"
SEPARATOR = "#SBATCH hetjob"
MARKS = ("directives", "setup", "command")
"""What a template may contain, in double braces. `directives` and `command` are needed."""
FIRST_ONLY = frozenset({"--licenses", "-L", "--dependency", "-d", "--begin", "-b", "--mail-type", "--mail-user"})
"""Options of the whole job, which Slurm takes from component 0."""
_MARK = re.compile(r"\{\{(\w+)\}\}")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,=&|*()\[\]-]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ScriptPaths:
    """What the script needs to know beside plan and config."""

    command: tuple[str, ...]
    """The supervisor's command line, run by exec on the head node."""
    log: Path
    """File for everything the batch step prints."""
    tag: str
    """The run's unique mark. It is the job's comment, by which a submission that timed out is found again."""
    chdir: Path | None = None
    """Working directory of the job; None leaves the directory sbatch is called from."""


def render(plan: InferencePlacementPlan, config: RunConfig, paths: ScriptPaths) -> str:
    """The text of the script.

    PlanRefused or ConfigError, naming field and value, for a value that sbatch would not read as it stands.
    """
    if plan.job_shape == "single" and len(plan.components) != 1:
        raise PlanRefused(f"job_shape is single and the plan has {len(plan.components)} components, wanted exactly one")
    separator = f"\n{SEPARATOR}\n"
    blocks = ["\n".join(_block(component, plan, config, paths)) for component in plan.components]
    values = {
        "directives": separator.join(blocks),
        "setup": "\n".join(config.slurm.setup),
        "command": shlex.join(paths.command),
    }
    for line in config.slurm.setup:
        if line.lstrip().startswith(("#SBATCH", "#PBS", "#BSUB")):
            raise ConfigError(
                f"slurm.setup has the line {line!r}, which sbatch would read as an option; use slurm.extra_sbatch"
            )
    template = _template(config.slurm.template)
    return _MARK.sub(lambda mark: values[mark[1]], template)


def comment(config: RunConfig, tag: str) -> str:
    """The job's comment: the user's words, if any, and the run's mark."""
    return f"{config.slurm.comment},{tag}" if config.slurm.comment else tag


def _template(path: str | None) -> str:
    if path is None:
        text, name = resources.read("sbatch", TEMPLATE), TEMPLATE
    else:
        name = path
        try:
            text = Path(path).expanduser().read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"slurm.template {path!r} cannot be read ({error}); give the path of a text file"
            ) from None
    if not text.startswith("#!"):
        raise ConfigError(f"template {name!r} does not start with '#!', which sbatch wants; begin it with #!/bin/bash")
    if "\r" in text:
        raise ConfigError(f"template {name!r} has Windows line ends, which bash does not read; convert it")
    seen = _MARK.findall(text)
    for mark in seen:
        if mark not in MARKS:
            raise ConfigError(f"template {name!r} contains {{{{{mark}}}}}; known are {', '.join(MARKS)}")
    for mark in ("directives", "command"):
        if seen.count(mark) != 1:
            raise ConfigError(f"template {name!r} contains {{{{{mark}}}}} {seen.count(mark)} times, wanted once")
    return text


def _block(
    component: ComponentPlan, plan: InferencePlacementPlan, config: RunConfig, paths: ScriptPaths
) -> Iterator[str]:
    slurm = config.slurm
    first = component.index == plan.components[0].index
    where = f"component {component.index} ({component.name})"
    if first:
        yield _option("--job-name", config.name, "name")
        yield _option("--output", log_pattern(paths.log), "run directory")
        yield "#SBATCH --open-mode=append"
        if paths.chdir is not None:
            yield _option("--chdir", str(paths.chdir), "working directory")
        # USR1 belongs to NCCL; B: signals the batch shell only, which is the supervisor.
        yield f"#SBATCH --signal=B:USR2@{slurm.signal_seconds}"
        yield "#SBATCH --requeue" if slurm.requeue else "#SBATCH --no-requeue"
    yield _option("--comment", comment(config, paths.tag), "slurm.comment")
    yield f"#SBATCH --nodes={component.nodes}"
    yield "#SBATCH --ntasks-per-node=1"
    if component.cpus_per_node is not None:
        yield f"#SBATCH --cpus-per-task={component.cpus_per_node}"
    if component.mem is not None:
        yield _option("--mem", component.mem, f"mem of {where}")
    if component.gpus_per_node:
        kind = f"{component.gpu_type}:" if component.gpu_type else ""
        _check(component.gpu_type or "x", f"gpu_type of {where}", spaces=True)
        gres = slurm.gpu_request == "gres"
        name, value = ("--gres", "gpu:") if gres else ("--gpus-per-node", "")
        yield _option(name, f"{value}{kind}{component.gpus_per_node}", f"gpu_type of {where}")
    for name, text, field in (
        ("--partition", component.partition or slurm.partition, f"partition of {where}"),
        ("--account", slurm.account, "slurm.account"),
        ("--qos", slurm.qos, "slurm.qos"),
        ("--constraint", slurm.constraint, "slurm.constraint"),
        ("--reservation", slurm.reservation, "slurm.reservation"),
        ("--time", slurm.time, "slurm.time"),
    ):
        if text is not None:
            yield _option(name, text, field)
    if slurm.exclusive:
        yield "#SBATCH --exclusive"
    for line in slurm.extra_sbatch:
        name = re.split(r"[=\s]", line, maxsplit=1)[0]
        if first or not any(is_option(name, option) for option in FIRST_ONLY):
            _check(line, "slurm.extra_sbatch", spaces=True)
            yield f"#SBATCH {line}"


def _option(name: str, value: str, field: str) -> str:
    """`#SBATCH --name=value`, quoted where the value is not plain."""
    _check(value, field, spaces=True)
    return f"#SBATCH {name}={value}" if _PLAIN.fullmatch(value) else f'#SBATCH {name}="{value}"'


def _check(value: str, field: str, *, spaces: bool) -> None:
    fault = directive_fault(value, spaces=spaces)
    if fault is None and field != "slurm.extra_sbatch" and ('"' in value or "\\" in value):
        fault = "contains a double quote or a backslash, which sbatch would drop; remove it"
    if fault is not None:
        raise ConfigError(f"{field} is {value!r}, which {fault}")
