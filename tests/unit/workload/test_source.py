"""Prompt files: every bad line is named, and nothing is used of a file that has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.workload.failures import BadPrompts
from relax_slurm.workload.source import PromptSource, prompt_of, read_prompts


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_fields_of_a_line(tmp_path: Path) -> None:
    row = {
        "prompt": "p",
        "label": 42,
        "metadata": {"data_source": "math"},
        "difficulty": 3,
        "multimodal": {"image_data": "u"},
    }
    text = json.dumps(row) + '\n\n  \n{"input_ids": [1, 2]}'
    first, second = read_prompts(written(tmp_path, text))
    assert (first.text, first.label, first.metadata) == ("p", "42", {"data_source": "math", "difficulty": 3})
    assert first.multimodal == {"image_data": "u"}
    assert (second.text, second.input_ids, second.label) == (None, (1, 2), None)


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "not JSON"),
        ("[1]", "is list, wanted an object"),
        ("{}", "exactly one of prompt and input_ids"),
        ('{"prompt": "a", "input_ids": [1]}', "exactly one"),
        ('{"prompt": ""}', "not empty"),
        ('{"prompt": 3}', "wanted text"),
        ('{"input_ids": []}', "token ids"),
        ('{"input_ids": [1, -2]}', "token ids"),
        ('{"input_ids": [true]}', "token ids"),
        ('{"prompt": "a", "label": [1]}', "label is"),
        ('{"prompt": "a", "label": true}', "label is"),
        ('{"prompt": "a", "metadata": 1}', "metadata is 1"),
        ('{"prompt": "a", "metadata": {"x": 1}, "x": 2}', "'x' is there twice"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, match: str) -> None:
    path = written(tmp_path, f'{{"prompt": "good"}}\n{line}\n{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(BadPrompts, match=match) as caught:
        read_prompts(path)
    assert caught.value.message.startswith(f"{path}:2: ")
    assert "2 bad lines in all" in caught.value.message
    assert [text.partition(": ")[0] for text in caught.value.detail["lines"]] == [f"{path}:2", f"{path}:4"]
    assert caught.value.exit_code == 2


def test_files_that_are_none(tmp_path: Path) -> None:
    for text in (b"", b"\n\n"):
        with pytest.raises(BadPrompts, match="holds no prompts"):
            read_prompts(written(tmp_path, text))
    with pytest.raises(BadPrompts, match="No such file"):
        read_prompts(tmp_path / "nowhere")
    with pytest.raises(BadPrompts, match=":1: not UTF-8"):
        read_prompts(written(tmp_path, b'{"prompt": "\xff"}'))
    with pytest.raises(BadPrompts, match="there are none"):
        PromptSource([])


@given(counts=st.lists(st.integers(0, 7), max_size=6), size=st.integers(1, 5))
def test_prompts_go_round_in_order(counts: list[int], size: int) -> None:
    source = PromptSource([prompt_of({"prompt": str(number)}) for number in range(size)])
    taken: list[Any] = [prompt.text for count in counts for prompt in source.take(count)]
    assert taken == [str(number % size) for number in range(sum(counts))]
    assert source.position == sum(counts)
    assert len(source) == size
