"""Where a judge's tokenizer and chat template are: a folder that this machine may read, or only the engine knows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import msgspec

from relax_slurm.config.engine_args import canonical


class RenderSource(msgspec.Struct, frozen=True):
    """What messages are rendered with. Also the form in which a renderer process is told about it."""

    folder: str
    """Absolute path of the folder with tokenizer.json."""
    template_file: str | None = None
    """A Jinja file that the engine was told to use instead of the folder's template."""
    template_name: str | None = None
    """Which one of several templates; None takes the one called default."""


def source_of(model_path: str, engine_args: Mapping[str, Any]) -> RenderSource | str:
    """The source for a judge with these settings, or the reason why only its engine can render. Looks at no file.

    Follows SGLang's arguments: `tokenizer_path` wins over the model's path, `chat_template` over the folder's
    template, `hf_chat_template_name` names one of several.
    """
    args = {canonical(key): value for key, value in engine_args.items()}
    folder = args.get("tokenizer_path") or model_path
    if not isinstance(folder, str) or not PurePosixPath(folder).is_absolute():
        return f"{folder!r} is no absolute path, so the engine alone knows where it is"
    if args.get("tokenizer_mode") not in (None, "auto", "fast"):
        return f"tokenizer_mode is {args['tokenizer_mode']!r}, which the engine alone can do"
    template = args.get("chat_template")
    if template is not None and not (
        isinstance(template, str) and PurePosixPath(template).is_absolute() and template.endswith(".jinja")
    ):
        return f"chat_template is {template!r}, which the engine alone knows; an absolute path of a .jinja file is read"
    name = args.get("hf_chat_template_name")
    return RenderSource(folder, template, name if isinstance(name, str) else None)
