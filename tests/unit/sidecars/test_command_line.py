"""Complete command lines, written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_slurm.config.container import ContainerConfig
from relax_slurm.core.plan import Role, WeightSource, WorkerType
from relax_slurm.errors import ConfigError, ProtocolError
from sidecars.command_line import build
from sidecars.worker import EnginePorts, WorkerSpec

PORTS = EnginePorts(http=21002, nccl=21003, rendezvous=21004, bootstrap=21012)


def spec(**changes: Any) -> WorkerSpec:
    fields: dict[str, Any] = {
        "worker_id": "judge/replica-1#0",
        "replica_id": "judge/replica-1",
        "role": Role.GENRM,
        "model": "judge",
        "program": "sglang",
        "model_path": "/models/judge",
        "served_model_name": "judge",
        "host": "127.0.0.1",
        "ports": PORTS,
        "log_path": "/run/logs/judge-1.log",
        "run_tag": "run-7",
        "gpus": ("2", "3"),
        "gpu_indexes": (2, 3),
        "python": "/venv/bin/python",
    }
    return WorkerSpec(**{**fields, **changes})


def test_one_node_without_memory_saver() -> None:
    command = build(spec(), {})
    assert " ".join(command.argv) == (
        "/venv/bin/python -m sglang.launch_server --model-path /models/judge --served-model-name judge "
        "--host 127.0.0.1 --port 21002 --nccl-port 21003 --dist-init-addr 127.0.0.1:21004 "
        "--nnodes 1 --node-rank 0 --tp-size 2"
    )
    assert command.private is None
    assert command.env == {
        "RELAX_RUN_TAG": "run-7",
        "RELAX_WORKER_TAG": "judge/replica-1#0",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "no_proxy": "127.0.0.1,localhost,::1",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        "SPT_NOENV": "1",
    }


def test_a_follower_on_two_nodes_with_memory_saver_and_arguments() -> None:
    worker = spec(
        worker_id="judge/replica-1#1",
        host="10.0.0.2",
        nnodes=2,
        node_rank=1,
        rendezvous_host="10.0.0.1",
        memory_saver=True,
        gpus=("GPU-aa", "GPU-bb"),
        engine_args={
            "pp_size": 2,
            "mem_fraction_static": 0.85,
            "trust_remote_code": True,
            "disable_radix_cache": False,
            "cuda_graph_bs": [1, 2, 4],
            "json_model_override_args": {"a": 1},
        },
    )
    command = build(worker, {})
    assert " ".join(command.argv[3:]) == (
        "--model-path /models/judge --served-model-name judge --host 10.0.0.2 --port 21002 --nccl-port 21003 "
        "--dist-init-addr 10.0.0.1:21004 --nnodes 2 --node-rank 1 --enable-memory-saver "
        "--enable-weights-cpu-backup --pp-size 2 --mem-fraction-static 0.85 --trust-remote-code "
        '--cuda-graph-bs 1 2 4 --json-model-override-args {"a":1} --tp-size 2'
    )
    assert command.env["CUDA_VISIBLE_DEVICES"] == "GPU-aa,GPU-bb"
    assert command.env["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] == "true"
    assert command.env["no_proxy"] == "127.0.0.1,localhost,::1,10.0.0.2,10.0.0.1"


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        (WorkerType.PREFILL, "--disaggregation-mode prefill --disaggregation-bootstrap-port 21012"),
        (WorkerType.DECODE, "--disaggregation-mode decode"),
    ],
)
def test_disaggregated_workers(kind: WorkerType, flags: str) -> None:
    assert flags in " ".join(build(spec(worker_type=kind), {}).argv)


def test_only_static_engines_back_their_weights_up_and_a_run_file_may_say_no() -> None:
    actor = spec(role=Role.ROLLOUT, weight_source=WeightSource.ACTOR, memory_saver=True)
    refusing = spec(memory_saver=True, engine_args={"enable_weights_cpu_backup": False})
    for worker in (actor, refusing):
        assert "--enable-weights-cpu-backup" not in build(worker, {}).argv
        assert not worker.has_weights_backup
    assert spec(memory_saver=True).has_weights_backup


def test_keys_are_in_a_private_file_and_not_in_argv() -> None:
    command = build(spec(api_key="k-generate", admin_key="k-admin"), {})
    assert command.private is not None
    assert command.private.path == Path("/run/logs/judge-1.keys.yaml")
    assert command.argv[3:5] == ("--config", "/run/logs/judge-1.keys.yaml")
    assert json.loads(command.private.content) == {"api-key": "k-generate", "admin-api-key": "k-admin"}
    assert "k-generate" not in " ".join(command.argv) + repr(command) + repr(spec(api_key="k-generate"))


def test_the_simulator_gets_the_same_flags_and_its_options_in_the_environment() -> None:
    worker = spec(program="sim", api_key="k-generate", sim={"seed": 3})
    command = build(worker, {})
    assert command.argv[:3] == ("/venv/bin/python", "-m", "sidecars.sim")
    assert command.argv[3:] == build(spec(), {}).argv[3:]
    assert json.loads(command.env["RELAX_SIM_OPTIONS"]) == {
        "role": "genrm",
        "owner": "judge/replica-1#0",
        "gpus": [2, 3],
        "seed": 3,
    }
    assert command.env["RELAX_SIM_API_KEY"] == "k-generate"
    assert command.private is None


@pytest.mark.parametrize(
    "key", ["port", "--nccl-port", "api_key", "served_model_name", "base_gpu_id", "nnodes", "model"]
)
def test_owned_arguments_are_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match="genrm/judge"):
        build(spec(engine_args={key: "x"}), {})


def test_the_environment_of_our_own_step_is_not_inherited() -> None:
    inherited = {
        "SLURM_STEP_GPUS": "0,1",
        "SBATCH_ACCOUNT": "a",
        "PMIX_RANK": "0",
        "RELAX_RUN_TAG": "other",
        "CUDA_VISIBLE_DEVICES": "0",
        "NCCL_DEBUG": "INFO",
        "HF_HOME": "/hf",
    }
    env = build(spec(env={"NCCL_DEBUG": "WARN", "no_proxy": "nothing"}), inherited).env
    assert not [key for key in env if key.startswith(("SLURM_", "SBATCH_", "PMIX_"))]
    assert (env["RELAX_RUN_TAG"], env["CUDA_VISIBLE_DEVICES"]) == ("run-7", "2,3")
    assert (env["NCCL_DEBUG"], env["HF_HOME"]) == ("WARN", "/hf")
    assert env["no_proxy"].startswith("127.0.0.1")


def test_a_spec_survives_the_wire() -> None:
    worker = spec(api_key="k", engine_args={"a": [1]}, worker_type=WorkerType.DECODE, memory_saver=True)
    assert WorkerSpec.from_wire(json.loads(json.dumps(worker.to_wire()))) == worker
    assert WorkerSpec.from_wire({**worker.to_wire(), "added later": 1}) == worker


@pytest.mark.parametrize(
    "damage",
    [
        {"program": "vllm"},
        {"node_rank": 1},
        {"gpus": ["0"]},
        {"gpus": ["0", "0"], "gpu_indexes": [0, 0]},
        {"ports": {"http": 1}},
        {"role": "cook"},
        {"nnodes": 0},
    ],
)
def test_a_contradictory_spec_is_refused(damage: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="judge/replica-1#0"):
        WorkerSpec.from_wire({**spec().to_wire(), **damage})


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "http://127.0.0.1:21002"), ("fd00::1", "http://[fd00::1]:21002")]
)
def test_base_url(host: str, url: str) -> None:
    assert spec(host=host).base_url == url


def test_an_engine_in_a_container_is_wrapped_with_its_run_directory_and_without_the_hosts_libraries() -> None:
    image = ContainerConfig(runtime="apptainer", image="/i.sif", mounts=("/models:/models:ro",))
    command = build(
        spec(container=image, python="python3", api_key="secret", log_path="/runs/r/attempt_2/logs/judge.log"),
        {"LD_LIBRARY_PATH": "/host", "HF_HOME": "/hf"},
    )
    bind = "--bind /runs/r/attempt_2:/runs/r/attempt_2 --bind /models:/models:ro"
    assert " ".join(command.argv).startswith(
        f"apptainer exec --nv {bind} /i.sif python3 -m sglang.launch_server "
        "--config /runs/r/attempt_2/logs/judge.keys.yaml --model-path /models/judge "
    )
    assert command.env["HF_HOME"] == "/hf"
    assert command.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert command.env["NVIDIA_VISIBLE_DEVICES"] == "all"
    assert "LD_LIBRARY_PATH" not in command.env
    assert "secret" not in " ".join(command.argv)


def test_a_container_travels_over_the_wire() -> None:
    there = spec(container=ContainerConfig(runtime="enroot", image="/i.sqsh", mounts=("/a:/b",), options=("--rw",)))
    assert WorkerSpec.from_wire(json.loads(json.dumps(there.to_wire()))) == there
    with pytest.raises(ProtocolError, match="not usable"):
        WorkerSpec.from_wire({**there.to_wire(), "container": {"runtime": "x"}})
