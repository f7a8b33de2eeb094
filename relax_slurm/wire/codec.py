"""Frames and bodies: the only place where bytes of the control protocol become values (docs/protocol.md, Frames)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from relax_slurm.errors import ProtocolError

MAGIC = b"RLX1"
MAX_FRAME_BYTES = 64 * 1024 * 1024
_MAX_NESTING_ITEMS = 1_000_000


class Garbage(ProtocolError):
    """Bytes that are not a message of this protocol: counted, dropped, never answered."""

    code = "garbage"


def pack(body: dict[str, Any]) -> bytes:
    """One body as msgpack."""
    packed: bytes = msgpack.packb(body, use_bin_type=True)
    return packed


def unpack(frame: bytes) -> dict[str, Any]:
    """The map inside a frame; `Garbage` for anything else."""
    if len(frame) > MAX_FRAME_BYTES:
        raise Garbage(f"frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}")
    try:
        body = msgpack.unpackb(
            frame,
            raw=False,
            strict_map_key=True,
            max_array_len=_MAX_NESTING_ITEMS,
            max_map_len=_MAX_NESTING_ITEMS,
        )
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise Garbage(f"body is not msgpack: {error}") from None
    if not isinstance(body, dict) or not all(isinstance(key, str) for key in body):
        raise Garbage(f"body is {type(body).__name__}, wanted a map with string keys")
    return body


def to_frames(body: dict[str, Any]) -> list[bytes]:
    """Frames of a control message, without a routing identity."""
    return [b"", MAGIC, pack(body)]


def from_frames(frames: Sequence[bytes]) -> dict[str, Any]:
    """Body of a control message whose identity frame was already taken off."""
    if len(frames) != 3 or frames[0] != b"" or frames[1] != MAGIC:
        raise Garbage(f"{len(frames)} frames without the layout of {MAGIC.decode()}")
    return unpack(frames[2])


def to_topic_frames(topic: str, body: dict[str, Any]) -> list[bytes]:
    """Frames of a discovery message."""
    return [topic.encode(), MAGIC, pack(body)]


def from_topic_frames(frames: Sequence[bytes]) -> tuple[str, dict[str, Any]]:
    """Topic and body of a discovery message."""
    if len(frames) != 3 or frames[1] != MAGIC:
        raise Garbage(f"{len(frames)} frames without the layout of {MAGIC.decode()}")
    try:
        topic = frames[0].decode()
    except UnicodeDecodeError:
        raise Garbage("topic is not UTF-8") from None
    return topic, unpack(frames[2])
