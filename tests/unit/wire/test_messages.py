from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.errors import ProtocolError
from relax_slurm.wire import messages
from relax_slurm.wire.messages import (
    SENDERS,
    Beat,
    Forbidden,
    IllFormed,
    PeerKind,
    UnknownKind,
    parse_discovery,
    parse_for_coordinator,
    parse_for_sidecar,
    parse_reply,
)

EPOCH = "000001-abcdef"
BEAT = {"kind": "beat", "node": "n1", "incarnation": "x", "epoch": EPOCH, "seq": 1, "workers": []}


def test_unknown_fields_are_ignored_so_that_a_newer_peer_can_talk() -> None:
    assert parse_for_coordinator({**BEAT, "new_in_1_1": True}, PeerKind.SIDECAR) == Beat.model_validate(BEAT)


@pytest.mark.parametrize("missing", ["node", "incarnation", "epoch", "seq"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = {key: value for key, value in BEAT.items() if key != missing}
    with pytest.raises(IllFormed, match=missing):
        parse_for_coordinator(body, PeerKind.SIDECAR)


@pytest.mark.parametrize(
    ("field", "value"), [("seq", "1"), ("seq", None), ("epoch", "1"), ("node", ""), ("workers", {})]
)
def test_an_ill_typed_field_is_named(field: str, value: object) -> None:
    with pytest.raises(IllFormed, match=field):
        parse_for_coordinator({**BEAT, field: value}, PeerKind.SIDECAR)


@pytest.mark.parametrize("kind", ["nonsense", None, 3, ["hello"]])
def test_an_unknown_kind_is_told(kind: object) -> None:
    with pytest.raises(UnknownKind):
        parse_for_coordinator({"kind": kind}, PeerKind.CLIENT)


def test_a_client_may_not_speak_for_a_node_and_a_sidecar_may_not_stop_a_run() -> None:
    with pytest.raises(Forbidden):
        parse_for_coordinator(BEAT, PeerKind.CLIENT)
    with pytest.raises(Forbidden):
        parse_for_coordinator({"kind": "stop", "id": "1"}, PeerKind.SIDECAR)


def test_every_kind_has_exactly_one_kind_of_sender() -> None:
    table = set(messages._TO_COORDINATOR)
    assert set().union(*SENDERS.values()) == table
    assert not SENDERS[PeerKind.SIDECAR] & SENDERS[PeerKind.CLIENT]


FIELDS = st.sampled_from(["kind", "id", "node", "epoch", "seq", "role", "workers"])


@given(st.dictionaries(FIELDS, st.text() | st.integers() | st.none()))
def test_any_map_parses_or_is_refused_in_words(body: dict[str, object]) -> None:
    refusals = []
    for parse in (_as_client, parse_for_sidecar, parse_discovery, parse_reply):
        try:
            parse(body)
        except ProtocolError as error:
            refusals.append(error.message)
    assert all(refusals)


def _as_client(body: dict[str, object]) -> object:
    return parse_for_coordinator(body, PeerKind.CLIENT)
