from __future__ import annotations

import pytest

from relax_slurm import resources
from relax_slurm.errors import ConfigError


def test_the_shipped_template_is_found() -> None:
    assert "run.sbatch" in resources.names("sbatch")
    assert resources.read("sbatch", "run.sbatch").startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [
        ("sbatch", "nope.sbatch", "run.sbatch"),
        ("sbatch", "../pyproject.toml", "there are"),
        ("nope", "x", "resource folder"),
        ("../tests", "x", "resource folder"),
    ],
)
def test_what_is_not_there_is_refused(kind: str, name: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        resources.read(kind, name)
