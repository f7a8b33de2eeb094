from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.slurm.hostlist import MAX_HOSTS, HostListError, expand


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("login1", "login1"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        (
            "rack[0-1]_blade[0-1]",
            "rack0_blade0 rack0_blade1 rack1_blade0 rack1_blade1",
        ),
        ("b2u[05,02]n3", "b2u05n3 b2u02n3"),
        ("n[008-011]", "n008 n009 n010 n011"),
        ("n[8-10]", "n8 n9 n10"),
        ("n[1-3],  m2 , k[1, 4-5 ]", "n1 n2 n3 m2 k1 k4 k5"),
        ("[1-2]", "1 2"),
        ("gpu-a.cluster.local", "gpu-a.cluster.local"),
        ("a[1][2-3]", "a12 a13"),
        ("n[7-7]", "n7"),
    ],
)
def test_names_in_order(text: str, hosts: str) -> None:
    assert expand(text) == tuple(hosts.split())


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("", 0, "empty"),
        ("  ", 0, "empty"),
        ("a,,b", 2, "empty"),
        (",a", 0, "empty"),
        ("a,", 2, "empty"),
        ("n[1-3", 1, "never closed"),
        ("n[", 1, "never closed"),
        ("n]", 1, "does not belong"),
        ("n[]", 2, "number is wanted"),
        ("n[1,]", 4, "number is wanted"),
        ("n[[1]]", 2, "nested"),
        ("n[1[2]]", 3, "wanted ','"),
        ("n[3-1]", 4, "backwards"),
        ("n[1-]", 4, "number is wanted"),
        ("n[a-b]", 2, "number is wanted"),
        ("n[0-10/2]", 6, "wanted ','"),
        ("(null)", 0, "does not belong"),
        ("node 1", 5, "does not belong"),
        ("a;b", 1, "does not belong"),
        ("n[١-٣]", 2, "number is wanted"),
        ("n[1-9999999999999999999]", 4, "digits"),
        ("n[0-65536]", 4, "more than"),
        ("a[0-255]b[0-256]", 16, "more than"),
        ("a[0-65535],b", 12, "more than"),
    ],
)
def test_refusals_say_where(text: str, position: int, word: str) -> None:
    with pytest.raises(HostListError) as caught:
        expand(text)
    assert caught.value.position == position
    assert word in caught.value.message
    assert f"position {position}" in caught.value.message


def test_the_cap_itself_is_allowed_and_a_huge_product_costs_nothing() -> None:
    assert len(expand(f"n[0-{MAX_HOSTS - 1}]")) == MAX_HOSTS
    with pytest.raises(HostListError):
        expand("a[0-9]" * 400)


groups = st.lists(st.integers(0, 40), min_size=1, max_size=4)
words = st.text("abcXYZ-_.", min_size=1, max_size=4)


@given(st.lists(st.tuples(words, st.lists(st.tuples(groups, words), max_size=2)), min_size=1, max_size=4))
def test_lists_built_from_parts_expand_to_the_product(entries: list) -> None:
    text, expected = [], []
    for head, tail in entries:
        name, hosts = head, [head]
        for numbers, suffix in tail:
            name += "[" + ",".join(f"{number:03d}" for number in numbers) + "]" + suffix
            hosts = [f"{host}{number:03d}{suffix}" for host in hosts for number in numbers]
        text.append(name)
        expected += hosts
    assert expand(", ".join(text)) == tuple(expected)


@given(st.text("ab0123[],- _.()", max_size=30))
def test_anything_gives_names_or_a_refusal_inside_the_text(text: str) -> None:
    hosts: tuple[str, ...] = ()
    position = 0
    try:
        hosts = expand(text)
    except HostListError as error:
        position = error.position
    assert 0 <= position <= len(text)
    assert all(host and not set(host) & set("[], ()") for host in hosts)


@given(st.text(max_size=60))
def test_arbitrary_text_never_surprises(text: str) -> None:
    with contextlib.suppress(HostListError):
        expand(text)
