"""Fixtures that test modules import by name: `from tests.harness.fixtures import slurm4  # noqa: F401`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.harness.slurm_cluster import SlurmCluster
from tests.harness.slurm_host import missing_programs


def require_slurm() -> None:
    """Skip the test, saying why, on a machine without Slurm; fail it when the environment's REQUIRE names slurm."""
    missing = missing_programs()
    if missing:
        reason = f"no real Slurm here: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)"
        if "slurm" in os.environ.get("REQUIRE", "").replace(",", " ").split():
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session")
def slurm4() -> Iterator[SlurmCluster]:
    """A real Slurm of 4 nodes with 8 fake h100 GPUs and 8 CPUs each, shared by the tests of one process."""
    require_slurm()
    with SlurmCluster(4) as cluster:
        yield cluster
