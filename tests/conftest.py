"""Shared test settings: one hypothesis profile, and what is required instead of skipped."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Two busy cores make wall-clock deadlines of single examples meaningless; the seed is fixed so that CI repeats itself.
settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
