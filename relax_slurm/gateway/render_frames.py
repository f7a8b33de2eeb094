"""What a gateway and its renderer processes say to each other over pipes: a length, then MessagePack.

For every task the renderer answers twice: `Loaded` when it has tokenizer and template, so that reading a large
tokenizer and rendering have deadlines of their own, then the result. Whatever it cannot do is its only answer.
"""

from __future__ import annotations

from typing import Final

import msgspec

from relax_slurm.gateway.sources import RenderSource

HEADER_BYTES: Final = 4
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024


class Task(msgspec.Struct, tag="task"):
    """Messages to render. Both values are JSON as the client sent it."""

    source: RenderSource
    messages: bytes
    chat_template_kwargs: bytes = b"{}"


class Loaded(msgspec.Struct, tag="loaded"):
    """The renderer is there; the messages are next."""


class Rendered(msgspec.Struct, tag="rendered"):
    """The result: `ids` is a JSON list."""

    ids: bytes
    count: int


class Refusal(msgspec.Struct, tag="refused"):
    """The messages are at fault."""

    reason: str


class NoRenderer(msgspec.Struct, tag="unusable"):
    """The source is at fault: nothing can be rendered with it here."""

    reason: str


Answer = Loaded | Rendered | Refusal | NoRenderer
encode = msgspec.msgpack.Encoder().encode
decode_task = msgspec.msgpack.Decoder(Task).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def framed(message: Task | Answer) -> bytes:
    """The message with its length before it. ValueError when it is too long for a frame."""
    body = encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes; at most {MAX_FRAME_BYTES} are possible")
    return len(body).to_bytes(HEADER_BYTES, "big") + body
