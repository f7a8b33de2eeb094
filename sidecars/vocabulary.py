"""How many token ids an engine knows. SGLang tells it nowhere directly, so it is asked in three ways.

`/model_info` has no such field up to 0.5.23 (a version that has it is believed). A request with a bias for the token -1
is refused before it reaches the scheduler, by a sentence that names the last id: that is the number the engine itself
compares with, whatever was overridden at its start. The last resort is config.json, where the engine read it too.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_slurm.errors import RelaxError
from sidecars.engine_http import EngineHttp
from sidecars.sim.options import SimOptions
from sidecars.worker import WorkerSpec

ASK_SECONDS = 10.0
_REFUSED = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}}}
_LAST_ID = re.compile(rb"logit_bias must has keys in \[0, (\d{1,9})\]")
_TEXT_MODELS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where configurations of models with more than text keep the one for text."""


async def vocabulary(worker: WorkerSpec, http: EngineHttp) -> int | None:
    """The size for an engine that has just become healthy; None when it cannot be found out."""
    if worker.program == "sim":
        return int(worker.sim.get("vocab_size", SimOptions().vocab_size))
    return await _told(http) or await _asked(http) or await asyncio.to_thread(configured, worker.model_path, worker.env)


async def _told(http: EngineHttp) -> int | None:
    try:
        answer = await http.send("GET", "/model_info", None, ASK_SECONDS, admin=False)
        return _size(http.document("/model_info", answer).get("vocab_size"))
    except RelaxError:
        return None


async def _asked(http: EngineHttp) -> int | None:
    try:
        answer = await http.send("POST", "/generate", _REFUSED, ASK_SECONDS, admin=False)
    except RelaxError:
        return None
    found = _LAST_ID.search(answer.body) if answer.status == 400 else None
    return None if found is None else int(found[1]) + 1


def configured(model_path: str, env: Mapping[str, str]) -> int | None:
    """What config.json says, in the model's folder or in the hub's cache on this node."""
    folder = Path(model_path)
    config = _read(folder / "config.json") or _read(_cached(model_path, {**os.environ, **env}) / "config.json")
    while config:
        size = _size(config.get("vocab_size"))
        if size is not None:
            return size
        config = next((inner for name in _TEXT_MODELS if isinstance(inner := config.get(name), dict)), {})
    return None


def _cached(name: str, env: Mapping[str, str]) -> Path:
    """Folder of a hub model's newest revision, as the hub's library lays out its cache; it need not exist."""
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = Path(env.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    repository = cache / ("models--" + name.replace("/", "--"))
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        revision = "none"
    return repository / "snapshots" / revision


def _read(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
