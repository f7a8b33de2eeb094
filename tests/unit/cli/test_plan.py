"""`plan`: everything is shown, nothing is done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from relax_slurm.cli import plan as verb
from relax_slurm.config.load import from_mapping, load
from relax_slurm.core.placement import plan
from relax_slurm.core.placement_commands import engine_arguments, node_name, planned_commands
from relax_slurm.core.placement_json import from_json
from relax_slurm.errors import ConfigError, PlanRefused
from sidecars.command_line import build
from sidecars.worker import EnginePorts, WorkerSpec

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "cluster" not in path.name)


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RELAX_RUNS_ROOT", raising=False)
    monkeypatch.delenv("RELAX_CLUSTER_FILE", raising=False)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_text_shows_everything_and_leaves_nothing(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verb.run(arguments(str(path))) == 0
    shown = capsys.readouterr().out
    for word in ("components:", "replicas:", "ports:", "engine command lines:", "#SBATCH --nodes=", "R rollout"):
        assert word in shown
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document_that_carries_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(arguments(str(ROOT / "configs" / "decoupled.yaml"), "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["script"].count("#SBATCH hetjob") == 2
    made = from_json(json.dumps(document["plan"]))
    assert len(document["engines"]) == sum(
        len(replica.workers) for role in made.roles for model in role.models for replica in model.replicas
    )


def test_long_lists_are_cut_and_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        str(ROOT / "configs" / "split.yaml"),
        "--set=pools.actor.nodes=16",
        "--set=roles.rollout.models.policy={gpus: 100, gpus_per_engine: 1}",
    )
    assert verb.run(arguments(*words)) == 0
    assert "more (--all shows them, --json has them)" in capsys.readouterr().out
    assert verb.run(arguments(*words, "--all")) == 0
    assert "policy/replica-99" in capsys.readouterr().out


def test_refusals_reach_the_caller() -> None:
    decoupled = str(ROOT / "configs" / "decoupled.yaml")
    with pytest.raises(PlanRefused, match="not divisible"):
        verb.run(arguments(decoupled, "--set=roles.rollout.models.policy.gpus=15"))
    with pytest.raises(ConfigError, match="hetjob"):
        verb.run(arguments(decoupled, "--set=name=exp-hetjob"))


MULTI = {
    "name": "t",
    "placement": "defer",
    "engine": {"program": "sglang"},
    "pools": {"a": {"nodes": 2, "gpus_per_node": 2}},
    "training": {"pool": "a", "gpus": 4},
    "roles": {
        "rollout": {
            "pool": "a",
            "models": {
                "m": {
                    "model_path": "/models/a b",
                    "gpus": 4,
                    "gpus_per_engine": 4,
                    "engine_args": {"pp_size": 2, "mem_fraction_static": 0.7, "trust_remote_code": True},
                }
            },
        },
        "genrm": {"pool": "a", "models": {"j": {"model_path": "judge", "gpus": 2}}},
    },
}


@pytest.mark.parametrize("source", [*CONFIGS, None], ids=lambda path: path.name if path else "multi-node")
def test_the_sidecar_builds_the_command_line_that_was_shown(source: Path | None) -> None:
    made = plan(load(source, environ={}) if source else from_mapping(MULTI))
    start = made.ports.first
    for role in made.roles:
        for model in role.models:
            for replica in model.replicas:
                for worker in replica.workers:
                    alone = len(replica.workers) == 1
                    spec = WorkerSpec(
                        worker_id=f"{replica.replica_id}#{worker.node_rank}",
                        replica_id=replica.replica_id,
                        role=role.role,
                        model=model.name,
                        program=made.engine,
                        model_path=model.model_path,
                        served_model_name=model.served_model_name,
                        host="127.0.0.1" if alone else node_name(worker),
                        ports=EnginePorts(
                            http=start + worker.ports.http,
                            nccl=start + worker.ports.nccl,
                            rendezvous=start + replica.workers[0].ports.rendezvous,
                            bootstrap=start + worker.ports.bootstrap,
                        ),
                        log_path="/x.log",
                        run_tag="t",
                        weight_source=model.weight_source,
                        nnodes=len(replica.workers),
                        node_rank=worker.node_rank,
                        rendezvous_host="127.0.0.1" if alone else node_name(replica.workers[0]),
                        gpus=tuple(str(gpu) for gpu in worker.gpus),
                        engine_args=dict(model.engine_args_of(replica)),
                        memory_saver=role.offload,
                        python="python",
                    )
                    shown = engine_arguments(made, role, model, replica, worker)
                    assert list(build(spec, {}).argv[-len(shown) :]) == shown


def test_commands_are_in_the_plans_order() -> None:
    made = plan(from_mapping(MULTI))
    places = [(command.replica_id, command.node_rank, command.node) for command in planned_commands(made)]
    assert places == [("m/replica-0", 0, 0), ("m/replica-0", 1, 1), ("j/replica-0", 0, 0), ("j/replica-1", 0, 0)]
