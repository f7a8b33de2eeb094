"""What follows from the reports of a weight update, and which payloads are refused before one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.core.weights import (
    GroupAction,
    Outcome,
    Report,
    Transport,
    Verdict,
    Weights,
    check_group,
    check_update,
    decide,
    group_of,
)
from relax_slurm.errors import ProtocolError

OLD, DISK, SENT = Weights("1", "/a"), Weights("2", "/b"), Weights("2", None)
U, T, K, D = Outcome.UPDATED, Outcome.TAKEN, Outcome.KEPT, Outcome.DOUBTFUL


def fates(wanted: Weights, *outcomes: Outcome, final: bool = True, valid: bool = True) -> tuple[str, list[str]]:
    """Version afterwards, and the verdicts in order."""
    versions = {U: wanted.version, T: OLD.version, K: OLD.version, D: None}
    reports = [Report(str(place), outcome, versions[outcome]) for place, outcome in enumerate(outcomes)]
    names = frozenset(report.replica_id for report in reports)
    made = decide(OLD, wanted, reports, final=final, valid=names if valid else frozenset())
    return made.weights.version, [str(made.verdicts[report.replica_id]) for report in reports]


@pytest.mark.parametrize(
    ("wanted", "outcomes", "version", "verdicts"),
    [
        (DISK, (U, U), "2", ["serve", "serve"]),
        (DISK, (K, K), "1", ["serve", "serve"]),
        (DISK, (U, K), "2", ["serve", "rebuild"]),
        (DISK, (U, D), "2", ["serve", "rebuild"]),
        (DISK, (K, D), "1", ["serve", "rebuild"]),
        (DISK, (D, D), "1", ["rebuild", "rebuild"]),
        (SENT, (U, K), "2", ["serve", "await"]),
        (SENT, (U, D), "2", ["serve", "rebuild"]),
    ],
)
def test_one_proven_replica_makes_the_version(
    wanted: Weights, outcomes: tuple[Outcome, ...], version: str, verdicts: list[str]
) -> None:
    assert fates(wanted, *outcomes) == (version, verdicts)


def test_a_part_publishes_nothing_and_keeps_everybody_closed() -> None:
    assert fates(SENT, T, T, final=False) == ("1", ["hold", "hold"])
    assert fates(SENT, T, K, D, final=False) == ("1", ["hold", "await", "rebuild"])


def test_who_had_no_valid_weights_before_does_not_serve_because_it_kept_them() -> None:
    assert fates(DISK, K, valid=False) == ("1", ["await"])
    lied = decide(OLD, DISK, [Report("0", K, "7")], final=True, valid=frozenset({"0"}))
    assert lied.verdicts["0"] is Verdict.AWAIT


def test_zero_is_a_version() -> None:
    made = decide(OLD, Weights("0", "/a"), [Report("0", U, "0")], final=True, valid=frozenset())
    assert (made.weights.version, made.verdicts["0"]) == ("0", Verdict.SERVE)


@given(st.lists(st.sampled_from(Outcome), min_size=1, max_size=6), st.booleans(), st.booleans(), st.booleans())
def test_who_serves_has_the_version_of_the_model(
    outcomes: list[Outcome], final: bool, on_disk: bool, valid: bool
) -> None:
    wanted = DISK if on_disk else SENT
    said = {U: wanted.version, K: OLD.version, T: OLD.version, D: None}
    reports = [Report(str(place), outcome, said[outcome]) for place, outcome in enumerate(outcomes)]
    names = frozenset(report.replica_id for report in reports) if valid else frozenset()
    made = decide(OLD, wanted, reports, final=final, valid=names)
    assert made.verdicts.keys() == {report.replica_id for report in reports}
    for report in reports:
        verdict = made.verdicts[report.replica_id]
        if verdict is Verdict.SERVE and final:
            assert report.version == made.weights.version
        if report.outcome is D:
            assert verdict is Verdict.REBUILD
    assert (made.weights == wanted) is (final and U in outcomes)


GOOD: dict[Transport, dict[str, Any]] = {
    Transport.DISK: {"model_path": "/a", "load_format": "auto"},
    Transport.TENSOR: {"serialized_named_tensors": ["AAAA"], "load_format": "flattened_bucket"},
    Transport.DISTRIBUTED: {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2, 2]], "group_name": "g"},
}


@pytest.mark.parametrize("transport", Transport)
def test_good_payloads_pass_and_fields_of_the_tool_do_not(transport: Transport) -> None:
    check_update(transport, GOOD[transport], "x")
    for name in ("weight_version", "is_async", "keep_pause", "abort_all_requests"):
        with pytest.raises(ProtocolError, match=name):
            check_update(transport, {**GOOD[transport], name: None}, "x")


@pytest.mark.parametrize(
    ("transport", "payload"),
    [
        (Transport.DISK, {}),
        (Transport.DISK, {"model_path": ""}),
        (Transport.DISK, {"model_path": 7}),
        (Transport.TENSOR, {}),
        (Transport.TENSOR, {"serialized_named_tensors": []}),
        (Transport.TENSOR, {"serialized_named_tensors": "AAAA"}),
        (Transport.TENSOR, {"serialized_named_tensors": [b"AAAA"]}),
        (Transport.DISTRIBUTED, {"names": ["w"], "dtypes": ["x"]}),
        (Transport.DISTRIBUTED, {"names": ["w"], "dtypes": ["x", "y"], "shapes": [[1]]}),
        (Transport.DISTRIBUTED, {"names": [], "dtypes": [], "shapes": []}),
        (Transport.DISTRIBUTED, {"names": "w", "dtypes": "x", "shapes": "y"}),
    ],
)
def test_payloads_that_no_engine_could_take(transport: Transport, payload: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="here: payload"):
        check_update(transport, payload, "here")


def test_groups() -> None:
    whole = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
    check_group(GroupAction.INIT, whole, "x")
    check_group(GroupAction.DESTROY, {}, "x")
    for name in whole:
        with pytest.raises(ProtocolError, match=name):
            check_group(GroupAction.INIT, {**whole, name: None}, "x")
    with pytest.raises(ProtocolError, match="group_name"):
        check_group(GroupAction.DESTROY, {"group_name": 1}, "x")
    assert (group_of({}), group_of({"group_name": "g"})) == ("weight_update_group", "g")
