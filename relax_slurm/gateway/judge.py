"""GenRM's `messages` form, carried by the engine's chat route: `{"messages", "sampling_params"}` to `{"response"}`.

The engine renders the judge's template. Sampling parameters are translated by a table; what has no place in a
chat request is refused by name, because a judge that silently ignores a parameter spoils every reward.
"""

from __future__ import annotations

from typing import Any

import msgspec

from relax_slurm.errors import BadRequest, UpstreamFailed
from relax_slurm.gateway.payload import Fields, read_object, value_of

SAMPLING_TO_CHAT: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "no_stop_trim": "no_stop_trim",
    "regex": "regex",
    "ebnf": "ebnf",
    "sampling_seed": "seed",
}
"""SGLang's sampling parameters and their names in a chat request."""

_KNOWN = frozenset({"messages", "sampling_params", "chat_template_kwargs", "model", "route_key", "stream"})
_encode = msgspec.json.Encoder().encode


def chat_body(body: bytes, served_model_name: str) -> bytes:
    """The chat request for a `messages` request. BadRequest names what cannot be carried over."""
    fields = read_object(body)
    unknown = sorted(fields.keys() - _KNOWN)
    if unknown:
        raise BadRequest(f"field {unknown[0][:80]!r} does not go with messages; possible are {sorted(_KNOWN)}")
    messages = value_of(fields, "messages")
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise BadRequest("messages must be a non-empty list of objects that have a role")
    chat: Fields = {
        "model": msgspec.Raw(_encode(served_model_name)),
        "messages": fields["messages"],
        "stream": msgspec.Raw(b"false"),
        **_sampling(value_of(fields, "sampling_params")),
    }
    template = value_of(fields, "chat_template_kwargs")
    if template not in (None, msgspec.UNSET):
        if not isinstance(template, dict):
            raise BadRequest(f"chat_template_kwargs must be an object, seen {template!r:.80}")
        chat["chat_template_kwargs"] = fields["chat_template_kwargs"]
    return _encode(chat)


def _sampling(params: Any) -> Fields:
    if params is None or params is msgspec.UNSET:
        return {}
    if not isinstance(params, dict):
        raise BadRequest(f"sampling_params must be an object, seen {params!r:.80}")
    chat: Fields = {}
    for name, value in params.items():
        if name == "n" and value == 1:
            continue
        if name not in SAMPLING_TO_CHAT:
            raise BadRequest(
                f"sampling_params.{name[:80]} has no place in a messages request; possible are"
                f" {sorted(SAMPLING_TO_CHAT)}, or send input_ids"
            )
        chat[SAMPLING_TO_CHAT[name]] = msgspec.Raw(_encode(value))
    return chat


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Answer(msgspec.Struct):
    choices: list[_Choice]


_decode_answer = msgspec.json.Decoder(_Answer).decode


def judge_answer(body: bytes, origin: str) -> bytes:
    """`{"response": text}` from the engine's chat answer. UpstreamFailed when it is not one."""
    try:
        answer = _decode_answer(body)
        text = answer.choices[0].message.content
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise UpstreamFailed(f"{origin}: the answer is not a chat completion ({error}); see the engine's log") from None
    return _encode({"response": text or ""})
