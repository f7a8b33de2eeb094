from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.slurm.gres import GresError, GresItem, gpu_counts, parse, parse_idx, parse_ranges


@pytest.mark.parametrize(
    ("text", "total", "by_type"),
    [
        ("gpu:2", 2, {None: 2}),
        ("gpu", 1, {None: 1}),
        ("gpu:h100:8", 8, {"h100": 8}),
        ("gpu:h100", 1, {"h100": 1}),
        ("gres/gpu:l40s:2", 2, {"l40s": 2}),
        ("gres:gpu:h100:4", 4, {"h100": 4}),
        ("gpu:h100:5(IDX:0-4)", 5, {"h100": 5}),
        ("gpu:a100:4(IDX:0-1,6-7)", 4, {"a100": 4}),
        ("gpu:a100:8(S:0-1)", 8, {"a100": 8}),
        ("gpu:h100:8(S:0-1),shard:h100:32(S:0-1)", 8, {"h100": 8}),
        ("gpu:a100:2,gpu:h100:3", 5, {"a100": 2, "h100": 3}),
        ("gpu:2,gpu:h100:2", 2, {None: 2, "h100": 2}),
        ("cpu=8,mem=16G,node=1,billing=8,gres/gpu=8,gres/gpu:h100=8", 8, {None: 8, "h100": 8}),
        ("cpu=8,mem=16G", 0, {}),
        ("(null)", 0, {}),
        ("", 0, {}),
        ("none", 0, {}),
        ("gpu:0", 0, {None: 0}),
        ("bandwidth:lustre:no_consume:4G,gpu:1", 1, {None: 1}),
        ("gpu:nvidia_a100_1g.5gb:7", 7, {"nvidia_a100_1g.5gb": 7}),
    ],
)
def test_counts(text: str, total: int, by_type: dict[str | None, int]) -> None:
    counts = gpu_counts(text)
    assert counts is not None
    assert counts.total == total
    assert counts.by_type == by_type


def test_not_available_is_unknown_and_not_nothing() -> None:
    assert parse("N/A") is None
    assert gpu_counts("N/A") is None
    assert parse_idx("N/A") is None
    assert parse_idx("(null)") == ()
    assert parse_idx("") == ()


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("gpu:h100:4(IDX:2-5)", (2, 3, 4, 5)),
        ("gpu:4(IDX:0-1,6-7)", (0, 1, 6, 7)),
        ("gpu:h100:1(IDX:0),gpu:a100:2(IDX:6-7)", (0, 6, 7)),
        ("gpu:h100:4(IDX:N/A)", None),
        ("gpu:h100:4", None),
        ("gpu:h100:4(S:0)", None),
        ("shard:h100:4(IDX:0-3)", ()),
        ("gpu:h100:0(IDX:N/A)", ()),
    ],
)
def test_indexes(text: str, indexes: tuple[int, ...] | None) -> None:
    assert parse_idx(text) == indexes


@pytest.mark.parametrize(
    "text",
    [
        "gpu:h100:4(IDX:0-2)",
        "gpu:2(IDX:0,0)",
        "gpu:1(IDX:0),gpu:a:1(IDX:0)",
        "gpu:a:b:2",
        "gpu::2",
        "gpu:2(",
        "gpu 2",
        "gpu:2,,gpu:1",
        "gpu:1(IDX:3-1)",
        "gpu:1(IDX:99999)",
        "4",
        "gpu:2)x",
    ],
)
def test_contradictions_and_rubbish_are_refused(text: str) -> None:
    with pytest.raises(GresError):
        parse_idx(text)


def test_types_and_items() -> None:
    counts = gpu_counts("gpu:b:1,gpu:a:1,gpu:2")
    assert counts is not None
    assert counts.types == ("a", "b")
    assert parse("gpu:h100:2(IDX:0-1)") == (GresItem("gpu", "h100", 2, (0, 1)),)


@given(st.sets(st.integers(0, 200), min_size=1, max_size=16))
def test_indexes_written_one_by_one_come_back(indexes: set[int]) -> None:
    text = f"gpu:h100:{len(indexes)}(IDX:{','.join(str(index) for index in sorted(indexes))})"
    assert parse_idx(text) == tuple(sorted(indexes))


@given(st.text("gpu:ah10(IDX),-=/.NA ", max_size=30))
def test_anything_gives_values_or_a_refusal(text: str) -> None:
    try:
        parse(text)
        parse_idx(text)
        parse_ranges(text)
    except GresError:
        pass


@given(st.text(max_size=40))
def test_arbitrary_text_never_surprises(text: str) -> None:
    with contextlib.suppress(GresError):
        gpu_counts(text)
