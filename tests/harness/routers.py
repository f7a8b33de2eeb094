"""Where the tests find an sglang-router: RELAX_TEST_ROUTER_PYTHON, or the environment of the real lane."""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

import pytest

IMPORT = "import sys; sys.modules['sglang'] = None; import sglang_router.launch_router"
"""As the starter does it."""


@cache
def router_python() -> str | None:
    """A Python interpreter that has sglang-router; None when there is none."""
    named = os.environ.get("RELAX_TEST_ROUTER_PYTHON") or os.environ.get("RELAX_TEST_SGLANG_PYTHON")
    cached = Path.home() / ".cache" / "relax-slurm"
    candidates = [named] if named else [str(path) for path in sorted(cached.glob("real-*/venv/bin/python"))]
    for python in candidates:
        asked = subprocess.run([python, "-c", IMPORT], capture_output=True, check=False)
        if asked.returncode == 0:
            return python
    return None


def require_router() -> str:
    """The interpreter; the test is skipped without one, which fails it where `engine` is required."""
    python = router_python()
    if python is None:
        pytest.skip("no sglang-router here: name a Python that has it in RELAX_TEST_ROUTER_PYTHON, or `make test-real`")
    return python
