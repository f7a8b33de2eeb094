"""Warnings: what is allowed and probably not meant."""

from __future__ import annotations

from typing import Any

import pytest

from relax_slurm.cli.warn import warnings
from relax_slurm.config.load import from_mapping
from relax_slurm.core.placement import plan

RUN: dict[str, Any] = {
    "name": "t",
    "placement": "decoupled",
    "pools": {"p": {"nodes": 1, "gpus_per_node": 2}},
    "roles": {"rollout": {"pool": "p", "models": {"m": {"model_path": "x", "gpus": 2}}}},
}


def test_gpu_nodes_with_one_cpu_are_warned_about() -> None:
    config = from_mapping(RUN | {"head": {}})
    (sentence,) = warnings(plan(config), config)
    assert "cpus_per_node is not set for p:" in sentence  # and not for the head, whose CPUs have a default
    assert "pools.POOL.cpus_per_node" in sentence


@pytest.mark.parametrize(
    "changes",
    [
        {"pools": {"p": {"nodes": 1, "gpus_per_node": 2, "cpus_per_node": 16}}},
        {"slurm": {"exclusive": True}},
        {"slurm": {"extra_sbatch": ["--cpus-per-gpu=8"]}},
    ],
)
def test_whoever_asked_for_cpus_is_left_in_peace(changes: dict[str, Any]) -> None:
    config = from_mapping(RUN | changes)
    assert warnings(plan(config), config) == ()
