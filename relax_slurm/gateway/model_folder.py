"""The files of a model folder that turn messages into tokens, read as transformers reads them.

`tokenizer.json`, `tokenizer_config.json`, `special_tokens_map.json`, `chat_template.jinja`, `chat_template.json` and
`additional_chat_templates/`. Only the standard library: what the files mean to a tokenizer is `render`'s business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_slurm.gateway.sources import RenderSource

MAX_TEXT_BYTES = 16 * 1024 * 1024
"""Largest configuration or template that is read; the tokenizer itself may be larger."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)


class Unusable(Exception):
    """Messages cannot be rendered from this folder; the engine has to. The text says why."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token beside the vocabulary. The flags are those of the `tokenizers` library."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    """None: the opposite of `special`, the library's default."""
    special: bool = False


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What a folder says."""

    tokenizer: Path
    templates: Mapping[str, str]
    """By name; at least one."""
    special_tokens: Mapping[str, AddedToken]
    """bos_token, eos_token and so on, also those that only this model has (image_token)."""
    added_tokens: Mapping[int, AddedToken] = field(default_factory=dict)
    """By the id that the configuration gives them."""

    def template(self, name: str | None, *, tools: bool) -> str:
        """The template called `name`; without a name the default one, or the one for tools when there are any."""
        wanted = name or ("tool_use" if tools and "tool_use" in self.templates else "default")
        try:
            return self.templates[wanted]
        except KeyError:
            raise Unusable(f"there is no chat template {wanted!r}, only {sorted(self.templates)}") from None


def state_of(source: RenderSource) -> tuple[tuple[int, int] | None, ...]:
    """Time of change and size of every file that counts: another value means that the folder must be read again."""
    paths = [Path(source.folder, name) for name in _FILES]
    if source.template_file is not None:
        paths.append(Path(source.template_file))
    state: list[tuple[int, int] | None] = []
    for path in paths:
        try:
            entry = path.stat()
        except OSError:
            state.append(None)
        else:
            state.append((entry.st_mtime_ns, entry.st_size))
    return tuple(state)


def read(source: RenderSource) -> ModelFolder:
    """The folder's content; `Unusable` when it is not readable or lacks a tokenizer or a template."""
    folder = Path(source.folder)
    tokenizer = folder / "tokenizer.json"
    try:
        with tokenizer.open("rb"):
            pass
    except OSError as error:
        raise Unusable(f"{tokenizer} cannot be read ({error.strerror})") from None
    config = _object(folder / "tokenizer_config.json")
    added = _added_tokens(config)
    if not added:
        # Folders of older libraries keep the named tokens in a file of their own; it wins over the configuration.
        config |= _object(folder / "special_tokens_map.json")
    templates = _templates(folder, config)
    if source.template_file is not None:
        # SGLang takes the text of such a file in this way.
        text = _text(Path(source.template_file), needed=True).strip("\n").replace("\\n", "\n")
        templates = {"default": text}
    if not templates:
        raise Unusable(f"{folder} has no chat template")
    return ModelFolder(tokenizer, templates, _special_tokens(config, added), added)


def _text(path: Path, *, needed: bool = False) -> str:
    """The content, empty when there is no such file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except FileNotFoundError:
        if needed:
            raise Unusable(f"{path} does not exist") from None
        return ""
    except OSError as error:
        raise Unusable(f"{path} cannot be read ({error.strerror})") from None
    if len(content) > MAX_TEXT_BYTES:
        raise Unusable(f"{path} is larger than {MAX_TEXT_BYTES} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise Unusable(f"{path} is not UTF-8") from None


def _object(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise Unusable(f"{path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise Unusable(f"{path} is not a JSON object")
    return value


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Files of their own win over the configuration; a processor's template is the last resort."""
    files: dict[str, str] = {}
    if text := _text(folder / "chat_template.jinja"):
        files["default"] = text
    more = folder / "additional_chat_templates"
    if more.is_dir():
        files |= {path.stem: _text(path) for path in sorted(more.glob("*.jinja"))}
    if files:
        return files
    for found in (config.get("chat_template"), _object(folder / "chat_template.json").get("chat_template")):
        if isinstance(found, str) and found:
            return {"default": found}
        if isinstance(found, list) and found:
            named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
            return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}
        if isinstance(found, dict) and found:
            return {name: text for name, text in found.items() if isinstance(text, str)}
    return {}


def _token(value: Any, *, special: bool) -> AddedToken | None:
    """A token written as text or as an object; None for anything else."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        return None
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    known = {name: value[name] for name in flags if isinstance(value.get(name), bool)}
    return AddedToken(value["content"], **{"special": special, **known})


def _added_tokens(config: Mapping[str, Any]) -> dict[int, AddedToken]:
    entries = config.get("added_tokens_decoder")
    if not isinstance(entries, dict):
        return {}
    tokens = {number: _token(value, special=False) for number, value in entries.items()}
    return {int(number): token for number, token in tokens.items() if token is not None and number.isdigit()}


def _special_tokens(config: Mapping[str, Any], added: Mapping[int, AddedToken]) -> dict[str, AddedToken]:
    """Named tokens with the flags that their entry among the added ones has."""
    own = config.get("extra_special_tokens")
    values = {
        **{name: config.get(name) for name in NAMED_TOKENS},
        **{name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str | dict)},
        **(own if isinstance(own, dict) else {}),
    }
    known = {token.content: token for token in added.values()}
    tokens = {name: _token(value, special=True) for name, value in values.items()}
    return {name: known.get(token.content, token) for name, token in tokens.items() if token is not None}
