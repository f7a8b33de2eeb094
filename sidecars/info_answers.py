"""What an admission guard lets through of the answers in which an engine speaks about itself."""

from __future__ import annotations

from typing import Any, Final

INFO_FIELDS: Final = frozenset(
    {
        "architectures",
        "context_length",
        "disaggregation_mode",
        "dp_size",
        "has_audio_understanding",
        "has_image_understanding",
        "is_generation",
        "load_balance_method",
        "max_model_len",
        "max_req_input_len",
        "max_running_requests",
        "max_total_num_tokens",
        "model_path",
        "model_type",
        "pp_size",
        "served_model_name",
        "status",
        "tokenizer_path",
        "tp_size",
        "version",
        "weight_version",
        "created",
        "data",
        "id",
        "object",
        "owned_by",
        "parent",
        "root",
    }
)
"""Fields of info answers without keys, files or the command line; what a router reads to register."""


def harmless(answer: Any, fields: frozenset[str], served_name: str | None = None) -> Any:
    """`answer` with only `fields` in it, inside lists too; nested objects are dropped.

    SGLang takes the path of a weight update for its name; with `served_name` it keeps the one that discovery has.
    """
    if not isinstance(answer, dict):
        return {}
    kept: dict[str, Any] = {}
    for key, value in answer.items():
        if key not in fields or isinstance(value, dict):
            continue
        if isinstance(value, list):
            kept[key] = [harmless(item, fields, served_name) if isinstance(item, dict) else item for item in value]
        else:
            kept[key] = value
    if served_name is not None:
        if "served_model_name" in kept:
            kept["served_model_name"] = served_name
        if kept.get("object") == "model" and kept.get("parent") is None:
            # An adapter has a parent and keeps its own name.
            kept |= {name: served_name for name in ("id", "root") if name in kept}
    return kept
