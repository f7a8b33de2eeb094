"""Which requests an engine would not survive."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.payload import CHECKS, MAX_COPIES, Rules, check
from relax_slurm.errors import BadRequest

VOCABULARY = 512
RULES = Rules(VOCABULARY)
IDS = {"input_ids": [7, 8]}
TWO = {"input_ids": [[7, 8], [9]]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "2"}]}
COMPLETION = {"model": "m", "prompt": "2"}

GENERATE_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("input_ids[1]", {"input_ids": [7, 512]}),
    ("input_ids[0]", {"input_ids": [-1]}),
    ("input_ids[0]", {"input_ids": [10**40]}),
    ("input_ids[0]", {"input_ids": [1.0]}),
    ("input_ids[0]", {"input_ids": ["7"]}),
    ("input_ids[1]", {"input_ids": [7, True]}),
    ("input_ids[1]", {"input_ids": [7, [8]]}),
    ("input_ids[1]", {"input_ids": [[7], 8]}),
    ("input_ids[1][0]", {"input_ids": [[7], [512]]}),
    ("input_ids[1]", {"input_ids": [[7], []]}),
    ("input_ids ", {"input_ids": []}),
    ("input_ids ", {"input_ids": "7"}),
    ("input_ids ", {"input_ids": {"0": 7}}),
    ("text ", {**IDS, "text": "2"}),
    ("text ", {"input_ids": [], "text": "2"}),
    ("text ", {"text": ""}),
    ("text ", {"text": []}),
    ("text[1]", {"text": ["2", ""]}),
    ("text[1]", {"text": ["2", 3]}),
    ("text[0]", {"text": [3]}),
    ("text ", {"text": 3}),
    ("logprob_start_len ", {**IDS, "logprob_start_len": -2}),
    ("logprob_start_len ", {**IDS, "return_logprob": True, "logprob_start_len": -2}),
    ("logprob_start_len ", {**IDS, "logprob_start_len": "-2"}),
    ("logprob_start_len ", {**IDS, "logprob_start_len": -2.0}),
    ("logprob_start_len ", {**IDS, "logprob_start_len": [0]}),
    ("logprob_start_len[1]", {**TWO, "logprob_start_len": [0, -2]}),
    ("logprob_start_len ", {**TWO, "logprob_start_len": [0]}),
    ("top_logprobs_num ", {**IDS, "top_logprobs_num": 513}),
    ("top_logprobs_num ", {**IDS, "top_logprobs_num": -1}),
    ("top_logprobs_num ", {**IDS, "top_logprobs_num": "513"}),
    ("top_logprobs_num ", {**IDS, "top_logprobs_num": True}),
    ("top_logprobs_num[1]", {**TWO, "top_logprobs_num": [0, 513]}),
    ("top_logprobs_num[0]", {"text": ["a", "b"], "top_logprobs_num": [None, 0]}),
    ("token_ids_logprob[0]", {**IDS, "token_ids_logprob": [512]}),
    ("token_ids_logprob[0]", {**IDS, "token_ids_logprob": [-1]}),
    ("token_ids_logprob ", {**IDS, "token_ids_logprob": 5}),
    ("token_ids_logprob ", {**IDS, "token_ids_logprob": [[5]]}),
    ("token_ids_logprob[1][0]", {**TWO, "token_ids_logprob": [[5], [512]]}),
    ("token_ids_logprob[1]", {**TWO, "token_ids_logprob": [[5], 5]}),
    ("return_logprob ", {**IDS, "return_logprob": [True]}),
    ("return_logprob ", {**TWO, "return_logprob": [True]}),
    ("sampling_params ", {**IDS, "sampling_params": [{}]}),
    ("sampling_params ", {**IDS, "sampling_params": "n"}),
    ("sampling_params.n ", {**IDS, "sampling_params": {"n": MAX_COPIES + 1}}),
    ("sampling_params.n ", {"text": ["a"] * 17, "sampling_params": {"n": MAX_COPIES}}),
    ("the batch ", {"text": ["a"] * 16_385}),
    ("sampling_params.n ", {**IDS, "sampling_params": {"n": 10**30}}),
    ("sampling_params.n ", {**IDS, "sampling_params": {"n": "2"}}),
    ("sampling_params.n ", {**IDS, "sampling_params": {"n": 1e9}}),
    ("sampling_params[1].n ", {**TWO, "sampling_params": [{}, {"n": 10**6}]}),
    ("sampling_params.top_k ", {**IDS, "sampling_params": {"top_k": 2**31}}),
    ("sampling_params.top_k ", {**IDS, "sampling_params": {"top_k": 1e12}}),
    ("sampling_params.logit_bias.512 ", {**IDS, "sampling_params": {"logit_bias": {"512": 1}}}),
    ("sampling_params.logit_bias.-1 ", {**IDS, "sampling_params": {"logit_bias": {"-1": 1}}}),
    ("sampling_params.logit_bias.a ", {**IDS, "sampling_params": {"logit_bias": {"a": 1}}}),
    ("sampling_params.logit_bias ", {**IDS, "sampling_params": {"logit_bias": [1]}}),
    ("sampling_params.stop_token_ids[0]", {**IDS, "sampling_params": {"stop_token_ids": [512]}}),
    ("sampling_params.stop_token_ids[1]", {**IDS, "sampling_params": {"stop_token_ids": [7, -5]}}),
    ("sampling_params.stop_token_ids ", {**IDS, "sampling_params": {"stop_token_ids": 5}}),
    ("positional_embed_overrides ", {**IDS, "positional_embed_overrides": [1]}),
]
CHAT_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("top_logprobs ", {**CHAT, "logprobs": True, "top_logprobs": 513}),
    ("top_logprobs ", {**CHAT, "top_logprobs": "513"}),
    ("top_logprobs ", {**CHAT, "top_logprobs": -1}),
    ("input_ids[0]", {**CHAT, "input_ids": [512]}),
    ("input_ids ", {**CHAT, "input_ids": []}),
    ("input_ids[0]", {**CHAT, "input_ids": [[7]]}),
    ("input_ids ", {**CHAT, "input_ids": "7"}),
    ("n ", {**CHAT, "n": 10**6}),
    ("top_k ", {**CHAT, "top_k": 10**12}),
    ("top_k ", {**CHAT, "top_k": "1000000000000"}),
    ("logit_bias.512 ", {**CHAT, "logit_bias": {"512": 1}}),
    ("stop_token_ids[0]", {**CHAT, "stop_token_ids": [512]}),
]
COMPLETION_REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("n ", {"prompt": ["a"] * 17, "n": MAX_COPIES}),
    ("prompt[1]", {**COMPLETION, "prompt": [7, 512]}),
    ("prompt[0]", {**COMPLETION, "prompt": [True]}),
    ("prompt[1][0]", {**COMPLETION, "prompt": [[7], [512]]}),
    ("prompt[1]", {**COMPLETION, "prompt": [[7], []]}),
    ("prompt[1]", {**COMPLETION, "prompt": ["2", ""]}),
    ("prompt ", {**COMPLETION, "prompt": ""}),
    ("prompt ", {**COMPLETION, "prompt": []}),
    ("prompt ", {**COMPLETION, "prompt": 7}),
    ("logprobs ", {**COMPLETION, "logprobs": 513}),
    ("logprobs ", {**COMPLETION, "logprobs": "513"}),
    ("logprobs ", {**COMPLETION, "logprobs": -1}),
    ("n ", {**COMPLETION, "n": 10**6}),
    ("top_k ", {**COMPLETION, "top_k": 10**12}),
    ("logit_bias.512 ", {**COMPLETION, "logit_bias": {"512": 1}}),
    ("stop_token_ids[0]", {**COMPLETION, "stop_token_ids": [512]}),
]
REFUSED = [
    *(("/generate", where, body) for where, body in GENERATE_REFUSED),
    *(("/v1/completions", where, body) for where, body in COMPLETION_REFUSED),
    *((path, where, body) for path in ("/v1/chat/completions", "/chat/completions") for where, body in CHAT_REFUSED),
]
PASSED: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {}),
    ("/generate", {"input_ids": None, "text": None}),
    ("/generate", {"input_ids": [0, 511]}),
    ("/generate", TWO),
    ("/generate", {"text": "2"}),
    ("/generate", {"text": ["2", "3"], "input_ids": None}),
    ("/generate", {**IDS, "return_logprob": True, "logprob_start_len": -1, "top_logprobs_num": 512}),
    ("/generate", {**IDS, "return_logprob": 1, "logprob_start_len": 10**6, "top_logprobs_num": None}),
    ("/generate", {**IDS, "token_ids_logprob": []}),
    ("/generate", {**IDS, "token_ids_logprob": [5, 6]}),
    ("/generate", {**TWO, "token_ids_logprob": [5, 6], "logprob_start_len": [0, -1], "top_logprobs_num": [0, 512]}),
    ("/generate", {**TWO, "token_ids_logprob": [[5], []], "return_logprob": [True, False]}),
    ("/generate", {**TWO, "sampling_params": [{}, {"n": None}]}),
    ("/generate", {"input_embeds": [[[0.1]], [[0.1]]], "logprob_start_len": [0, -1]}),
    ("/generate", {"input_embeds": [[0.1]], "logprob_start_len": 0}),
    ("/generate", {"text": ["a"] * 16, "sampling_params": {"n": MAX_COPIES}}),
    ("/generate", {**IDS, "sampling_params": {"n": MAX_COPIES, "min_new_tokens": 2, "stop_token_ids": [5, 511]}}),
    ("/generate", {**IDS, "sampling_params": {"min_new_tokens": 2, "stop_token_ids": []}}),
    ("/generate", {**IDS, "sampling_params": {"n": 0, "min_new_tokens": 2, "stop_token_ids": None}}),
    ("/generate", {**IDS, "sampling_params": {"logit_bias": {"0": 1, " 5": -1.5, "511": None}, "no_such": [1]}}),
    ("/generate", {**IDS, "sampling_params": {"top_k": 2**31 - 1, "temperature": 0.5}}),
    ("/generate", {**IDS, "sampling_params": {"top_k": -1}}),
    ("/generate", {**IDS, "no_such_field": [-1], "rid": 5, "stream": "yes", "positional_embed_overrides": None}),
    ("/v1/completions", {}),
    ("/v1/completions", COMPLETION),
    ("/v1/completions", {**COMPLETION, "prompt": ["2", "3"], "logprobs": True}),
    ("/v1/completions", {**COMPLETION, "prompt": [[7], [511]], "logprobs": 512, "n": 2}),
    ("/v1/chat/completions", CHAT),
    ("/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 512, "input_ids": [511], "n": 2}),
    ("/chat/completions", {**CHAT, "logprobs": "maybe", "top_logprobs": None}),
    ("/abort_request", {"input_ids": [-1]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "where", "body"), REFUSED, ids=lambda value: json.dumps(value)[:60])
def test_refused(path: str, where: str, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as caught:
        check(path, body, RULES)
    assert caught.value.message.startswith(where), caught.value.message
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(("path", "body"), PASSED, ids=lambda value: json.dumps(value)[:60])
def test_passed(path: str, body: dict[str, Any]) -> None:
    check(path, body, RULES)


@pytest.mark.parametrize("body", [None, 1, "x", [], True])
def test_a_body_is_an_object(body: Any) -> None:
    for path in CHECKS:
        with pytest.raises(BadRequest):
            check(path, body, RULES)


def test_an_unknown_vocabulary_has_no_end_but_a_beginning() -> None:
    check("/generate", {"input_ids": [10**9], "top_logprobs_num": 10**9}, Rules())
    with pytest.raises(BadRequest, match="from 0 on"):
        check("/generate", {"input_ids": [-1]}, Rules())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-600, 600) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *("text", "input_ids", "prompt", "messages", "logprob_start_len", "top_logprobs_num", "token_ids_logprob"),
    *("return_logprob", "sampling_params", "positional_embed_overrides", "logprobs", "top_logprobs", "n"),
    *("logit_bias", "top_k", "stop_token_ids", "input_embeds"),
)


@given(st.sampled_from(sorted(CHECKS)), st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_whatever_comes_is_passed_or_refused(path: str, body: dict[str, Any]) -> None:
    with contextlib.suppress(BadRequest):
        check(path, body, RULES)


@given(st.lists(st.integers(-5, 520) | st.booleans() | st.floats(0, 9), min_size=1, max_size=6))
def test_ids_are_what_they_are_said_to_be(ids: list[Any]) -> None:
    good = all(type(token) is int and 0 <= token < VOCABULARY for token in ids)
    try:
        check("/generate", {"input_ids": ids}, RULES)
    except BadRequest:
        assert not good
    else:
        assert good
