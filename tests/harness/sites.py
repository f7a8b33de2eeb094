"""The three sites and the fixtures of the launcher suite, loaded as a pytest plugin by `tests/conftest.py`.

`site` runs a test on fake Slurm commands, on virtual nodes and on a real Slurm. A test that makes sense on some of
them only says so: `@pytest.mark.parametrize("site", [LOCAL, SLURM], indirect=True)`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness.fake_slurm import FakeSlurm
from tests.harness.launch import LaunchedRun, Site, new_run
from tests.harness.slurm_cluster import SlurmCluster

FAKE, LOCAL, SLURM = "fake", "local", pytest.param("slurm", marks=pytest.mark.slurm)
NewRun = Callable[..., LaunchedRun]
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class LocalSite:
    """Virtual nodes of this machine."""

    root: Path
    kind: str = "local"

    @property
    def env(self) -> Mapping[str, str]:
        """This process's environment without any Slurm variable."""
        return {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}

    def jobs(self) -> list[str]:
        """There are no jobs."""
        return []

    def steps(self) -> list[tuple[str, str]]:
        """There are no steps."""
        return []


@dataclass(frozen=True, slots=True)
class FakeSite:
    """Fake Slurm commands."""

    root: Path
    slurm: FakeSlurm
    kind: str = "fake"

    @property
    def env(self) -> Mapping[str, str]:
        """With the commands on the PATH."""
        return self.slurm.env

    def jobs(self) -> list[str]:
        """Jobs whose batch step has not ended."""
        return [str(job["ids"][0]) for job in self.slurm.jobs() if "pid" in job or job["state"] == "RUNNING"]

    def steps(self) -> list[tuple[str, str]]:
        """Steps that run."""
        return self.slurm.steps()


@dataclass(frozen=True, slots=True)
class SlurmSite:
    """A real Slurm."""

    root: Path
    cluster: SlurmCluster
    kind: str = "slurm"

    @property
    def env(self) -> Mapping[str, str]:
        """With SLURM_CONF."""
        return self.cluster.env

    def jobs(self) -> list[str]:
        """Every job, one line per component: `12+0 RUNNING node1`."""
        return self.cluster.run("squeue", "--all", "-h", "-o", "%i %T %N").out.splitlines()

    def steps(self) -> list[tuple[str, str]]:
        """Steps with a sidecar's name."""
        rows = self.cluster.run("squeue", "--steps", "-h", "-o", "%j %N").out.splitlines()
        pairs = [(row.split()[0], row.split()[-1]) for row in rows if row.strip()]
        return sorted(pair for pair in pairs if pair[0].startswith("sidecar-"))


@pytest.fixture(scope="module", params=[FAKE, LOCAL, SLURM])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Where this test's runs get their nodes."""
    folder = tmp_path_factory.mktemp(request.param)
    root = folder / "runs"
    if request.param == "fake":
        return FakeSite(root, FakeSlurm(folder / "slurm"))
    if request.param == "local":
        return LocalSite(root)
    return SlurmSite(root, request.getfixturevalue("slurm4"))


@pytest.fixture
def new(site: Site, tmp_path: Path) -> Iterator[NewRun]:
    """Makes runs on the site out of a config; they are ended after the test."""
    with contextlib.ExitStack() as stack:

        def make(body: Mapping[str, Any], site: Site = site) -> LaunchedRun:
            return stack.enter_context(new_run(site, body, tmp_path, fresh_name()))

        yield make


def fresh_name() -> str:
    """A run's name that no other test of any process uses."""
    return f"t{os.getpid()}-{next(_numbers)}"


def small(**changes: Any) -> dict[str, Any]:
    """Three roles on two nodes of two GPUs, with short times: the config of most tests. `changes` are merged in."""
    base: dict[str, Any] = {
        "placement": "split",
        "engine": {
            "program": "sim",
            "startup_seconds": 20,
            "sim": {"seed": 7, "tokens_per_second": 4000, "startup_seconds": 0.05, "error_rate": 0.0},
        },
        "pools": {"actor": {"nodes": 2, "gpus_per_node": 2}},
        "training": {"pool": "actor", "gpus": 4},
        "roles": {
            "rollout": {"pool": "actor", "models": {"policy": {"model_path": "sim/policy", "gpus": 2}}},
            "genrm": {"pool": "actor", "models": {"judge": {"model_path": "sim/judge", "gpus": 1}}},
            "teacher": {"pool": "actor", "models": {"teacher": {"model_path": "sim/teacher", "gpus": 1}}},
        },
        "control": {
            "beat_seconds": 0.25,
            "silence_seconds": 5,
            "operation_seconds": 15,
            "drain_seconds": 2,
            "bind_seconds": 20,
        },
        "slurm": {"time": "0:10:00"},
    }
    return merged(base, changes)


def own_ports() -> dict[str, int]:
    """A port window that other runs of this machine do not look into: for a test that needs a port back."""
    first = 10_000 + os.getpid() * 7919 % 90 * 100
    return {"first": first, "last": first + 99}


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, mapping by mapping."""
    out = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else value
    return out
