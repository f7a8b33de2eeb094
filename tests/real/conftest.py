"""What the tests with SGLang need: its environment, the chat model, and what an engine says that is asked directly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contract.engine_program import launch, require_engine, spec_of
from tests.real.asking import OPENINGS, SCORE, Straight, generation, scored


@pytest.fixture(autouse=True)
def _engine() -> None:
    """No SGLang here: skip, or fail when it is required."""
    require_engine()


@pytest.fixture(scope="session")
def chat_model() -> Path:
    """Folder of SmolLM2-135M-Instruct."""
    require_engine()
    path = os.environ.get("RELAX_TEST_CHAT_MODEL", "")
    if not path:
        pytest.skip("RELAX_TEST_CHAT_MODEL names no folder with a chat model; `make test-real` does")
    return Path(path)


@pytest.fixture(scope="session")
def straight(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Asked once, of an engine that is gone again when this returns: memory is for the runs."""
    folder = tmp_path_factory.mktemp("straight")
    with launch(spec_of("sglang", folder, model_path=str(chat_model), served_model_name="straight")) as engine:
        return Straight(
            scored(engine.post("/generate", SCORE).json()),
            {text: engine.post("/generate", generation(text)).json()["text"] for text in OPENINGS},
        )
