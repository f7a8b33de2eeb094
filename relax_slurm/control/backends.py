"""Which backend a launch uses, and the object behind each kind."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from enum import StrEnum

from relax_slurm.control.local import LocalBackend
from relax_slurm.errors import ConfigError
from relax_slurm.slurm.backend import Backend, SlurmBackend
from relax_slurm.slurm.command import SECONDS
from relax_slurm.slurm.environment import inside_job


class BackendKind(StrEnum):
    """How a run got its nodes; the `backend` of job.json."""

    SLURM = "slurm"
    """A job that we submitted and may cancel."""
    BORROWED = "borrowed"
    """An allocation that we were started in: we end our steps and never the job."""
    LOCAL = "local"
    """Virtual nodes on this machine."""


def choose(wanted: str, environ: Mapping[str, str]) -> BackendKind:
    """The kind for `--backend auto|slurm|local`. Inside an allocation `slurm` borrows it."""
    if wanted == "local":
        return BackendKind.LOCAL
    if inside_job(environ):
        return BackendKind.BORROWED
    found = shutil.which("sbatch", path=environ.get("PATH")) is not None
    if wanted == "slurm" and not found:
        raise ConfigError("--backend slurm: there is no sbatch on the PATH; load Slurm or use --backend local")
    return BackendKind.SLURM if found else BackendKind.LOCAL


def backend_for(kind: str, *, seconds: float = SECONDS) -> Backend:
    """The object that submits, polls and cancels. A borrowed allocation's supervisor is a process of ours.

    `seconds` is how long one Slurm command may take.
    """
    return SlurmBackend(seconds=seconds) if kind == BackendKind.SLURM else LocalBackend()
