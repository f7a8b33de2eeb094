"""The payload check of an admission guard: usual requests pass after one typed look at their bytes.

Most requests are one prompt with plain parameters. For those a decoder that knows the limits reads only the fields
that matter and compares while it reads; the body itself is passed on as it came. Whatever that decoder does not accept
(batches, lists per request, biases, and all that is wrong) is decoded as a whole and judged by `core.payload`, which
also has the words for a refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, defstruct

from relax_slurm.core.payload import MAX_TOP_K, Rules, check
from relax_slurm.errors import BadRequest

Look = Callable[[bytes], object]
_decode: Final = msgspec.json.Decoder().decode
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""`ValidationError` is a `DecodeError`."""


class PayloadCheck:
    """Callable with (path, body) of a request; raises `BadRequest` for what the engine must not see.

    Until `learn` is called the vocabulary is unknown and only its lower end is checked.
    """

    def __init__(self, vocab_size: int | None = None) -> None:
        self.rules = Rules()
        self._looks: dict[str, Look] = {}
        self.learn(vocab_size)

    def learn(self, vocab_size: int | None) -> None:
        """The engine is up and this is its vocabulary; None when nobody knows."""
        self.rules = Rules(vocab_size)
        self._looks = looks(self.rules)

    def __call__(self, path: str, body: bytes) -> None:
        look = self._looks.get(path)
        if look is not None:
            try:
                look(body)
                return
            except _UNREADABLE:
                pass
        try:
            value = _decode(body)
        except _UNREADABLE as error:
            what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise BadRequest(f"{path}: the body is not JSON ({what}); send one JSON object in UTF-8") from None
        check(path, value, self.rules)


def looks(rules: Rules) -> dict[str, Look]:
    """For every path a decoder that accepts nothing but requests that `core.payload.check` accepts."""
    size = rules.vocab_size
    token: Any = Annotated[int, Meta(ge=0) if size is None else Meta(ge=0, lt=size)]
    prompt: Any = Annotated[list[token], Meta(min_length=1)]
    text: Any = Annotated[str, Meta(min_length=1)]
    start: Any = Annotated[int, Meta(ge=-1)]
    top: Any = Annotated[int, Meta(ge=0) if size is None else Meta(ge=0, le=size)]
    copies: Any = Annotated[int, Meta(le=rules.max_copies)]
    absent: Any = type(None)

    sampling = {
        "n": copies,
        "top_k": Annotated[int, Meta(le=MAX_TOP_K)],
        "stop_token_ids": list[token],
        "logit_bias": absent,
    }
    native = {
        "text": text,
        "input_ids": prompt,
        "return_logprob": bool,
        "logprob_start_len": start,
        "top_logprobs_num": top,
        "token_ids_logprob": list[token],
        "sampling_params": _struct("Parameters", sampling),
        "positional_embed_overrides": absent,
    }
    completion = {"prompt": text | prompt, "logprobs": top, **sampling}
    chat = {"input_ids": prompt, "top_logprobs": top, **sampling}
    found: dict[str, Look] = {
        "/generate": _either(msgspec.json.Decoder(_struct("Generate", native)).decode),
        "/v1/completions": msgspec.json.Decoder(_struct("Completion", completion)).decode,
        "/v1/chat/completions": msgspec.json.Decoder(_struct("Chat", chat)).decode,
    }
    found["/chat/completions"] = found["/v1/chat/completions"]
    return found


def _struct(name: str, kinds: dict[str, Any]) -> type[msgspec.Struct]:
    """A struct whose fields may all be absent or null; other fields of the JSON are skipped."""
    return defstruct(
        name, [(field, kind if kind is type(None) else kind | None, None) for field, kind in kinds.items()]
    )


def _either(decode: Callable[[bytes], Any]) -> Look:
    """A prompt is text or ids; with both the request is not a usual one."""

    def look(body: bytes) -> object:
        seen = decode(body)
        if seen.text is not None and seen.input_ids is not None:
            raise msgspec.ValidationError("text and input_ids")
        return seen

    return look
