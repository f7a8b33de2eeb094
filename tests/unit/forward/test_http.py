"""Header blocks, targets, origins and the deadline clock, without sockets."""

from __future__ import annotations

import asyncio
import http

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import BadRequest
from relax_slurm.forward.clock import NEVER, DeadlineClock
from relax_slurm.forward.http import (
    REASONS,
    Headers,
    Limits,
    checked,
    forward_block,
    render,
    split_target,
    status_line,
)
from relax_slurm.forward.origin import Origin, parse_url, request_line
from relax_slurm.forward.reader import Reading, RequestReader
from relax_slurm.forward.upstream import make_payload


def test_reason_phrases_are_those_of_the_standard_library_or_newer():
    newer = {413: "Content Too Large", 414: "URI Too Long", 416: "Range Not Satisfiable", 422: "Unprocessable Content"}
    for status, phrase in REASONS.items():
        assert phrase == newer.get(status, http.HTTPStatus(status).phrase)
    assert status_line(404) == b"HTTP/1.1 404 Not Found\r\n"
    assert status_line(299) == b"HTTP/1.1 299 \r\n"
    for status in (0, 99, 1000, -200):
        with pytest.raises(ValueError, match="three-digit"):
            status_line(status)


@given(st.lists(st.tuples(st.sampled_from([b"x-a", b"x-b"]), st.binary(max_size=20)), max_size=6))
def test_a_rendered_block_has_exactly_one_line_per_header(headers):
    try:
        block = render(headers)
    except ValueError:
        assert any(set(value) & set(b"\r\n\0") for _, value in headers)
    else:
        assert block.count(b"\r\n") == len(headers)
        assert block == b"".join(b"%b: %b\r\n" % header for header in headers)
        assert list(checked(headers)) == headers


def test_forward_block_drops_what_is_about_one_connection():
    headers = Headers(
        [
            (b"host", b"a"),
            (b"connection", b"Close, X-One"),
            (b"x-one", b"1"),
            (b"connection", b"x-two"),
            (b"x-two", b"2"),
            (b"te", b"trailers"),
            (b"transfer-encoding", b"chunked"),
            (b"content-length", b"3"),
            (b"proxy-authorization", b"secret"),
            (b"expect", b"100-continue"),
            (b"x-keep", b"3"),
            (b"x-keep", b"4"),
            (b"authorization", b"Bearer x"),
        ]
    )
    assert forward_block(headers) == b"x-keep: 3\r\nx-keep: 4\r\nauthorization: Bearer x\r\n"
    assert forward_block(headers, frozenset({b"authorization"})) == b"x-keep: 3\r\nx-keep: 4\r\n"
    assert forward_block(Headers()) == b""


def test_targets():
    assert split_target(b"/a%20b?x=1") == ("/a b", b"/a%20b", b"x=1")
    assert split_target(b"http://h:1/p?q") == ("/p", b"/p", b"q")
    assert split_target(b"HTTP://h") == ("/", b"/", b"")
    assert split_target(b"*") == ("*", b"*", b"")
    assert split_target(b"/" + b"a" * 1000)[0] == "/" + "a" * 1000
    for target in (b"", b"a", b"h:443", b"ftp://h/", b"/%ff"):
        with pytest.raises(BadRequest):
            split_target(target)


def test_origins_and_request_lines():
    assert parse_url("http://h") == (Origin(False, "h", 80), "")
    assert parse_url("https://h:8443/p?q=1") == (Origin(True, "h", 8443), "/p?q=1")
    assert request_line("GET", "http://h:81/base/", "/x") == (
        Origin(False, "h", 81),
        b"GET /base/x HTTP/1.1\r\nhost: h:81\r\n",
    )
    assert request_line("GET", "http://h")[1] == b"GET / HTTP/1.1\r\nhost: h\r\n"
    assert request_line("GET", "http://[::1]:9/a?b=c")[1] == b"GET /a?b=c HTTP/1.1\r\nhost: [::1]:9\r\n"
    assert str(parse_url("http://[::1]:9/")[0]) == "http://[::1]:9"
    for method, base, path in [
        ("GET", "http://h/?q", "/x"),
        ("GET", "http://h", "x y"),
        ("GET", "http://h", "/x\r\ny"),
        ("G T", "http://h", "/"),
        ("GET", "http://h", "/" + "é" * 300),
    ]:
        with pytest.raises(BadRequest):
            request_line(method, base, path)


def test_payloads_are_one_piece_when_small():
    assert make_payload("GET", b"F\r\n", b"a: 1\r\n", b"") == [b"F\r\na: 1\r\n\r\n"]
    assert make_payload("POST", b"F\r\n", b"", b"") == [b"F\r\ncontent-length: 0\r\n\r\n"]
    assert make_payload("POST", b"F\r\n", b"", b"x" * 70_000) == [b"F\r\ncontent-length: 70000\r\n\r\n", b"x" * 70_000]


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_the_reader_takes_anything(pieces):
    reader = RequestReader(Limits(max_header_bytes=64, max_body_bytes=10))
    for piece in pieces:
        reader.feed(piece)
    if reader.refusal is not None:
        assert reader.reading is Reading.ENDED
        reader.feed(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert reader.reading is Reading.ENDED


class Item:
    def __init__(self, clock, deadline):
        self.clock, self.deadline, self.fired = clock, deadline, []

    def expired(self):
        self.fired.append(self.deadline)
        self.deadline = NEVER


def test_the_clock_fires_each_deadline_once_and_in_time():
    async def main():
        loop = asyncio.get_running_loop()
        clock = DeadlineClock(loop)
        now = loop.time()
        first, second, moved, forgotten, never = (
            Item(clock, now + seconds) for seconds in (0.03, 0.06, 0.02, 0.02, NEVER)
        )
        for item in (second, first, moved, forgotten, never):
            clock.watch(item)
        moved.deadline = now + 0.09
        clock.sooner(moved)
        clock.forget(forgotten)
        clock.forget(forgotten)
        never.deadline = now + 0.01
        clock.sooner(never)
        while not moved.fired:
            await asyncio.sleep(0.005)
        assert loop.time() - now >= 0.085
        assert [len(item.fired) for item in (first, second, moved, forgotten, never)] == [1, 1, 1, 0, 1]
        first.deadline = loop.time() + 0.01
        clock.watch(first)
        clock.close()
        await asyncio.sleep(0.03)
        assert len(first.fired) == 1

    asyncio.run(main())
