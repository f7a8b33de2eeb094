"""The binding report at the trust boundary."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.report import NodeReport
from relax_slurm.errors import ProtocolError
from tests.unit.core.binding_samples import devices, make_report


def wire(**changes: Any) -> dict[str, Any]:
    return make_report("n0", (0, 1), devices=devices(2)).to_wire() | changes


def test_round_trip_over_msgpack() -> None:
    report = make_report("n0", (0, 1), devices=devices(2), virtual_gpus=(0, 1), towards_head="10.0.0.1")
    assert NodeReport.from_wire(msgpack.unpackb(msgpack.packb(report.to_wire()))) == report


def test_unknown_fields_are_ignored_at_every_level() -> None:
    body = wire(added_in_a_later_version={"x": 1})
    body["devices"][0]["temperature"] = 40
    assert NodeReport.from_wire(body) == NodeReport.from_wire(wire())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("node", ""),
        ("node", 3),
        ("pid", "100"),
        ("pid", 0),
        ("pid", True),
        ("hostname", None),
        ("environ", {"A": 1}),
        ("environ", {f"V{number}": "" for number in range(65)}),
        ("addresses", [{"interface": "eth0", "address": "nonsense"}]),
        ("addresses", [{"interface": "eth0"}]),
        ("towards_head", "nonsense"),
        ("devices", [{"ordinal": "0", "uuid": "GPU-a", "name": "x", "memory_total": 1, "memory_used": 0}]),
        ("devices", [{"ordinal": 0, "uuid": "GPU-a", "name": "x", "memory_total": 1, "memory_used": -1}]),
        ("virtual_gpus", ["0"]),
        ("port_block", {"start": 70000, "span": 1}),
        ("ephemeral_range", [1]),
        ("busy_ports", [0]),
    ],
)
def test_ill_typed_fields_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ProtocolError, match=rf"binding report of .*: {field}"):
        NodeReport.from_wire(wire(**{field: value}))


def test_missing_fields_are_refused_by_name() -> None:
    body = wire()
    del body["hostname"]
    with pytest.raises(ProtocolError, match="'n0': hostname"):
        NodeReport.from_wire(body)


@given(st.dictionaries(st.sampled_from(sorted(wire())), st.recursive(st.none() | st.integers() | st.text(), st.lists)))
def test_no_body_raises_anything_but_a_protocol_error(changes: dict[str, Any]) -> None:
    with contextlib.suppress(ProtocolError):
        NodeReport.from_wire(wire() | changes)
