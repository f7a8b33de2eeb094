"""The adapters that come with the package."""

from __future__ import annotations

from relax_slurm.workload.rewards import genrm, math, remote
from relax_slurm.workload.rewards.registry import RewardRegistry


def shipped() -> RewardRegistry:
    """A registry of its own, to which more can be added."""
    return RewardRegistry([math.REGISTRATION, genrm.REGISTRATION, remote.REGISTRATION])
