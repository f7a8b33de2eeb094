"""Port blocks on real sockets: disjoint between processes, honest about what is busy."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise

import pytest

from relax_slurm.core.plan import PortWindow
from relax_slurm.errors import StartupFailed
from sidecars.port_block import PITCH, take_port_block

SPAN = 32


def quiet_window(blocks: int, span: int = SPAN) -> PortWindow:
    """A window of `blocks` blocks in which nothing is in use now; a new place every time."""
    for _ in range(200):
        first = random.SystemRandom().randrange(12000, 31000 - blocks * span)
        window = PortWindow(first, first + blocks * span - 1, span)
        if all(usable(port) for port in range(window.first, window.last + 1)):
            return window
    raise AssertionError("this machine has no quiet ports")


def usable(port: int) -> bool:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with closing(socket.socket(socket.AF_INET, kind)) as probe:
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True


@contextmanager
def listener(port: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    with closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen()
        yield server


def test_the_first_free_block_is_taken_and_given_back() -> None:
    window = quiet_window(3)
    with take_port_block(window) as one, take_port_block(window) as two:
        assert (one.start, two.start) == (window.first, window.first + SPAN)
        assert two.busy_seen == (window.first,)
        assert not one.closed
        with listener(one.start + 1):  # a worker's port is free for the worker
            assert one.busy_ports() == [one.start + 1]
        assert one.busy_ports() == []
    one.close()
    assert one.closed
    assert usable(window.first)
    with take_port_block(window) as again:
        assert again.start == window.first


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_busy_port_inside_the_block_is_detected(host: str) -> None:
    window = quiet_window(2)
    with listener(window.first + 5, host), take_port_block(window) as block:
        assert block.start == window.first + SPAN
        assert block.busy_seen == (window.first + 5,)


def test_case_16_error_names_the_busy_port_and_its_replica() -> None:
    window = quiet_window(1)
    owners = {1: "math/replica-0 guard", 5: "math/replica-1 http"}
    with listener(window.first + 5), pytest.raises(StartupFailed) as caught:
        take_port_block(window, owners=owners)
    assert f"busy: {window.first + 5} (math/replica-1 http)" in caught.value.message
    assert caught.value.detail["busy"] == [window.first + 5]
    assert usable(window.first)  # a failed attempt holds nothing


def test_case_16_ephemeral_range_is_never_used() -> None:
    window = quiet_window(3)
    middle = window.first + SPAN
    with take_port_block(window, ephemeral=(middle - 1, middle - 1)) as block:
        assert block.start == middle  # one shared port is enough to skip a block
    with take_port_block(window, ephemeral=(window.first, middle)) as block:
        assert block.start == middle + SPAN
    with pytest.raises(StartupFailed, match=r"3 of 3 blocks lie in the ephemeral range 1000-65000"):
        take_port_block(window, ephemeral=(1000, 65000))


def test_a_window_smaller_than_a_block_is_explained() -> None:
    with pytest.raises(StartupFailed, match="the window holds only 10 ports"):
        take_port_block(PortWindow(20000, 20009, 32))


def test_the_walk_is_bounded_by_the_window() -> None:
    window = quiet_window(4)
    with ExitStack() as stack:
        taken = [stack.enter_context(take_port_block(window)).start for _ in range(4)]
        assert taken == [window.first + SPAN * number for number in range(4)]
        with pytest.raises(StartupFailed, match="no free block"):
            take_port_block(window)


def test_old_connections_in_time_wait_do_not_count() -> None:
    window = quiet_window(1)
    with listener(window.first + 3) as server:
        client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        accepted.close()  # the side that closes first keeps TIME_WAIT
        assert client.recv(1) == b""
        client.close()
    with take_port_block(window) as block:
        assert block.start == window.first


@pytest.mark.parametrize(("first", "second"), [(64, 24), (24, 64), (64, PITCH), (40, 33)])
def test_blocks_of_different_sizes_never_overlap(first: int, second: int) -> None:
    """Two runs with other plans on one machine: the starts differ, the blocks would overlap."""
    window = quiet_window(1, 512)
    with ExitStack() as stack:
        taken = []
        for number in range(8):
            span = first if number % 2 else second
            offset = PortWindow(window.first + number * 3, window.last, span)
            block = stack.enter_context(take_port_block(offset))
            taken.append((block.start, block.last))
        taken.sort()
        assert all(last < start for (_, last), (start, _) in pairwise(taken))


PROGRAM = """
import sys
from relax_slurm.core.plan import PortWindow
from sidecars.port_block import take_port_block
first, last, span = map(int, sys.argv[1:])
print("ready", flush=True)
sys.stdin.readline()
block = take_port_block(PortWindow(first, last, span))
print(block.start, flush=True)
sys.stdin.read()
"""


def test_eight_processes_at_once_get_disjoint_blocks() -> None:
    window = quiet_window(12)
    arguments = [sys.executable, "-c", PROGRAM, str(window.first), str(window.last), str(window.span)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(8)
        ]
        try:
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline() == "ready\n"
            for child in children:
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
            starts = [int(child.stdout.readline()) for child in children if child.stdout is not None]
        finally:
            for child in children:
                child.kill()
    assert len(set(starts)) == 8
    assert all((start - window.first) % SPAN == 0 for start in starts)


def test_holders_are_not_inherited_by_an_engine() -> None:
    window = quiet_window(1)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as early:
        block = take_port_block(window)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False) as engine:
            block.close()
            assert usable(window.first)
            assert engine.stdin is not None
            engine.stdin.close()
        assert early.stdin is not None
        early.stdin.close()
