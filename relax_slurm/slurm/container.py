"""Command lines of container runtimes, as text. Nothing is started here.

apptainer and enroot wrap one engine: the process that the sidecar starts is the runtime, which becomes the engine in
the same session and with the same tags in its environment, so that ownership and clean-up are as without a container.
pyxis is a plugin of srun: its options belong to the node's step, whose sidecar then runs in the image as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relax_slurm.config.container import ContainerConfig

HOST_ONLY = frozenset({"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD", "CONDA_PREFIX"})
"""Variables that describe the host's Python and libraries; inside the image they lead to files of another system."""


def own_mounts(run_dir: Path) -> tuple[str, ...]:
    """What an engine needs of ours: the run directory, with its key file and logs, at the same path."""
    return (f"{run_dir}:{run_dir}",)


def engine_environment(env: Mapping[str, str], given: Iterable[str]) -> dict[str, str]:
    """The engine's environment without what belongs to the host, unless the run file gives it (`given`)."""
    keep = set(given)
    return {name: value for name, value in env.items() if name not in HOST_ONLY or name in keep}


def wrap(container: ContainerConfig, argv: Sequence[str], env: Mapping[str, str], mounts: Sequence[str]) -> list[str]:
    """`argv` inside the image. `env` is passed on: by apptainer as it is, by enroot name by name; no value in argv."""
    binds = [*mounts, *container.mounts]
    if container.runtime == "apptainer":
        words = ["apptainer", "exec", *(["--nv"] if container.gpus else [])]
        words += [word for bind in binds for word in ("--bind", bind)]
        return [*words, *container.options, container.image, *argv]
    words = ["enroot", "start"]
    words += [word for bind in binds for word in ("--mount", bind)]
    words += [word for name in sorted(env) if name not in ("PATH", "HOME") for word in ("--env", name)]
    return [*words, *container.options, container.image, *argv]


def step_options(container: ContainerConfig | None, mounts: Sequence[str]) -> list[str]:
    """What pyxis adds to the srun of a node's step; nothing for the other runtimes."""
    if container is None or container.runtime != "pyxis":
        return []
    binds = ",".join([*mounts, *container.mounts])
    return [f"--container-image={container.image}", f"--container-mounts={binds}", *container.options]
