"""Mask parsers: every spelling from the field, and no input that crashes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.binding_mask import MAX_ENTRIES, MaskKind, parse_indexes, parse_mask


@pytest.mark.parametrize(
    ("text", "kind", "entries"),
    [
        (None, MaskKind.UNSET, ()),
        ("", MaskKind.NONE, ()),
        ("NoDevFiles", MaskKind.NONE, ()),
        ("0", MaskKind.INDEX, ("0",)),
        ("4,5,6,7", MaskKind.INDEX, ("4", "5", "6", "7")),
        ("GPU-aaaa,GPU-bbbb", MaskKind.UUID, ("GPU-aaaa", "GPU-bbbb")),
        ("MIG-GPU-8932f937/1/0", MaskKind.UUID, ("MIG-GPU-8932f937/1/0",)),
        ("MIG-c0ffee00-1111", MaskKind.UUID, ("MIG-c0ffee00-1111",)),
    ],
)
def test_masks_that_are_read(text: str | None, kind: MaskKind, entries: tuple[str, ...]) -> None:
    mask = parse_mask(text)
    assert (mask.kind, mask.entries) == (kind, entries)
    assert not mask.problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0,,1", "empty"),
        ("0, 1", "space"),
        ("-1", "negative"),
        ("all", "NVIDIA_VISIBLE_DEVICES"),
        ("VOID", "NVIDIA_VISIBLE_DEVICES"),
        ("0,1,0", "named twice"),
        ("GPU-ab,gpu-ab", "neither"),
        ("GPU-AB,GPU-ab", "named twice"),
        ("0,GPU-ab", "mixed"),
        ("0-3", "neither"),
        ("\u0663", "neither"),
        (",".join(map(str, range(MAX_ENTRIES + 1))), "entries"),
    ],
)
def test_masks_that_are_refused_say_why(text: str, problem: str) -> None:
    mask = parse_mask(text)
    assert mask.kind is MaskKind.BROKEN
    assert problem in mask.problem
    assert mask.wanted
    assert mask.entries == ()


@pytest.mark.parametrize(
    ("text", "numbers"), [("2,3,6,7", (2, 3, 6, 7)), ("0-3,6", (0, 1, 2, 3, 6)), ("3,2", (3, 2)), (" 1 ", (1,))]
)
def test_index_lists_keep_their_order(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_indexes(text).numbers == numbers


@pytest.mark.parametrize("text", ["3-1", "0,1,1", "0-2,2", "a", "0-99999", "-1", "1-", "--", "0,,1"])
def test_index_lists_that_are_refused(text: str) -> None:
    assert parse_indexes(text).kind is MaskKind.BROKEN


@given(st.one_of(st.text(), st.text(alphabet="0123456789,-GPUMI /")))
def test_no_text_crashes_a_parser(text: str) -> None:
    for mask in (parse_mask(text), parse_indexes(text)):
        assert (mask.kind is MaskKind.BROKEN) == bool(mask.problem)
        assert len(mask.entries) <= MAX_ENTRIES
        assert len(set(mask.entries)) == len(mask.entries)


@given(st.lists(st.integers(0, 9999), unique=True, min_size=1, max_size=40))
def test_index_lists_round_trip(numbers: list[int]) -> None:
    text = ",".join(map(str, numbers))
    assert parse_mask(text).numbers == parse_indexes(text).numbers == tuple(numbers)
