"""Real CURVE sockets on loopback: who gets in, what garbage does, what a lost answer costs."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from relax_slurm.errors import StartupFailed, Unavailable
from relax_slurm.wire.client import ControlClient, RemoteError, SidecarLink
from relax_slurm.wire.codec import MAGIC, to_frames
from relax_slurm.wire.keys import Credentials, KeyPair, allowed, credentials, read_pair, write_keys
from relax_slurm.wire.messages import PeerKind
from relax_slurm.wire.server import ControlServer, Incoming

EPOCH = "000001-abcdef"


@asynccontextmanager
async def serving(folder: Path, answer: Any) -> AsyncIterator[tuple[ControlServer, str, str]]:
    """A control server that passes each message to `answer(server, incoming)`; yields both addresses."""
    write_keys(folder)
    server = ControlServer(read_pair(folder, PeerKind.COORDINATOR), allowed(folder))
    control, discovery = server.bind("127.0.0.1", [0, 0])

    async def loop() -> None:
        while True:
            await answer(server, await server.receive())

    task = asyncio.create_task(loop())
    try:
        yield server, f"tcp://127.0.0.1:{control}", f"tcp://127.0.0.1:{discovery}"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        server.close()


async def pong(server: ControlServer, incoming: Incoming) -> None:
    body = incoming.body
    await server.send(
        incoming.identity,
        {"kind": "reply", "id": str(body.get("id")), "epoch": EPOCH, "ok": True, "result": {"peer": incoming.peer}},
    )


def test_the_key_proves_what_a_peer_is(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, pong) as (_, address, _):
            with ControlClientOf(tmp_path, address) as client:
                assert await client.request("ping") == {"peer": "client"}
            link = SidecarLink(address, credentials(tmp_path, PeerKind.SIDECAR))
            await connected(link, {"kind": "beat", "id": "b"})
            assert (await link.receive())["result"] == {"peer": "sidecar"}
            link.close()

    asyncio.run(run())


async def connected(link: SidecarLink, body: dict[str, Any]) -> None:
    """Say something as soon as there is somebody to say it to."""
    while not await link.send(body):
        await asyncio.sleep(0.01)


class ControlClientOf(ControlClient):
    """A client made from a key folder, closed by `with`."""

    def __init__(self, folder: Path, address: str, **options: Any) -> None:
        super().__init__(address, credentials(folder, PeerKind.CLIENT), **options)

    def __enter__(self) -> ControlClientOf:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_peers_without_a_key_of_the_run_get_nothing_and_disturb_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, pong) as (server, address, _):
            stranger = zmq.curve_keypair()
            wrong = Credentials(PeerKind.CLIENT, KeyPair(*stranger), read_pair(tmp_path, PeerKind.COORDINATOR).public)
            outsider = ControlClient(address, wrong, attempt_seconds=0.5)
            with pytest.raises(Unavailable):
                await outsider.request("ping", timeout_seconds=0.5)
            outsider.close()
            assert server.counters.denied >= 1

            context = zmq.asyncio.Context()
            plain = context.socket(zmq.DEALER)
            plain.linger = 0
            plain.connect(address)
            plain.send_multipart(to_frames({"kind": "ping", "id": "1"}))
            assert not await plain.poll(300)
            context.destroy(linger=0)

            host, port = address.removeprefix("tcp://").split(":")
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\xff" * 4096)

            with ControlClientOf(tmp_path, address) as client:
                assert await client.request("ping") == {"peer": "client"}

    asyncio.run(run())


def test_garbage_of_a_peer_with_a_key_is_counted_and_the_loop_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, pong) as (server, address, _):
            link = SidecarLink(address, credentials(tmp_path, PeerKind.SIDECAR))
            await connected(link, {"kind": "beat", "id": "before"})
            assert (await link.receive())["id"] == "before"
            for frames in ([b"", MAGIC, b"\xc1"], [b"", b"RLX9", b""], [b"x"], [b"", MAGIC, b"\x01", b"more"]):
                await link._socket.send_multipart(frames)
            await link.send({"kind": "beat", "id": "after"})
            assert (await link.receive())["id"] == "after"
            assert server.counters.garbage == 4
            link.close()

    asyncio.run(run())


def test_a_lost_answer_is_asked_again_under_the_same_id_on_a_new_socket(tmp_path: Path) -> None:
    seen: list[tuple[bytes, str]] = []

    async def deaf_once(server: ControlServer, incoming: Incoming) -> None:
        seen.append((incoming.identity, incoming.body["id"]))
        if len(seen) > 1:
            await pong(server, incoming)

    async def run() -> None:
        async with serving(tmp_path, deaf_once) as (_, address, _):
            with ControlClientOf(tmp_path, address, attempt_seconds=0.3) as client:
                await client.request("ping", timeout_seconds=10)

    asyncio.run(run())
    assert len(seen) == 2
    assert seen[0][1] == seen[1][1]
    assert seen[0][0] != seen[1][0]


def test_a_refusal_carries_the_coordinators_words(tmp_path: Path) -> None:
    async def refuse(server: ControlServer, incoming: Incoming) -> None:
        error = {"code": "unknown_role", "message": "no role 'x'"}
        body = {"kind": "reply", "id": incoming.body["id"], "epoch": EPOCH, "ok": False, "error": error}
        await server.send(incoming.identity, body)

    async def run() -> None:
        async with serving(tmp_path, refuse) as (_, address, _):
            with ControlClientOf(tmp_path, address) as client, pytest.raises(RemoteError, match="no role") as caught:
                await client.request("get_snapshot", role="x")
            assert caught.value.remote_code == "unknown_role"

    asyncio.run(run())


def test_sending_to_a_peer_that_is_gone_is_told_and_does_not_block(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, pong) as (server, _, _):
            assert await server.send(b"nobody", {"kind": "beat_ack"}) is False
            assert server.counters.undeliverable == 1

    asyncio.run(run())


def test_no_free_port_says_how_many_were_tried(tmp_path: Path) -> None:
    async def run() -> None:
        write_keys(tmp_path)
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            server = ControlServer(read_pair(tmp_path, PeerKind.COORDINATOR), allowed(tmp_path))
            with pytest.raises(StartupFailed, match="among the 1 tried"):
                server.bind("127.0.0.1", [taken.getsockname()[1]])
            server.close()

    asyncio.run(run())


def test_keys_are_private_and_a_broken_key_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    write_keys(folder)
    assert folder.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    before = read_pair(folder, PeerKind.CLIENT)
    write_keys(folder)
    assert read_pair(folder, PeerKind.CLIENT) == before
    (folder / "client.key").write_text("short\n")
    with pytest.raises(StartupFailed, match=r"client\.key"):
        read_pair(folder, PeerKind.CLIENT)
