"""Requests that an engine would accept and not survive, told apart from all others. Pure.

SGLang checks much of a request and answers 400; what it does not check reaches the scheduler, whose end is the end of
the engine. The rules here are about exactly those values (docs/judge.md, Requests that are refused), found with SGLang
0.5.23; an older version that coerces text and floats to numbers is covered because only whole numbers pass. Everything
else is the engine's business: unknown fields, other fields and their values are not looked at.

`check` takes a decoded body. Deciding on the bytes of a usual request without decoding all of it is
`sidecars.payload_check`'s business, which may accept only what is accepted here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from relax_slurm.errors import BadRequest

MAX_COPIES: Final = 1024
"""Largest `n`: an engine makes that many requests of one before it looks at any of them."""


MAX_REQUESTS: Final = 16_384
"""Most requests that one body may become, prompts times copies: an engine makes all of them before it serves any."""
MAX_TOP_K: Final = 2**31 - 1
"""Largest `top_k`: it becomes a 32-bit number in the scheduler, whatever was sent."""
PER_REQUEST: Final = ("return_logprob",)
"""More fields of which a batch may have one per prompt, and a single prompt may not."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What an engine can take."""

    vocab_size: int | None = None
    """Token ids are 0 to this, exclusive. None: not known, so only negative ones are refused."""
    max_copies: int = MAX_COPIES

    @property
    def ids(self) -> str:
        """The possible ids, for a message."""
        return "from 0 on" if self.vocab_size is None else f"from 0 to {self.vocab_size - 1}"


def check(path: str, body: Any, rules: Rules) -> None:
    """Raise `BadRequest` when the body of a request to `path` would end the engine. Other paths are not checked."""
    rule = CHECKS.get(path)
    if rule is None:
        return
    if not isinstance(body, Mapping):
        raise BadRequest(f"{path}: the body is {_kind(body)}, wanted one JSON object")
    rule(body, rules)


def check_generate(body: Mapping[str, Any], rules: Rules) -> None:
    """SGLang's own payload, single or a batch."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None and ids is not None:
        raise _wrong("text", "is there beside input_ids", "one of the two")
    if text is not None:
        _prompts("text", text, rules, tokens=False)
    if ids is not None:
        _prompts("input_ids", ids, rules, text=False)
    size = _batch_size(body)
    _requests("the batch", size or 1, None)
    for where, value in _each("logprob_start_len", body, size):
        _whole(where, value, -1, None)
    for where, value in _each("top_logprobs_num", body, size):
        _whole(where, value, 0, rules.vocab_size)
    for where, value in _id_lists("token_ids_logprob", body, size):
        _tokens(where, value, rules)
    for where, params in _each("sampling_params", body, size):
        if not isinstance(params, Mapping):
            raise _wrong(where, f"is {_kind(params)}", "an object of parameters")
        _sampling(where + ".", params, rules)
        _requests(f"{where}.n", size or 1, params.get("n"))
    for name in PER_REQUEST:
        _each(name, body, size)
    if body.get("positional_embed_overrides") is not None:
        raise _wrong("positional_embed_overrides", "is set", "no such field, because JSON cannot carry tensors")


def check_completion(body: Mapping[str, Any], rules: Rules) -> None:
    """OpenAI's completion."""
    prompt = body.get("prompt")
    if prompt is not None:
        _prompts("prompt", prompt, rules)
    logprobs = body.get("logprobs")
    if logprobs is not None and not isinstance(logprobs, bool):
        _whole("logprobs", logprobs, 0, rules.vocab_size)
    _sampling("", body, rules)
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    _requests("n", prompts, body.get("n"))


def check_chat(body: Mapping[str, Any], rules: Rules) -> None:
    """OpenAI's chat; SGLang also takes a prompt of `input_ids` beside the messages."""
    ids = body.get("input_ids")
    if ids is not None:
        if not isinstance(ids, list):
            raise _wrong("input_ids", f"is {_kind(ids)}", "a list of token ids")
        _prompts("input_ids", ids, rules, text=False, batch=False)
    if (top := body.get("top_logprobs")) is not None:
        _whole("top_logprobs", top, 0, rules.vocab_size)
    _sampling("", body, rules)


CHECKS: Final[Mapping[str, Callable[[Mapping[str, Any], Rules], None]]] = MappingProxyType(
    {
        "/generate": check_generate,
        "/v1/completions": check_completion,
        "/v1/chat/completions": check_chat,
        "/chat/completions": check_chat,
    }
)
"""Every path that gives an engine work."""


# --- values ---------------------------------------------------------------------------------------------------------


def _wrong(where: str, seen: str, wanted: str) -> BadRequest:
    return BadRequest(f"{where} {seen}, wanted {wanted}; nothing was given to the engine, correct the request")


def _kind(value: Any) -> str:
    """What a value is, in JSON's words; never the value itself, which may be long."""
    if isinstance(value, Mapping):
        return "an object"
    names = {str: "a string", bool: "a boolean", int: "a whole number", float: "a fraction", list: "a list"}
    return "null" if value is None else names.get(type(value), "no JSON value")


def _batch_size(body: Mapping[str, Any]) -> int | None:
    """Prompts of a batch; None for a single prompt, which is not the same as a batch of one."""
    text, ids, embeds = (body.get(name) for name in ("text", "input_ids", "input_embeds"))
    if text is not None:
        return len(text) if isinstance(text, list) else None
    if ids is not None:
        return len(ids) if isinstance(ids, list) and ids and isinstance(ids[0], list) else None
    if isinstance(embeds, list) and embeds and isinstance(embeds[0], list):
        return len(embeds) if embeds[0] and isinstance(embeds[0][0], list) else None
    return None


