"""GenRM's `messages` form: `{"messages", "sampling_params"}` to `{"response"}`.

Two ways to the engine. `generate_body` sends token ids that were rendered on this machine with the judge's own
template. `chat_body` sends the messages to the engine's chat route, which renders them there; sampling parameters are
translated by a table, and what has no place in a chat request is refused by name, because a judge that silently
ignores a parameter spoils every reward. Both ways give the same text for the same messages (docs/judge.md).
"""

from __future__ import annotations

from dataclasses import dataclass
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
DEFAULT_MAX_NEW_TOKENS = 128
"""What SGLang takes for `/generate` when nothing is said; a chat would go on to the end of the context."""

_KNOWN = frozenset({"messages", "sampling_params", "chat_template_kwargs", "model", "route_key", "stream"})
_FALSE = msgspec.Raw(b"false")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Question:
    """A checked `messages` request. Raw values are JSON as the client wrote it."""

    messages: msgspec.Raw
    chat_template_kwargs: msgspec.Raw | None
    sampling_params: dict[str, Any]
    raw_sampling_params: msgspec.Raw


def read_question(body: bytes) -> Question:
    """The question in a request body. BadRequest names what is wrong with it."""
    fields = read_object(body)
    unknown = sorted(fields.keys() - _KNOWN)
    if unknown:
        raise BadRequest(f"field {unknown[0][:80]!r} does not go with messages; possible are {sorted(_KNOWN)}")
    _check_messages(value_of(fields, "messages"))
    template = value_of(fields, "chat_template_kwargs")
    if not (isinstance(template, dict) or template is None or template is msgspec.UNSET):
        raise BadRequest(f"chat_template_kwargs must be an object, seen {template!r:.80}")
    params = value_of(fields, "sampling_params")
    given = isinstance(params, dict)
    if not (given or params is None or params is msgspec.UNSET):
        raise BadRequest(f"sampling_params must be an object, seen {params!r:.80}")
    if given and params.get("n") not in (None, 1):
        raise BadRequest(f"sampling_params.n is {params['n']!r:.80}, but there is one response to messages; send 1")
    return Question(
        fields["messages"],
        fields["chat_template_kwargs"] if isinstance(template, dict) else None,
        params if given else {},
        fields["sampling_params"] if given else msgspec.Raw(b"{}"),
    )


def _check_messages(messages: Any) -> None:
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)
    ):
        raise BadRequest("messages must be a non-empty list of objects that have a role")
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise BadRequest(
                    f"messages: a part of type {part['type']!r:.40} is not text; use /genrm/v1/chat/completions for it"
                )


def generate_body(question: Question, ids: bytes) -> bytes:
    """The `/generate` request for rendered messages; `ids` is their JSON list of token ids."""
    return _encode(
        {"input_ids": msgspec.Raw(ids), "sampling_params": question.raw_sampling_params, "stream": _FALSE},
    )


def chat_body(question: Question, served_model_name: str) -> bytes:
    """The chat request for the question. BadRequest names a sampling parameter that cannot be carried over."""
    chat: Fields = {
        "model": msgspec.Raw(_encode(served_model_name)),
        "messages": question.messages,
        "stream": _FALSE,
        # Reasoning is part of the text, as it is in an answer of /generate.
        "separate_reasoning": _FALSE,
        "max_tokens": msgspec.Raw(b"%d" % DEFAULT_MAX_NEW_TOKENS),
        **_chat_sampling(question.sampling_params),
    }
    if question.chat_template_kwargs is not None:
        chat["chat_template_kwargs"] = question.chat_template_kwargs
    return _encode(chat)


def _chat_sampling(params: dict[str, Any]) -> Fields:
    chat: Fields = {}
    for name, value in params.items():
        if name == "n":
            continue
        if name not in SAMPLING_TO_CHAT:
            raise BadRequest(
                f"sampling_params.{name[:80]} has no place in a chat request, and only this judge's engine can render"
                f" its messages; possible are {sorted(SAMPLING_TO_CHAT)}, or send input_ids"
            )
        chat[SAMPLING_TO_CHAT[name]] = msgspec.Raw(_encode(value))
    return chat


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Chat(msgspec.Struct):
    choices: list[_Choice]


class _Generated(msgspec.Struct):
    text: str


_decode_chat = msgspec.json.Decoder(_Chat).decode
_decode_generated = msgspec.json.Decoder(_Generated).decode


def chat_answer(body: bytes, origin: str) -> bytes:
    """`{"response": text}` from the engine's chat answer. UpstreamFailed when it is not one."""
    try:
        text = _decode_chat(body).choices[0].message.content
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, IndexError) as error:
        raise UpstreamFailed(f"{origin}: the answer is not a chat completion ({error}); see the engine's log") from None
    return _encode({"response": text or ""})


def generated_answer(body: bytes, origin: str) -> bytes:
    """`{"response": text}` from the engine's `/generate` answer. UpstreamFailed when it has no text."""
    try:
        text = _decode_generated(body).text
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamFailed(f"{origin}: the answer has no text ({error}); see the engine's log") from None
    return _encode({"response": text})
