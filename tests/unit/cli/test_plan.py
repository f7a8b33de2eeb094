"""`plan`: everything is shown, nothing is done."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from xml.etree import ElementTree

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


def test_json_has_bundles_components_steps_ports_and_addresses(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(arguments(str(ROOT / "configs" / "defer.yaml"), "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bundles"] == [
        {"pool": "actor", "phase": 0, "role": "rollout", "bundles": [[0, 7]]},
        {"pool": "actor", "phase": 1, "role": "genrm", "bundles": [[0, 7]]},
        {"pool": "actor", "phase": 2, "role": "teacher", "bundles": [[0, 7]]},
        {"pool": "actor", "phase": None, "role": "training", "bundles": [[0, 7]]},
    ]
    assert [(entry["name"], entry["nodes"], entry["gpus_per_node"]) for entry in document["components"]] == [
        ("actor", 1, 8)
    ]
    (step,) = document["steps"]
    assert step["argv"][:2] == ["srun", "--overlap"]
    assert "--nodelist=actor[n]" in step["argv"]
    assert not [word for word in step["argv"] if word.startswith("--het-group")]
    assert [entry["replica"] for entry in document["ports"]] == [entry["replica_id"] for entry in document["engines"]]
    for entry, engine in zip(document["ports"], document["engines"], strict=True):
        assert f"--port {entry['http']}" in " ".join(engine["argv"])
    assert document["addresses"]["guards"]["policy/replica-0"] == "http://actor[0]:20001"
    assert document["addresses"]["head"] == "first node of component 0 (actor)"


def test_steps_of_a_het_job_name_their_component_and_a_head_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "configs" / "decoupled.yaml")
    assert verb.run(arguments(path, "--set=head={}", "--set=slurm.extra_srun=['--mem=10G']", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["component"] for entry in document["steps"]] == [1, 2, 3]
    for entry in document["steps"]:
        assert f"--het-group={entry['component']}" in entry["argv"]
        assert "--mem=10G" in entry["argv"]
    assert document["addresses"]["head"] == "first node of component 0 (head)"


def test_containers_are_shown_around_the_engines(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(ROOT / "configs" / "source" / "split-16.yaml")
    apptainer = "--set=engine.container={runtime: apptainer, image: /i.sif, python: /usr/bin/python3}"
    assert verb.run(arguments(path, apptainer)) == 0
    shown = capsys.readouterr().out
    assert " /i.sif /usr/bin/python3 -m sglang.launch_server --model-path /models/policy" in shown
    assert "container-image" not in shown
    assert verb.run(arguments(path, apptainer.replace("apptainer", "pyxis"))) == 0
    shown = capsys.readouterr().out
    assert "--container-image=/i.sif" in shown
    assert "gpu 0,1: /usr/bin/python3 -m sglang.launch_server" in shown


def test_the_svg_is_one_small_document_with_a_square_per_bundle(capsys: pytest.CaptureFixture[str]) -> None:
    assert verb.run(arguments(str(ROOT / "configs" / "defer.yaml"), "--svg")) == 0
    drawn = ElementTree.fromstring(capsys.readouterr().out)
    space = "{http://www.w3.org/2000/svg}"
    hints = [entry.text for entry in drawn.iter(f"{space}title")]
    assert hints[0] == "defer: defer"
    assert hints.count("bundle 7: genrm") == 1
    squares = [entry for entry in drawn.iter(f"{space}rect") if list(entry)]
    assert len(squares) == 4 * 8, "three roles and training over eight bundles"
    words = [entry.text for entry in drawn.iter(f"{space}text")]
    assert {"phase 0  rollout", "phase 1  genrm", "phase 2  teacher", "training", "node 0"} <= set(words)


def test_a_thousand_nodes_are_one_folded_picture(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        str(ROOT / "configs" / "source" / "distill-128.yaml"),
        "--set=pools.actor.nodes=1024",
        "--set=training.gpus=8192",
        "--set=roles.rollout.models.policy.gpus=8184",
    ]
    assert verb.run(arguments(*words, "--svg")) == 0
    drawn = capsys.readouterr().out
    assert len(drawn) < 20_000
    assert "nodes 0-1022" in drawn
    assert verb.run(arguments(*words)) == 0
    assert "nodes 0-1022, all alike: bundles 0-8183" in capsys.readouterr().out
