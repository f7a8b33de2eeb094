"""Port blocks and windows, with the ranges real nodes have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.placement_errors import PortEphemeral, PortOverflow, PortSpan
from relax_slurm.core.ports import MAX_PORT, MIN_PORT, NodePorts, stride, window, worker_ports


def taken(engines: int, dp_size: int = 1) -> NodePorts:
    ports = NodePorts()
    for number in range(engines):
        ports.take("a", 0, dp_size, f"m/replica-{number}")
    return ports


def test_a_stride_leaves_room_above_the_rendezvous_port() -> None:
    for dp_size in (1, 2, 8, 64):
        assert stride(dp_size) - worker_ports(0).rendezvous > 5 + dp_size
        assert stride(dp_size) % 16 == 0


def test_the_first_port_of_a_block_belongs_to_the_sidecar() -> None:
    assert taken(0).take("a", 0, 1, "m/replica-0").guard == 1


def test_nodes_count_on_their_own() -> None:
    ports = NodePorts()
    assert ports.take("a", 0, 1, "x") == ports.take("a", 1, 1, "y") == ports.take("b", 0, 1, "z")
    assert ports.span == 17


def test_an_overflow_names_port_and_replica() -> None:
    with pytest.raises(
        PortOverflow, match=r"^port 65\d\d\d > 65535 for replica m/replica-11 on node 0 of pool a"
    ) as caught:
        window(taken(12), 65350, 65535, None)
    assert f"set ports.first to {MAX_PORT + 1 - 193} or lower" in caught.value.message


def test_a_window_that_is_too_small_says_how_large_it_must_be() -> None:
    with pytest.raises(PortSpan, match=r"needs 33 ports and the window has 20; set ports.last to 20032 or higher"):
        window(taken(2), 20000, 20019, None)
    assert window(taken(2), 20000, 20032, None).span == 33


@pytest.mark.parametrize("ephemeral", [None, (32768, 60999), (40000, 61000), (1024, 4999)])
def test_the_usual_window_is_used_where_the_kernel_keeps_off(ephemeral: tuple[int, int] | None) -> None:
    chosen = window(taken(8), None, None, ephemeral)
    assert (chosen.first, chosen.last) == (20000, 29999)


@pytest.mark.parametrize(
    ("ephemeral", "expected"),
    [((10000, 61000), (1024, 9999)), ((9000, 65000), (1024, 8999)), ((1024, 60000), (60001, 65535))],
)
def test_other_nodes_get_the_wider_side(ephemeral: tuple[int, int], expected: tuple[int, int]) -> None:
    chosen = window(taken(8), None, None, ephemeral)
    assert (chosen.first, chosen.last) == expected


def test_nowhere_to_go() -> None:
    with pytest.raises(PortEphemeral, match="leaves at most 0 ports"):
        window(taken(1), None, None, (1024, 65535))
    with pytest.raises(PortEphemeral, match="a node needs 1025"):
        window(taken(64), None, None, (1500, 65000))


def test_an_explicit_window_is_taken_as_it_is_or_refused() -> None:
    with pytest.raises(
        PortEphemeral, match=r"20000-33000 overlap the ephemeral range 32768-60999.*1024-32767 or 61000-65535"
    ):
        window(taken(1), 20000, 33000, (32768, 60999))
    assert window(taken(1), 61000, 62000, (32768, 60999)).first == 61000


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([1, 2, 8])), min_size=1, max_size=40),
    st.one_of(
        st.none(), st.tuples(st.integers(0, 65535), st.integers(0, 65535)).map(lambda pair: (min(pair), max(pair)))
    ),
)
def test_what_is_chosen_holds_everything_and_keeps_off(
    workers: list[tuple[int, int]], ephemeral: tuple[int, int] | None
) -> None:
    ports = NodePorts()
    used: dict[int, set[int]] = {}
    for number, (node, dp_size) in enumerate(workers):
        got = ports.take("a", node, dp_size, f"m/replica-{number}")
        mine = set(range(got.guard, got.guard + stride(dp_size)))
        assert not mine & used.setdefault(node, {0})
        used[node] |= mine
    assert ports.span == max(max(offsets) for offsets in used.values()) + 1
    try:
        chosen = window(ports, None, None, ephemeral)
    except PortEphemeral:
        assert ephemeral is not None
        assert max(ephemeral[0] - MIN_PORT, MAX_PORT - ephemeral[1]) < ports.span
        return
    assert chosen.first >= MIN_PORT
    assert chosen.first + chosen.span - 1 <= chosen.last <= MAX_PORT
    assert ephemeral is None or chosen.last < ephemeral[0] or chosen.first > ephemeral[1]
