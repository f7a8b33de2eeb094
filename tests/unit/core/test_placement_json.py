"""plan.json: exact, versioned, and honest about damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_slurm.config.load import from_mapping, load
from relax_slurm.core.placement import plan
from relax_slurm.core.placement_json import from_json, to_json, to_value
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.errors import ConfigError

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
GOLDEN = HERE / "test_placement_golden.json"


def split() -> InferencePlacementPlan:
    return plan(load(ROOT / "configs" / "split.yaml", environ={}), ephemeral=(32768, 60999))


def test_golden() -> None:
    assert to_json(split()) == GOLDEN.read_text(encoding="utf-8"), (
        "the format of plan.json changed: raise PLAN_VERSION?"
    )


@pytest.mark.parametrize("name", ["quickstart", "decoupled", "split", "defer"])
def test_round_trip(name: str) -> None:
    made = plan(load(ROOT / "configs" / f"{name}.yaml", environ={}))
    assert from_json(to_json(made)) == made
    assert json.loads(to_json(made)) == to_value(made)


def test_engine_arguments_come_back_as_they_were() -> None:
    args = {"tp_size": 1, "a": 1.5, "b": [1, "x"], "c": {"k": None}, "d": True, "e": "ü"}
    made = plan(
        from_mapping(
            {
                "name": "t",
                "placement": "decoupled",
                "pools": {"a": {"nodes": 1, "gpus_per_node": 1}},
                "roles": {
                    "rollout": {"pool": "a", "models": {"m": {"model_path": "p", "gpus": 1, "engine_args": args}}}
                },
            }
        )
    )
    back = from_json(to_json(made)).roles[0].models[0]
    assert back.engine_args == {"weight_version": "0", **args}
    assert [type(back.engine_args[key]) for key in args] == [type(value) for value in args.values()]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "plan version is None"),
        ("{}", "plan version is None"),
        ('{"version": 2}', "plan version is 2"),
        ('{"version": true}', "plan version is True"),
        ('{"version": 1}', "damaged"),
    ],
)
def test_damage(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_json(text)


def test_a_changed_value_is_found() -> None:
    value = json.loads(to_json(split()))
    value["roles"][0]["models"][0]["replicas"][0]["bundles"] = ["0"]
    with pytest.raises(ConfigError, match=r"plan\.json:roles\.0\.models\.0\.replicas\.0\.bundles\.0"):
        from_json(json.dumps(value))
