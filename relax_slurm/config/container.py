"""The section about containers."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator

from relax_slurm.config.base import OptionLine, PathText, Section, Text


class ContainerConfig(Section):
    """A container around the engines. Supervisor, coordinator, gateway and routers stay on the host."""

    runtime: Literal["apptainer", "enroot", "pyxis"]
    """`apptainer` and `enroot` run each engine in the image, started by the node's sidecar on the host. `pyxis` runs
    the node's whole step in it, sidecar included, so this package must be installed in the image."""
    image: PathText
    """What the runtime takes: a `.sif` or `docker://…` for apptainer, a `.sqsh` for enroot, any of pyxis's forms."""
    mounts: tuple[PathText, ...] = ()
    """`HOST:INSIDE[:ro]`, such as `/models:/models:ro`. The run directory is always mounted in its own place."""
    python: Text = "python3"
    """Interpreter inside the image."""
    gpus: bool = True
    """Let the runtime bring the NVIDIA driver in; false for engines on a CPU."""
    options: tuple[OptionLine, ...] = ()
    """Further options of the runtime, one per entry, such as `--writable-tmpfs`."""

    @field_validator("mounts")
    @classmethod
    def _mounts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for mount in value:
            if not re.fullmatch(r"/[^:,]*:/[^:,]*(:(ro|rw))?", mount):
                raise ValueError(
                    f"entry {mount!r} is not HOST:INSIDE[:ro] with absolute paths and no comma; correct it"
                )
        return value

    @field_validator("options")
    @classmethod
    def _options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for line in value:
            if not line.startswith("-"):
                raise ValueError(f"entry {line!r} is not an option; write it as --option=value")
        return value

    @model_validator(mode="after")
    def _one_word(self) -> ContainerConfig:
        if any(character in self.image for character in ", ") and self.runtime == "pyxis":
            raise ValueError(f"has the image {self.image!r}, in which pyxis would see several words; rename it")
        return self
