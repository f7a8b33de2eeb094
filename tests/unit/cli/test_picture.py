"""The picture of bundles: the source's own form, nodes apart, large pools folded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_slurm.cli.picture import picture
from relax_slurm.config.load import from_mapping, load
from relax_slurm.core.placement import plan

ROOT = Path(__file__).resolve().parents[3]


def role(gpus: int, **more: Any) -> dict[str, Any]:
    return {"pool": "actor", "models": {"m": {"model_path": "p", "gpus": gpus, **more}}}


def shared(placement: str, nodes: int, per_node: int, roles: dict[str, Any]) -> str:
    data = {
        "name": "t",
        "placement": placement,
        "pools": {"actor": {"nodes": nodes, "gpus_per_node": per_node}},
        "training": {"pool": "actor", "gpus": nodes * per_node},
        "roles": roles,
    }
    return picture(plan(from_mapping(data)))


def test_split_on_one_node() -> None:
    drawn = shared("split", 1, 8, {"rollout": role(4), "genrm": role(2), "teacher": role(2)})
    assert drawn == (
        "pool actor: 1 node x 8 GPUs, component 0\n"
        "  bundle:   0 1 2 3 4 5 6 7\n"
        "  rollout:  R R R R . . . .\n"
        "  genrm:    . . . . G G . .\n"
        "  teacher:  . . . . . . T T\n"
        "  training: # # # # # # # #\n"
        "\n"
        "  R rollout, G genrm, T teacher, # training, . free; training takes its GPUs once inference has offloaded\n"
    )


def test_defer_shows_phases() -> None:
    drawn = picture(plan(load(ROOT / "configs" / "defer.yaml", environ={})))
    assert drawn.splitlines()[1:6] == [
        "  bundle:            0 1 2 3 4 5 6 7",
        "  phase 0  rollout:  R R R R R R R R",
        "  phase 1  genrm:    G G G G G G G G",
        "  phase 2  teacher:  T T T T T T T T",
        "           training: # # # # # # # #",
    ]


def test_nodes_stand_apart_and_columns_are_as_wide_as_the_last_bundle() -> None:
    drawn = shared("split", 2, 8, {"rollout": role(9)}).splitlines()
    assert drawn[1] == "  bundle:    0  1  2  3  4  5  6  7 |  8  9 10 11 12 13 14 15"
    assert drawn[2] == "  rollout:   R  R  R  R  R  R  R  R |  R  .  .  .  .  .  .  ."


def test_large_pools_are_folded() -> None:
    drawn = shared("split", 1024, 8, {"rollout": role(8000), "teacher": role(12)}).splitlines()
    assert len(drawn) < 24
    assert max(len(line) for line in drawn) < 110
    assert "  nodes 0-999, all alike: bundles 0-7999" in drawn
    assert "  node 1001: bundles 8008-8015" in drawn
    assert "  teacher:  T T T T . . . ." in drawn


@pytest.mark.parametrize("name", ["defer-16", "split-16", "distill-128"])
def test_the_page_shows_the_source_systems_examples_as_they_are_planned(name: str) -> None:
    drawn = picture(plan(load(ROOT / "configs" / "source" / f"{name}.yaml", environ={})))
    assert drawn.partition("\n\n")[0] in (ROOT / "docs" / "placement.md").read_text(encoding="utf-8")


def test_placeholders_have_a_letter_of_their_own() -> None:
    groups = [{"gpus": 1}, {"worker_type": "placeholder", "gpus": 1}]
    drawn = shared("split", 1, 4, {"rollout": role(2, groups=groups)})
    assert "  rollout:  R - . .\n" in drawn
    assert "- placeholder" in drawn
