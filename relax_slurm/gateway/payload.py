"""Request and answer bodies: read only what routing needs, rewrite as few bytes as possible.

Values that are not looked at stay `msgspec.Raw`, so numbers, escapes and order come out as they went in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from relax_slurm.errors import BadRequest, UpstreamFailed

Fields = dict[str, msgspec.Raw]

_encode = msgspec.json.Encoder().encode
_decode_fields = msgspec.json.Decoder(Fields).decode
_decode_value = msgspec.json.Decoder().decode


class Addressed(msgspec.Struct):
    """The part of a generation payload that says where it goes. Decoding it still checks all of the JSON."""

    model: Any = msgspec.UNSET
    route_key: Any = msgspec.UNSET


class Judged(msgspec.Struct):
    """The same for GenRM, which also tells two forms of request apart by their fields."""

    model: Any = msgspec.UNSET
    route_key: Any = msgspec.UNSET
    stream: Any = msgspec.UNSET
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    input_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    text: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_decode_addressed = msgspec.json.Decoder(Addressed).decode
_decode_judged = msgspec.json.Decoder(Judged).decode


@dataclass(frozen=True, slots=True)
class Address:
    """What a request says about its target; None = not said."""

    model: object
    route_key: object


def _refused(error: Exception) -> BadRequest:
    what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
    return BadRequest(f"request body: {what}; send one JSON object")


def _given(value: object, name: str) -> object:
    """None for an absent field; an explicit null is a wrong value, not an absent one."""
    if value is msgspec.UNSET:
        return None
    if value is None:
        raise BadRequest(f"{name} must be a non-empty string, seen null; leave it out for the default")
    return value


def raw_request(body: bytes) -> tuple[Address, bytes]:
    """Where a `/generate` payload goes, and the payload without its logical fields (untouched if it has none)."""
    try:
        seen = _decode_addressed(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(error) from None
    if seen.model is msgspec.UNSET and seen.route_key is msgspec.UNSET:
        return Address(None, None), body
    address = Address(_given(seen.model, "model"), _given(seen.route_key, "route_key"))
    return address, _without_logical(body)


def _without_logical(body: bytes) -> bytes:
    fields = read_object(body)
    fields.pop("model", None)
    fields.pop("route_key", None)
    return _encode(fields)


def read_object(body: bytes) -> Fields:
    """The members of a JSON object with their values as they stand. BadRequest for anything else."""
    try:
        return _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(error) from None


def value_of(fields: Fields, name: str) -> Any:
    """The decoded member, `msgspec.UNSET` when absent. BadRequest when it is not JSON after all."""
    raw = fields.get(name)
    if raw is None:
        return msgspec.UNSET
    try:
        return _decode_value(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(error) from None


def chat_request(body: bytes) -> tuple[Address, Fields, bool]:
    """Where a chat request goes, its members, and whether it streams."""
    fields = read_object(body)
    address = Address(_given(value_of(fields, "model"), "model"), _given(value_of(fields, "route_key"), "route_key"))
    fields.pop("route_key", None)
    stream = value_of(fields, "stream")
    if not (isinstance(stream, bool) or stream is None or stream is msgspec.UNSET):
        raise BadRequest(f"stream must be a boolean, seen {stream!r:.80}")
    return address, fields, stream is True


def with_model(fields: Fields, served_model_name: str) -> bytes:
    """The chat body for the engine, which knows its model by another name."""
    fields["model"] = msgspec.Raw(_encode(served_model_name))
    return _encode(fields)


def answer_with_model(body: bytes, model: str, origin: str) -> bytes:
    """The engine's JSON answer with the logical model name. UpstreamFailed when it is not a JSON object."""
    try:
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamFailed(f"{origin}: the answer is not a JSON object ({error}); see the engine's log") from None
    if "model" in fields:
        fields["model"] = msgspec.Raw(_encode(model))
    return _encode(fields)


def judge_request(body: bytes) -> tuple[Address, bytes | None]:
    """Where a `/genrm/generate` payload goes; None instead of a payload when it has `messages`."""
    try:
        seen = _decode_judged(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _refused(error) from None
    chat = seen.messages is not msgspec.UNSET
    raw = seen.input_ids is not msgspec.UNSET or seen.text is not msgspec.UNSET
    if chat == raw:
        how = "both messages and" if chat else "neither messages nor"
        raise BadRequest(f"request body has {how} input_ids/text; send exactly one of the two forms")
    if seen.stream is not msgspec.UNSET and not isinstance(seen.stream, bool):
        raise BadRequest(f"stream must be a boolean, seen {seen.stream!r:.80}")
    if chat and seen.stream is True:
        raise BadRequest("messages cannot be streamed here; use /genrm/v1/chat/completions with stream=true")
    address = Address(_given(seen.model, "model"), _given(seen.route_key, "route_key"))
    if chat:
        return address, None
    logical = seen.model is not msgspec.UNSET or seen.route_key is not msgspec.UNSET
    return address, _without_logical(body) if logical else body
