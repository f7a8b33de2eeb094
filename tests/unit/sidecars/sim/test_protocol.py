"""Bodies in, sequences out, without any IO."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecars.sim import openai
from sidecars.sim.access import allowed
from sidecars.sim.protocol import Broken, Deadly, Invalid, Limits, parse_generate

LIMITS = Limits(vocab_size=512, context_length=100)


def parse(**body: Any) -> Any:
    return parse_generate(body, LIMITS, "fresh")


def test_defaults() -> None:
    (item,) = parse(text="hi").sequences
    assert (item.rid, item.prompt, item.logprobs) == ("fresh", (104, 105), None)


def test_a_batch_with_copies_is_flat_and_named() -> None:
    request = parse(text=["a", "b"], rid="r", sampling_params={"n": 2, "max_new_tokens": 3})
    assert request.batch
    assert [item.rid for item in request.sequences] == ["r_0", "r_1", "r_2", "r_3"]
    assert [item.prompt for item in request.sequences] == [(97,), (98,), (97,), (98,)]


def test_lists_belong_to_batches() -> None:
    request = parse(
        input_ids=[[1], [2, 3]],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 2}],
        return_logprob=[True, False],
        logprob_start_len=[0, -1],
        top_logprobs_num=3,
    )
    first, second = request.sequences
    assert (first.sampling.max_new_tokens, second.sampling.max_new_tokens) == (1, 2)
    assert (first.logprobs.start, first.logprobs.top) == (0, 3)
    assert second.logprobs is None


def test_no_start_means_no_input_log_probs() -> None:
    (item,) = parse(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 1}, return_logprob=True).sequences
    assert item.logprobs.start == 3


@pytest.mark.parametrize(
    ("body", "validation"),
    [
        ({}, False),
        ({"input_ids": []}, False),
        ({"text": 5}, True),
        ({"input_ids": ["a"]}, True),
        ({"text": "a", "stream": "yes"}, True),
        ({"text": "a", "sampling_params": 3}, True),
        ({"text": "a", "sampling_params": {"temperature": -1}}, False),
        ({"text": "a", "sampling_params": {"top_p": 0}}, False),
        ({"text": "a", "sampling_params": {"top_k": 0}}, False),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, False),
        ({"text": "a", "sampling_params": {"max_new_tokens": 100}}, False),
        ({"text": "a" * 100}, False),
        ({"text": ["a", "b"], "rid": ["x"]}, False),
        ({"text": ["a", "b"], "rid": ["x", "x"]}, False),
        ({"text": "a", "rid": 7}, True),
        ({"input_ids": [1], "return_logprob": True, "token_ids_logprob": [512]}, False),
        ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, False),
        ({"text": ["a", "b"], "sampling_params": [{}]}, False),
    ],
)
def test_refusals(body: dict[str, Any], validation: bool) -> None:
    body = {"sampling_params": {"max_new_tokens": 1}, **body}
    with pytest.raises(Invalid) as caught:
        parse(**body)
    assert caught.value.validation is validation
    document = caught.value.native_body()
    if validation:
        assert document["object"] == "error"
        assert document["type"] == "Bad Request"
    else:
        assert document == {"error": {"message": caught.value.message}}
    assert caught.value.stream_event()["error"]["retryable"] is False


@pytest.mark.parametrize(
    "params",
    [{"no_such": 1}, {"temperature": "hot"}, {"n": "two"}, {"stop": 3}, {"stop": ["a", 3]}, {"ignore_eos": 1}],
)
def test_the_schema_of_sampling_parameters_has_a_shape_of_its_own(params: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as caught:
        parse(text="a", sampling_params=params)
    assert caught.value.native_body() == {"error": caught.value.message}
    assert caught.value.validation


def test_oddities_that_are_accepted() -> None:
    (item,) = parse(text="a", input_ids=[1], sampling_params={"n": 0}).sequences
    assert item.prompt == (1,), "token ids win over a text"
    assert parse(text=[]).sequences == ()
    with pytest.raises(Broken):
        parse(text="a", sampling_params=[{}])


@pytest.mark.parametrize(
    "body",
    [
        {"text": ""},
        {"text": ["a", ""]},
        {"text": "a", "input_ids": []},
        {"input_ids": [[1], []]},
        {"input_ids": [1, 512]},
        {"input_ids": [-1]},
        {"input_ids": [1], "return_logprob": True, "logprob_start_len": -2},
        {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 513},
    ],
)
def test_deadly(body: dict[str, Any]) -> None:
    with pytest.raises(Deadly):
        parse(**body, sampling_params={"max_new_tokens": 1})


@pytest.mark.parametrize("params", [{"top_k": 2**31}, {"min_new_tokens": 1, "stop_token_ids": [512]}])
def test_deadly_parameters(params: dict[str, Any]) -> None:
    with pytest.raises(Deadly):
        parse(text="a", sampling_params={"max_new_tokens": 1, **params})


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"logit_bias": {"512": 1.0}}, r"logit_bias must has keys in \[0, 511\], got 512"),
        ({"logit_bias": {"-1": 1.0}}, r"logit_bias must has keys in \[0, 511\], got -1"),
        ({"logit_bias": {"x": 1.0}}, "invalid literal"),
        ({"min_new_tokens": 2}, r"min_new_tokens must be in \[0, max_new_tokens\(1\)\]"),
        ({"min_new_tokens": -1}, "min_new_tokens must be in"),
    ],
)
def test_parameters_that_are_refused_once_the_vocabulary_is_known(params: dict[str, Any], words: str) -> None:
    with pytest.raises(Invalid, match=words):
        parse(text="a", sampling_params={"max_new_tokens": 1, **params})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 600) | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(
    [
        *("text", "input_ids", "sampling_params", "stream", "rid", "return_logprob", "logprob_start_len"),
        *("top_logprobs_num", "token_ids_logprob", "messages", "prompt", "n", "stop", "max_tokens", "logprobs"),
    ]
)


@given(JSON | st.dictionaries(KEYS, JSON))
def test_any_json_is_answered(body: Any) -> None:
    """A body is served, refused, or deadly in the known ways; it never surprises the parser."""
    for one in (
        lambda: parse_generate(body, LIMITS, "fresh"),
        lambda: openai.parse(body, LIMITS, "fresh", chat=True),
        lambda: openai.parse(body, LIMITS, "fresh", chat=False),
    ):
        with contextlib.suppress(Invalid, Deadly, Broken):
            one()


def test_chat_content_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "image_url"}, {"type": "text", "text": "3"}]
    body = {"messages": [{"role": "system", "content": None}, {"role": "user", "content": parts}]}
    request = openai.parse(body, LIMITS, "fresh", chat=True)
    assert bytes(request.items[0].prompt) == b"system: \n\nuser: 2+\n3\n\nassistant:"
    assert request.model == openai.DEFAULT_MODEL


@pytest.mark.parametrize(
    ("body", "chat"),
    [
        ({"prompt": [1, 512]}, False),
        ({"prompt": "a", "logprobs": 513}, False),
        ({"prompt": "a", "min_tokens": 1, "stop_token_ids": [512]}, False),
        ({"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 513}, True),
    ],
)
def test_deadly_on_the_openai_routes(body: dict[str, Any], chat: bool) -> None:
    with pytest.raises(Deadly):
        openai.parse(body, LIMITS, "fresh", chat=chat)


@pytest.mark.parametrize(
    ("path", "key", "api", "admin", "admin_route", "passes"),
    [
        ("/generate", None, None, None, False, True),
        ("/generate", None, "a", None, False, False),
        ("/generate", "a", "a", "b", False, True),
        ("/generate", "b", "a", "b", False, False),
        ("/generate", None, None, "b", False, True),
        ("/flush_cache", "a", "a", None, True, True),
        ("/flush_cache", "a", "a", "b", True, False),
        ("/flush_cache", "b", "a", "b", True, True),
        ("/health_generate", None, "a", "b", False, True),
        ("/metrics", None, "a", "b", False, True),
    ],
)
def test_keys(path: str, key: str | None, api: str | None, admin: str | None, admin_route: bool, passes: bool) -> None:
    header = None if key is None else f"Bearer {key}"
    decided = allowed("POST", path, header, api_key=api, admin_key=admin, admin_route=admin_route)
    assert decided is passes
