"""What the tests with SGLang need: its environment, and the small models of tools/real/build.sh."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.engine_program import require_engine


@pytest.fixture(autouse=True)
def _engine() -> None:
    """No SGLang here: skip, or fail when it is required."""
    require_engine()


@pytest.fixture
def chat_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    path = os.environ.get("RELAX_TEST_CHAT_MODEL", "")
    if not path:
        pytest.skip("RELAX_TEST_CHAT_MODEL names no folder with a chat model; `make test-real` does")
    return Path(path)
