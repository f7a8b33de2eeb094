"""Who may speak to the coordinator, and what becomes of everything else. The run goes on in any case."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from relax_slurm.wire.codec import MAGIC, pack, unpack
from relax_slurm.wire.keys import Credentials, KeyPair, credentials
from relax_slurm.wire.messages import PeerKind
from tests.harness.launch import LaunchedRun, Site, new_run
from tests.harness.sites import LOCAL, fresh_name, small
from tests.harness.wait import until

ANSWER_MS, NO_ANSWER_MS = 5_000, 400

pytestmark = pytest.mark.parametrize("site", [LOCAL], indirect=True)


@pytest.fixture(scope="module")
def run(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    with new_run(site, small(), tmp_path_factory.mktemp("peers"), fresh_name()) as run:
        run.up()
        yield run


@pytest.fixture
def peers(run: LaunchedRun) -> Iterator[Peers]:
    peers = Peers(run)
    yield peers
    peers.close()


class Peers:
    """Raw sockets to the run's coordinator."""

    def __init__(self, run: LaunchedRun) -> None:
        self._run = run
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self.endpoint: dict[str, Any] = run.run_dir.read("endpoint.json") or {}

    def keyed(self, kind: PeerKind, socket_kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """A peer with one of the run's own keys."""
        return self.socket(socket_kind, credentials(self._run.run_dir.keys, kind))

    def socket(self, kind: int, keys: Credentials | None) -> zmq.Socket[bytes]:
        """A connected socket, with CURVE keys or without any."""
        socket = self._context.socket(kind)
        self._sockets.append(socket)
        if keys is not None:
            socket.curve_serverkey = keys.server_public
            socket.curve_publickey, socket.curve_secretkey = keys.own.public, keys.own.secret
        if kind == zmq.SUB:
            socket.subscribe("")
            socket.connect(self.endpoint["discovery"])
        else:
            socket.connect(self.endpoint["control"])
        return socket

    def close(self) -> None:
        """Close every socket."""
        for socket in self._sockets:
            socket.close(linger=0)
        self._context.term()

    def wire(self) -> dict[str, int]:
        """The counters in the state document."""
        state = self._run.state()
        assert state is not None, "the coordinator does not answer any more"
        assert state["state"] == "READY"
        counters = state["wire"]
        assert isinstance(counters, dict)
        return counters


def receive(socket: zmq.Socket[bytes], milliseconds: int) -> list[bytes] | None:
    """The next message, None when none came in time."""
    return socket.recv_multipart() if socket.poll(milliseconds) else None


def ask(socket: zmq.Socket[bytes], body: dict[str, Any]) -> dict[str, Any]:
    """One well-framed message from a DEALER and its answer."""
    socket.send_multipart([b"", MAGIC, pack(body)])
    frames = receive(socket, ANSWER_MS)
    assert frames is not None, "no answer"
    assert frames[:2] == [b"", MAGIC]
    return unpack(frames[2])


def still_serves(run: LaunchedRun) -> None:
    answer = run.http().post("/rollout/generate", json={"text": "20 + 3 = "})
    assert answer.raise_for_status().json()["text"] == "23"


def test_a_peer_without_a_key_of_the_run_gets_nothing(run: LaunchedRun, peers: Peers) -> None:
    server = credentials(run.run_dir.keys, PeerKind.CLIENT).server_public
    stranger = Credentials(PeerKind.CLIENT, KeyPair(*zmq.curve_keypair()), server)
    before = peers.wire()["denied"]
    ping = [b"", MAGIC, pack({"kind": "ping", "id": "x"})]
    asking = [peers.socket(zmq.DEALER, keys) for keys in (stranger, None)]
    for socket in asking:
        socket.send_multipart(ping)
    listening = [peers.socket(zmq.SUB, keys) for keys in (stranger, None)]
    until(lambda: peers.wire()["denied"] > before, 10.0, "the stranger's key is counted")
    for socket in (*asking, *listening):
        assert receive(socket, NO_ANSWER_MS) is None
    friend = peers.keyed(PeerKind.CLIENT, zmq.SUB)
    assert receive(friend, ANSWER_MS) is not None, "a client with the key hears the heartbeat"
    still_serves(run)


GARBAGE: list[list[bytes]] = [
    [b"x"],
    [b"", MAGIC],
    [b"", b"RLX2", pack({"kind": "ping", "id": "x"})],
    [b"", b"", b"", b"", b""],
    [b"", MAGIC, b""],
    [b"", MAGIC, b"\xc1\xff"],
    [b"", MAGIC, b"\xdd\xff\xff\xff\xff"],
    [b"", MAGIC, b"\x91" * 4000],
    [b"", MAGIC, msgpack.packb([1, 2, 3])],
    [b"", MAGIC, msgpack.packb({1: "ping"})],
    [b"", MAGIC, msgpack.packb({b"kind": b"ping"})],
    [b"", MAGIC, pack({"kind": "ping", "id": "x"}) + b"more"],
]


@pytest.mark.parametrize("kind", [PeerKind.CLIENT, PeerKind.SIDECAR])
def test_garbage_is_counted_dropped_and_never_answered(run: LaunchedRun, peers: Peers, kind: PeerKind) -> None:
    before = peers.wire()["garbage"]
    socket = peers.keyed(kind)
    for frames in GARBAGE:
        socket.send_multipart(frames)
    until(lambda: peers.wire()["garbage"] >= before + len(GARBAGE), 10.0, lambda: f"{before}, {peers.wire()}")
    assert peers.wire()["garbage"] == before + len(GARBAGE)
    assert receive(socket, NO_ANSWER_MS) is None
    if kind is PeerKind.CLIENT:
        assert ask(socket, {"kind": "ping", "id": "after"})["ok"] is True, "the same connection is still good"
    still_serves(run)


@pytest.mark.parametrize("kind", ["hello", "beat", "event", "result"])
def test_a_client_may_not_speak_for_a_sidecar(run: LaunchedRun, peers: Peers, kind: str) -> None:
    state = run.state()
    assert state is not None
    node = state["nodes"][0]
    worker = {"worker_id": "policy/replica-0#0", "state": "exited"}
    body = {
        "kind": kind,
        "id": "forged",
        "node": node["node"],
        "incarnation": "0" * 16,
        "epoch": state["epoch"],
        "attempt": 1,
        "seq": 1,
        "report": {},
        "workers": [worker],
        "worker": worker,
        "event": "exited",
        "ok": True,
    }
    answer = ask(peers.keyed(PeerKind.CLIENT), body)
    assert (answer["kind"], answer["ok"]) == ("reply", False)
    assert answer["error"]["code"] == "forbidden"
    peers.wire()
    still_serves(run)


@pytest.mark.parametrize("kind", ["stop", "get_state", "step_ended", "gateway_up"])
def test_a_sidecar_may_not_speak_for_a_client(run: LaunchedRun, peers: Peers, kind: str) -> None:
    body = {
        "kind": kind,
        "id": "x",
        "node": "actor-0",
        "returncode": 0,
        "proof": "swept",
        "url": "http://evil:1",
    }
    answer = ask(peers.keyed(PeerKind.SIDECAR), body)
    assert (answer["kind"], answer["code"]) == ("refused", "forbidden")
    peers.wire()
    assert "evil" not in run.gateway_url


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"kind": "nonsense", "id": "x"}, "unknown_kind"),
        ({"kind": 7, "id": "x"}, "unknown_kind"),
        ({"id": "x"}, "unknown_kind"),
        ({"kind": "get_snapshot", "id": "x"}, "ill_formed"),
        ({"kind": "get_snapshot", "id": "x", "role": 7}, "ill_formed"),
        ({"kind": "ping", "id": ""}, "ill_formed"),
        ({"kind": "get_snapshot", "id": "x", "role": "nobody"}, "unknown_role"),
        (
            {"kind": "step_ended", "id": "x", "node": "nowhere", "returncode": 0, "proof": "none"},
            "unknown_node",
        ),
    ],
)
def test_a_message_that_cannot_be_accepted_is_answered_with_its_code(
    run: LaunchedRun, peers: Peers, body: dict[str, Any], code: str
) -> None:
    answer = ask(peers.keyed(PeerKind.CLIENT), body)
    assert answer["ok"] is False
    assert answer["error"]["code"] == code
    assert answer["error"]["message"]
    peers.wire()


def test_a_message_of_another_epoch_or_of_a_replaced_sidecar_is_refused(run: LaunchedRun, peers: Peers) -> None:
    state = run.state()
    assert state is not None
    node = state["nodes"][0]["node"]
    socket = peers.keyed(PeerKind.SIDECAR)
    beat = {
        "kind": "beat",
        "node": node,
        "incarnation": "0" * 16,
        "epoch": "000000-000000",
        "seq": 1,
        "workers": [],
    }
    assert ask(socket, beat)["code"] == "stale_epoch"
    assert ask(socket, beat | {"epoch": state["epoch"]})["code"] == "stale_incarnation"
    hello = {
        "kind": "hello",
        "node": "nowhere",
        "incarnation": "0" * 16,
        "attempt": 1,
        "report": {},
        "workers": [],
    }
    assert ask(socket, hello)["code"] == "unknown_node"
    assert ask(socket, hello | {"node": node, "attempt": 99})["code"] == "stale_attempt"
    peers.wire()
    still_serves(run)
