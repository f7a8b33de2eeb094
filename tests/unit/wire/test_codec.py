from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.wire.codec import MAGIC, Garbage, from_frames, from_topic_frames, pack, to_frames, to_topic_frames

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(st.dictionaries(st.text(), values))
def test_a_body_survives_the_wire(body: dict[str, object]) -> None:
    assert from_frames(to_frames(body)) == body
    assert from_topic_frames(to_topic_frames("snap.rollout", body)) == ("snap.rollout", body)


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_frames_are_garbage_and_never_another_error(frames: list[bytes]) -> None:
    for parse in (from_frames, from_topic_frames):
        try:
            parse(frames)
        except Garbage:
            continue
        assert frames[1] == MAGIC


@given(st.binary(max_size=400))
def test_random_bytes_as_body_are_a_map_or_garbage(frame: bytes) -> None:
    try:
        body = from_frames([b"", MAGIC, frame])
    except Garbage:
        return
    assert isinstance(body, dict)


@pytest.mark.parametrize(
    "frame",
    [
        pack({"a": 1})[:-1],
        pack({"a": 1}) + b"\x00",
        msgpack.packb([1, 2]),
        msgpack.packb({1: 2}),
        b"",
        b"\xdf\xff\xff\xff\xff",  # a map that claims four billion entries
        b"\x91" * 2000,  # arrays nested deeper than the parser allows
        b"\xc1",
    ],
)
def test_broken_bodies_are_garbage(frame: bytes) -> None:
    with pytest.raises(Garbage):
        from_frames([b"", MAGIC, frame])


def test_another_major_version_is_garbage() -> None:
    with pytest.raises(Garbage):
        from_frames([b"", b"RLX2", pack({"kind": "ping"})])
