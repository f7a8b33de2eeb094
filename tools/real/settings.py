"""How to start SGLang in the environment of tools/real/build.sh: python tools/real/settings.py HOME

Prints shell assignments for the tests: which Python, which models, which arguments and variables make it a CPU engine.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

ENGINE_ARGS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "max_total_tokens": 32_768,
    # Of the memory that is free before the weights are loaded; max_total_tokens caps the pool. A smaller value fails
    # when somebody else takes memory in between, for instance another engine that starts.
    "mem_fraction_static": 0.9,
    # Without it an idle scheduler polls with a whole core, and a machine with two of them has none left.
    "sleep_on_idle": True,
}


def engine_env(home: Path) -> dict[str, str]:
    """Variables of a CPU engine. One thread: models this small lose more by sharing work than they win."""
    return {
        "PYTHONPATH": str(home / "shim"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def settings(home: Path) -> dict[str, str]:
    """Variables for the tests."""
    return {
        "RELAX_TEST_SGLANG_PYTHON": str(home / "venv/bin/python"),
        "RELAX_TEST_SGLANG_MODEL": str(home / "models/tiny-qwen3"),
        "RELAX_TEST_CHAT_MODEL": str(home / "models/smollm2-135m"),
        "RELAX_TEST_SGLANG_ARGS": json.dumps(ENGINE_ARGS),
        "RELAX_TEST_SGLANG_ENV": json.dumps(engine_env(home)),
    }


if __name__ == "__main__":
    for name, value in settings(Path(sys.argv[1]).resolve()).items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
