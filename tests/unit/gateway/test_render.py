"""Messages to token ids, with tokenizers made here and ids known beforehand."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.gateway import model_folder
from relax_slurm.gateway.model_folder import Unusable
from relax_slurm.gateway.render import NO_VARIABLES, Renderer, Renderers
from relax_slurm.gateway.sources import RenderSource, source_of
from relax_slurm.gateway.template import ChatTemplate, Refused
from tests.unit.gateway.chat_folders import CHATML, CONVERSATIONS, EVERYTHING, MESSAGES, variants, write_folder

HELLO = [{"role": "user", "content": "hello world"}]
GOLDEN = [1, 291, 201, 326, 322, 2, 201, 1, 67, 286, 323, 201]
"""`<|im_start|>user\\nhello world<|im_end|>\\n<|im_start|>assistant\\n` with the tokenizer of `chat_folders`."""


def renderer(folder: Path, **more: Any) -> Renderer:
    return Renderer(RenderSource(str(folder), **more))


def test_ids_are_golden(tmp_path: Path) -> None:
    made = renderer(write_folder(tmp_path / "m"))
    assert made.text(HELLO) == "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\n"
    assert made.render(HELLO) == GOLDEN
    assert made.render(HELLO, add_generation_prompt=False) == GOLDEN[:7]


def test_all_that_transformers_gives_to_a_template(tmp_path: Path) -> None:
    folder = variants(tmp_path)["everything"]
    made = renderer(folder)
    text = made.text(CONVERSATIONS["several"]["messages"], True, {"enable_thinking": False})
    last = json.dumps(CONVERSATIONS["several"]["messages"][-1], ensure_ascii=False)
    assert text == (
        "<|begin|>"
        "<|im_start|>system\nGrade.<|im_end|>\n\n"
        "<|im_start|>user\n2 + 3?<|im_end|>\n\n"
        "<|im_start|>assistant\n5<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n\n"
        + last
        + '{"a": "<é>", "b": [1, 2.5, null, true]}<|im_start|>assistant\n<think>\n\n</think>\n<image>-<|im_end|>4'
    )
    tools = made.text(MESSAGES, True, CONVERSATIONS["tools"]["chat_template_kwargs"])
    assert '# Tools\n{\n  "type": "function"' in tools


def test_added_tokens_are_single_ids(tmp_path: Path) -> None:
    made = renderer(variants(tmp_path)["everything"])
    ids = made.render(MESSAGES, True, {"enable_thinking": False})
    vocabulary = made._tokenizer
    for token in ("<think>", "</think>", "<|begin|>", "<image>"):
        number = vocabulary.token_to_id(token)
        assert number is not None
        assert ids.count(number) == 1, token


@pytest.mark.parametrize("name", ["template in the configuration", "file before configuration", "plain"])
def test_where_a_template_is_found(tmp_path: Path, name: str) -> None:
    assert renderer(variants(tmp_path)[name]).render(HELLO) == GOLDEN


@pytest.mark.parametrize("name", ["named templates", "additional templates"])
def test_one_of_several_templates(tmp_path: Path, name: str) -> None:
    folder = variants(tmp_path)[name]
    assert renderer(folder).render(HELLO) == GOLDEN
    assert renderer(folder).text(HELLO, True, {"tools": []}).startswith("tools! ")
    assert renderer(folder, template_name="tool_use").text(HELLO).startswith("tools! ")
    with pytest.raises(Unusable, match="no chat template 'other'"):
        renderer(folder, template_name="other")


def test_a_processor_s_template_is_the_last_resort(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert renderer(folder).render(HELLO) == GOLDEN


def test_a_template_file_of_the_engine_s_arguments(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", "not me")
    other = tmp_path / "other.jinja"
    other.write_text("\n" + CHATML.replace("\n", "\\n") + "\n")
    assert renderer(folder, template_file=str(other)).render(HELLO) == GOLDEN
    other.unlink()
    with pytest.raises(Unusable, match="does not exist"):
        renderer(folder, template_file=str(other))


def test_special_tokens_of_an_older_folder(tmp_path: Path) -> None:
    made = renderer(variants(tmp_path)["special tokens in a file of their own"])
    assert made.text(HELLO).startswith("<s><|im_start|>")
    assert made.render(HELLO)[1:] == GOLDEN


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        ("{{ raise_exception('only one ' + messages[0].role) }}", MESSAGES, "refuses these messages: only one user"),
        (EVERYTHING, [*MESSAGES, {"role": "system", "content": "x"}], "a system message must come first"),
        ("{{ messages[0].content + 1 }}", MESSAGES, "TypeError"),
        ("{{ messages[0].nothing.at_all }}", MESSAGES, "UndefinedError"),
        ("{{ messages.append(1) }}", MESSAGES, "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", MESSAGES, "SecurityError"),
        ("{{ range(10 ** 9) | list | length }}", MESSAGES, "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", MESSAGES, "RecursionError"),
        ("{% for i in range(99999) %}{{ messages[0].content * 100 }}{% endfor %}", MESSAGES, "longer than"),
        ("{% if false %}x{% endif %}", MESSAGES, "no token"),
        (CHATML, [{"role": "user", "content": "\ud800"}], "cannot be tokenized"),
    ],
)
def test_refused_in_words(tmp_path: Path, template: str, messages: list[dict[str, Any]], reason: str) -> None:
    made = renderer(write_folder(tmp_path / "m", template))
    with pytest.raises(Refused, match=reason):
        made.render(messages)
    assert made.render is not None


@pytest.mark.parametrize("name", sorted(NO_VARIABLES))
def test_arguments_that_are_no_variables(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused, match=f"chat_template_kwargs.{name} "):
        renderer(write_folder(tmp_path / "m")).render(HELLO, True, {name: True})


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (shutil.rmtree, "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{}"), "cannot be read by tokenizers"),
        (lambda folder: (folder / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda folder: (folder / "chat_template.jinja").write_text("{% for %}"), "cannot be compiled"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xff"), "is not UTF-8"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("["), "is not JSON"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("[]"), "is not a JSON object"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path: Path, spoil: Any, reason: str) -> None:
    folder = write_folder(tmp_path / "m")
    spoil(folder)
    with pytest.raises(Unusable, match=reason):
        renderer(folder)


def test_a_template_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "m")
    monkeypatch.setattr(model_folder, "MAX_TEXT_BYTES", 10)
    with pytest.raises(Unusable, match="larger than 10 bytes"):
        renderer(folder)


def test_a_generation_block_has_names_of_its_own() -> None:
    text = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{% endgeneration %}{{ a }}"
    assert ChatTemplate(text).render({}, 100) == "21"


def test_renderers_are_kept_until_a_file_changes(tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / str(index)) for index in range(3)]
    sources = [RenderSource(str(folder)) for folder in folders]
    kept = Renderers(size=2)
    first = kept.get(sources[0])
    assert kept.get(sources[0]) is first
    template = folders[0] / "chat_template.jinja"
    template.write_text("again " + CHATML)
    os.utime(template, ns=(1, 1))
    again = kept.get(sources[0])
    assert again is not first
    assert again.text(HELLO).startswith("again ")
    kept.get(sources[1])
    assert kept.get(sources[0]) is again
    kept.get(sources[2])
    kept.get(sources[1])
    assert kept.get(sources[0]) is not again, "two are kept"


@pytest.mark.parametrize(
    ("model_path", "args", "source"),
    [
        ("/m/a", {}, RenderSource("/m/a")),
        ("/m/a", {"--tokenizer-path": "/m/b"}, RenderSource("/m/b")),
        ("org/a", {"tokenizer_path": "/m/b"}, RenderSource("/m/b")),
        ("/m/a", {"chat-template": "/t.jinja"}, RenderSource("/m/a", "/t.jinja")),
        ("/m/a", {"hf_chat_template_name": "rag"}, RenderSource("/m/a", None, "rag")),
        ("/m/a", {"tokenizer_mode": "auto"}, RenderSource("/m/a")),
        ("org/a", {}, "no absolute path"),
        ("sim/judge", {}, "no absolute path"),
        ("/m/a", {"tokenizer_path": "org/b"}, "no absolute path"),
        ("/m/a", {"tokenizer_mode": "slow"}, "tokenizer_mode"),
        ("/m/a", {"chat_template": "llama-2"}, "chat_template"),
        ("/m/a", {"chat_template": "/t.json"}, "chat_template"),
    ],
)
def test_sources(model_path: str, args: dict[str, Any], source: RenderSource | str) -> None:
    found = source_of(model_path, args)
    if isinstance(source, str):
        assert isinstance(found, str)
        assert source in found
    else:
        assert found == source
