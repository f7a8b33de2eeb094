"""A tokenizer that needs no files: one token per UTF-8 byte, plus a handful of special tokens above them."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

BOS, EOS, PAD = 256, 257, 258
SPECIAL_TEXT = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}


def encode(text: str) -> list[int]:
    """Token ids of `text`; a lone surrogate (JSON allows them) becomes a question mark."""
    return list(text.encode("utf-8", "replace"))


def decode(ids: Iterable[int], *, skip_special: bool = True, final: bool = True) -> str:
    """Text of token ids. Unless `final`, bytes of an unfinished character at the end are held back."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    out: list[str] = []
    pending = bytearray()
    for token in ids:
        if token < 256:
            pending.append(token)
            continue
        out.append(decoder.decode(bytes(pending)))
        pending.clear()
        if not skip_special:
            out.append(SPECIAL_TEXT.get(token, f"<|{token}|>"))
    out.append(decoder.decode(bytes(pending), final))
    return "".join(out)


def token_text(token: int) -> str:
    """Text of one token, as log-prob entries show it."""
    return decode([token], skip_special=False)


def render_chat(messages: Sequence[tuple[str, str]]) -> str:
    """The chat template: one `role: content` paragraph per message, then the assistant's turn."""
    return "".join(f"{role}: {content}\n\n" for role, content in messages) + "assistant:"
