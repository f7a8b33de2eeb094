"""Files that come with the package: sbatch templates and example run files.

A wheel carries them inside the package (`_resources/`); a checkout has them beside it.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from relax_slurm.errors import ConfigError

KINDS = ("sbatch", "configs")


def folder(kind: str) -> Traversable:
    """The folder of one kind of resource. ConfigError when the installation is incomplete."""
    packaged = files("relax_slurm").joinpath("_resources", kind)
    if packaged.is_dir():
        return packaged
    beside = Path(__file__).resolve().parent.parent / kind
    if kind in KINDS and beside.is_dir():
        return beside
    raise ConfigError(f"this installation has no resource folder {kind!r}; install relax-slurm again")


def names(kind: str) -> tuple[str, ...]:
    """Names of the files of one kind, sorted."""
    return tuple(sorted(entry.name for entry in folder(kind).iterdir() if entry.is_file()))


def read(kind: str, name: str) -> str:
    """Text of one file. ConfigError that lists what there is when the name is not among it."""
    if name not in names(kind):
        raise ConfigError(f"there is no {kind} resource {name!r}; there are: {', '.join(names(kind)) or 'none'}")
    return folder(kind).joinpath(name).read_text(encoding="utf-8")
