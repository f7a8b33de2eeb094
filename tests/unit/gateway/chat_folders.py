"""Model folders with a small tokenizer and a chat template, made in a moment and the same each time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

LINES = [
    "hello world this is a tiny tokenizer",
    "The capital of France is Paris.",
    "0 1 2 3 4 5 6 7 8 9",
    "system user assistant",
]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Is 2 + 3 = 5? é 日本 <|im_end|>"}]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

EVERYTHING = """
{%- macro say(role, text) -%}<|im_start|>{{ role }}
{{ text | trim }}<|im_end|>
{% endmacro -%}
{{ bos_token }}{% set ns = namespace(system=false) %}
{%- if tools %}
    {{- "# Tools\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}
    {%- endfor %}
{%- endif %}
{% for m in messages %}
    {% if m.role == 'system' and not loop.first %}{{ raise_exception('a system message must come first') }}{% endif %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% if m.role == 'stop' %}{% break %}{% endif %}
    {% if m.role == 'assistant' %}
        {% generation %}{{ say(m.role, m.content.split('</think>')[-1]) }}{% endgeneration %}
    {% elif m.content is string %}{{ say(m.role, m.content) }}
    {% else %}{% for part in m.content %}{{ say(m.role, part.text) }}{% endfor %}
    {% endif %}
{% endfor %}
{{ messages[-1] | tojson }}{{ {'a': '<é>', 'b': [1, 2.5, none, true]} | tojson }}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>
{% endif %}{{ "%s-%s" | format(image_token, eos_token) }}{{ strftime_now('%Y') | length }}
{%- endif %}"""
"""Uses all that transformers gives to a template."""


def tokenizer(**more: Any) -> Tokenizer:
    """A byte-level BPE of at most 400 tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        **more,
    )
    bpe.train_from_iterator(LINES * 20, trainer)
    return bpe


def write_folder(folder: Path, template: str | None = CHATML, **config: Any) -> Path:
    """A folder as `save_pretrained` leaves it; `config` goes into tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def variants(root: Path) -> dict[str, Path]:
    """A folder for every way in which tokens and templates are written down."""
    made = {"plain": write_folder(root / "plain")}
    made["template in the configuration"] = write_folder(root / "config", None, chat_template=CHATML)
    named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools! " + CHATML}]
    made["named templates"] = write_folder(root / "named", None, chat_template=named)
    made["file before configuration"] = write_folder(root / "both", CHATML, chat_template="not me")
    more = made["additional templates"] = write_folder(root / "more", CHATML)
    (more / "additional_chat_templates").mkdir()
    (more / "additional_chat_templates" / "tool_use.jinja").write_text("tools! " + CHATML)
    made["everything"] = write_folder(
        root / "everything",
        EVERYTHING,
        bos_token={"__type": "AddedToken", "content": "<|begin|>", "lstrip": False, "normalized": False,
                   "rstrip": False, "single_word": False, "special": True},
        image_token="<image>",
        pad_token=None,
        added_tokens_decoder={
            "0": {"content": "<|endoftext|>", "lstrip": False, "normalized": False, "rstrip": False,
                  "single_word": False, "special": True},
            "1": {"content": "<|im_start|>", "lstrip": False, "normalized": False, "rstrip": False,
                  "single_word": False, "special": True},
            "2": {"content": "<|im_end|>", "lstrip": False, "normalized": False, "rstrip": True,
                  "single_word": False, "special": True},
            "500": {"content": "<think>", "lstrip": False, "normalized": False, "rstrip": False,
                    "single_word": False, "special": False},
            "501": {"content": "</think>", "lstrip": True, "normalized": False, "rstrip": False,
                    "single_word": False, "special": False},
        },
    )  # fmt: skip
    old = made["special tokens in a file of their own"] = write_folder(root / "old", "{{ bos_token }}" + CHATML)
    (old / "special_tokens_map.json").write_text(
        json.dumps({"bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                                  "single_word": False}, "eos_token": "<|im_end|>"})
    )  # fmt: skip
    return made


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one": {"messages": MESSAGES},
    "several": {
        "messages": [
            {"role": "system", "content": "  Grade.  "},
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "<think>hm</think> 5 "},
            {"role": "user", "content": "sure?\n"},
        ]
    },
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    },
    "no thinking": {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}},
    "tools": {
        "messages": MESSAGES,
        "chat_template_kwargs": {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"é": 1}}}]},
    },
    "left out": {
        "messages": [
            {"role": "skip", "content": "x"},
            {"role": "user", "content": "hello"},
            {"role": "stop", "content": "x"},
            {"role": "user", "content": "never"},
        ]
    },
    "special tokens that are given": {"messages": MESSAGES, "chat_template_kwargs": {"bos_token": "<|im_end|>"}},
}
