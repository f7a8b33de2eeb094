"""docs/configuration.md is what the classes say."""

from __future__ import annotations

from relax_slurm.config import reference
from relax_slurm.config.models import RunConfig


def test_the_page_is_up_to_date() -> None:
    assert reference.main(["--check"]) == 0, "run: python -m relax_slurm.config.reference"


def test_every_key_has_a_meaning() -> None:
    rows = [line for line in reference.page().splitlines() if line.startswith("| `")]
    assert all(not line.endswith("|  |") for line in rows)
    for name in RunConfig.model_fields:
        assert any(line.startswith(f"| `{name}` |") for line in rows)