def _each(name: str, body: Mapping[str, Any], size: int | None) -> list[tuple[str, Any]]:
    """A value that is given once, or in a batch as a list with one per prompt; nothing for null."""
    value = body.get(name)
    if not isinstance(value, list):
        return [] if value is None else [(name, value)]
    if size is None:
        raise _wrong(name, "is a list", "one value, as there is one prompt")
    if len(value) != size:
        raise _wrong(name, f"has {len(value)} values", f"{size}, one per prompt")
    return [(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _id_lists(name: str, body: Mapping[str, Any], size: int | None) -> list[tuple[str, list[Any]]]:
    """One list of ids, or in a batch also one per prompt; an empty one says nothing."""
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(name, f"is {_kind(value)}", "a list of token ids")
    if not (value and isinstance(value[0], list)):
        return [(name, value)]
    rows = _each(name, body, size)
    for where, row in rows:
        if not isinstance(row, list):
            raise _wrong(where, f"is {_kind(row)}", "a list of token ids, as the others")
    return rows


def _whole(where: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int:
        raise _wrong(where, f"is {_kind(value)}", "a whole number")
    if value < least or (most is not None and value > most):
        limit = f"at least {least}" if most is None else f"from {least} to {most}"
        raise _wrong(where, f"is {_short(value)}", f"{limit}{' (the vocabulary)' if most is not None else ''}")


def _tokens(where: str, ids: list[Any], rules: Rules) -> None:
    """All ids are whole numbers of the vocabulary. Written for lists of many thousands."""
    if not ids:
        return
    most = rules.vocab_size
    if set(map(type, ids)) == {int} and min(ids) >= 0 and (most is None or max(ids) < most):
        return
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise _wrong(f"{where}[{index}]", f"is {_kind(token)}", f"a token id {rules.ids}")
        if token < 0 or (most is not None and token >= most):
            raise _wrong(f"{where}[{index}]", f"is {_short(token)}", f"a token id {rules.ids}")


def _short(number: int) -> str:
    """A number for a message; JSON allows very long ones."""
    return str(number) if abs(number) < 10**20 else "a number of more than 20 digits"


def _prompts(
    name: str, value: Any, rules: Rules, *, text: bool = True, tokens: bool = True, batch: bool = True
) -> None:
    """A prompt, or a list of prompts. None may be empty: an engine cannot run a sequence without a token."""
    if isinstance(value, str) and text:
        if not value:
            raise _wrong(name, "is empty", "some text")
        return
    if not isinstance(value, list):
        raise _wrong(name, f"is {_kind(value)}", "text" if text and not tokens else "a list of token ids")
    if not value:
        raise _wrong(name, "is empty", "at least one token or text")
    if text and isinstance(value[0], str) and batch:
        for index, item in enumerate(value):
            if not isinstance(item, str) or not item:
                seen = "is empty" if item == "" else f"is {_kind(item)}"
                raise _wrong(f"{name}[{index}]", seen, "some text, as all others")
        return
    if not tokens:
        raise _wrong(f"{name}[0]", f"is {_kind(value[0])}", "some text")
    if isinstance(value[0], list) and batch:
        for index, item in enumerate(value):
            if not isinstance(item, list) or not item:
                seen = "is empty" if item == [] else f"is {_kind(item)}"
                raise _wrong(f"{name}[{index}]", seen, "a list with at least one token id")
            _tokens(f"{name}[{index}]", item, rules)
        return
    _tokens(name, value, rules)


def _sampling(prefix: str, params: Mapping[str, Any], rules: Rules) -> None:
    """Parameters of sampling; the OpenAI routes have them among the other fields."""
    copies = params.get("n")
    if copies is not None:
        if not isinstance(copies, int):
            raise _wrong(f"{prefix}n", f"is {_kind(copies)}", "a whole number")
        if copies > rules.max_copies:
            raise _wrong(f"{prefix}n", f"is {_short(copies)}", f"at most {rules.max_copies}")
    top_k = params.get("top_k")
    if top_k is not None and not isinstance(top_k, int | float):
        raise _wrong(f"{prefix}top_k", f"is {_kind(top_k)}", "a whole number")
    if top_k is not None and top_k > MAX_TOP_K:
        raise _wrong(f"{prefix}top_k", "is more than 32 bits hold", f"at most {MAX_TOP_K}, or -1 for no limit")
    bias = params.get("logit_bias")
    if bias is not None:
        _bias(f"{prefix}logit_bias", bias, rules)
    stops = params.get("stop_token_ids")
    # As soon as any request of the engine's batch has a shortest length, the stop tokens of all of them are used as
    # indexes into the logits, so this depends on what strangers ask for at the same time.
    if stops is not None:
        if not isinstance(stops, list):
            raise _wrong(f"{prefix}stop_token_ids", f"is {_kind(stops)}", "a list of token ids")
        _tokens(f"{prefix}stop_token_ids", stops, rules)


def _requests(where: str, prompts: int, copies: Any) -> None:
    """How many requests the engine would make of this body."""
    total = prompts * max(int(copies or 1), 1)
    if total > MAX_REQUESTS:
        raise _wrong(where, f"makes {total} requests of {prompts} prompts", f"at most {MAX_REQUESTS} in one body")


def _bias(where: str, bias: Any, rules: Rules) -> None:
    if not isinstance(bias, Mapping):
        raise _wrong(where, f"is {_kind(bias)}", "an object from token ids to numbers")
    for key in bias:
        try:
            token = int(key)
        except ValueError:
            raise _wrong(f"{where}.{key[:20]}", "is no token id", f"a token id {rules.ids}") from None
        if token < 0 or (rules.vocab_size is not None and token >= rules.vocab_size):
            raise _wrong(f"{where}.{_short(token)}", "is no token id", f"a token id {rules.ids}")
