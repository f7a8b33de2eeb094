"""Command lines of container runtimes, written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relax_slurm.config.container import ContainerConfig
from relax_slurm.slurm.container import engine_environment, own_mounts, step_options, wrap

ENGINE = ["python3", "-m", "sglang.launch_server", "--config", "/runs/x/attempt_1/logs/k.yaml"]
MOUNTS = own_mounts(Path("/runs/x/attempt_1"))


def container(runtime: str, **more: Any) -> ContainerConfig:
    return ContainerConfig.model_validate({"runtime": runtime, "image": "/images/sglang.sif", **more})


def test_apptainer_wraps_an_engine() -> None:
    words = wrap(
        container("apptainer", mounts=("/models:/models:ro",), options=("--writable-tmpfs",)), ENGINE, {}, MOUNTS
    )
    assert words == [
        *["apptainer", "exec", "--nv", "--bind", "/runs/x/attempt_1:/runs/x/attempt_1", "--bind", "/models:/models:ro"],
        *["--writable-tmpfs", "/images/sglang.sif", *ENGINE],
    ]


def test_without_gpus_the_driver_stays_out() -> None:
    assert "--nv" not in wrap(container("apptainer", gpus=False), ENGINE, {}, MOUNTS)


def test_enroot_gets_the_names_of_variables_and_never_a_value() -> None:
    env = {"RELAX_SIM_API_KEY": "secret", "CUDA_VISIBLE_DEVICES": "2,3", "PATH": "/bin", "HOME": "/root"}
    words = wrap(container("enroot", options=("--rw",)), ENGINE, env, MOUNTS)
    assert words == [
        *["enroot", "start", "--mount", "/runs/x/attempt_1:/runs/x/attempt_1"],
        *["--env", "CUDA_VISIBLE_DEVICES", "--env", "RELAX_SIM_API_KEY", "--rw", "/images/sglang.sif", *ENGINE],
    ]
    assert "secret" not in " ".join(words)


def test_pyxis_belongs_to_the_step() -> None:
    image = container("pyxis", mounts=("/models:/models:ro",), options=("--no-container-mount-home",))
    assert step_options(image, MOUNTS) == [
        "--container-image=/images/sglang.sif",
        "--container-mounts=/runs/x/attempt_1:/runs/x/attempt_1,/models:/models:ro",
        "--no-container-mount-home",
    ]
    assert step_options(container("apptainer"), MOUNTS) == []
    assert step_options(None, MOUNTS) == []


def test_what_describes_the_hosts_python_stays_on_the_host() -> None:
    env = {"LD_LIBRARY_PATH": "/cuda", "PYTHONPATH": "/src", "VIRTUAL_ENV": "/venv", "CUDA_VISIBLE_DEVICES": "0"}
    assert engine_environment(env, ["LD_LIBRARY_PATH"]) == {"LD_LIBRARY_PATH": "/cuda", "CUDA_VISIBLE_DEVICES": "0"}
