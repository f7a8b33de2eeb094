"""Messages rendered on the head node are the token ids that transformers makes of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from relax_slurm.gateway.render import Renderer
from relax_slurm.gateway.sources import RenderSource
from tests.contract.engine_program import real_sglang
from tests.unit.gateway.chat_folders import CONVERSATIONS, variants


def transformers_ids(cases: list[tuple[str, dict[str, Any]]]) -> list[list[int]]:
    """What the library says, in one process because importing it takes seconds."""
    done = subprocess.run(
        [os.environ["RELAX_TEST_SGLANG_PYTHON"], str(Path(__file__).with_name("apply_chat_template.py"))],
        input=json.dumps(cases),
        env={**os.environ, **real_sglang()["env"]},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[list[int]] = json.loads(done.stdout)
    return answers


def test_ids_are_equal(tmp_path: Path, chat_model: Path) -> None:
    folders = {
        **variants(tmp_path),
        "SmolLM2": chat_model,
        "tiny Qwen3": Path(os.environ["RELAX_TEST_SGLANG_MODEL"]),
    }
    # Templates that put text together by + fail on a list, there as here.
    cases = {
        (name, title): (str(folder), conversation)
        for name, folder in folders.items()
        for title, conversation in CONVERSATIONS.items()
        if not (name == "SmolLM2" and title == "parts")
    }
    ours = {
        key: Renderer(RenderSource(folder)).render(
            conversation["messages"], True, conversation.get("chat_template_kwargs")
        )
        for key, (folder, conversation) in cases.items()
    }
    assert ours == dict(zip(cases, transformers_ids(list(cases.values())), strict=True))
    assert len({tuple(ids) for ids in ours.values()}) > 20, "the cases differ"
