"""Flags and options of the simulator."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from relax_slurm.errors import ConfigError
from sidecars.sim.options import Fault, FaultKind, ServerArgs, SimOptions, parse_flags, read_options


def test_flags_as_sglang_takes_them() -> None:
    argv = ["--model-path", "m", "--enable-metrics", "--cuda-graph-bs", "1", "2", "--port=7", "--new-flag", "x"]
    assert parse_flags(argv) == {
        "model_path": "m",
        "enable_metrics": True,
        "cuda_graph_bs": ["1", "2"],
        "port": "7",
        "new_flag": "x",
    }
    args = ServerArgs.parse(argv, {"RELAX_SIM_API_KEY": "k"})
    assert (args.model_path, args.served_model_name, args.port, args.enable_metrics) == ("m", "m", 7, True)
    assert (args.api_key, args.admin_api_key) == ("k", None)
    assert args.given["new_flag"] == "x"


@pytest.mark.parametrize("argv", [[], ["stray"], ["--model-path", "m", "--port", "x"], ["--model-path"]])
def test_unusable_flags(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        ServerArgs.parse(argv, {})


def test_options_and_faults() -> None:
    options = SimOptions.from_json(
        {
            "gpus": [4, 5],
            "seed": 3,
            "tokens_per_second": 100,
            "owner": "policy/replica-1#0",
            "faults": ["hang_start", {"kind": "die_after_requests", "value": 3, "worker": "*/replica-1#*"}],
        }
    )
    assert options.gpus == (4, 5)
    assert options.tokens_per_second == 100.0
    assert options.fault(FaultKind.HANG_START) == Fault(FaultKind.HANG_START)
    assert options.fault(FaultKind.DIE_AFTER_REQUESTS) is not None
    assert options.fault(FaultKind.BAD_JSON) is None
    other = SimOptions.from_json({"faults": [{"kind": "bad_json", "worker": "judge/*"}], "owner": "policy/x"})
    assert other.fault(FaultKind.BAD_JSON) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"tokens_per_secnd": 1}, "tokens_per_second"),
        ({"seed": "x"}, "seed"),
        ({"error_rate": -1}, "error_rate"),
        ({"startup_seconds": float("nan")}, "startup_seconds"),
        ({"gpus": ["a"]}, "gpus"),
        ({"vocab_size": 500}, "power of two"),
        ({"faults": ["explode"]}, "die_after_requests"),
        ({"faults": [{"kind": "bad_json", "when": 3}]}, "kind, value and worker"),
        ({"faults": "hang_start"}, "faults"),
    ],
)
def test_unusable_options(value: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SimOptions.from_json(value)


@pytest.mark.parametrize("text", ["{", "[]", '"x"'])
def test_options_must_be_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match="RELAX_SIM_OPTIONS"):
        read_options({"RELAX_SIM_OPTIONS": text})
    assert read_options({}) == SimOptions()


def test_a_mistake_is_one_line_and_exit_code_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sidecars.sim", "--port", "1"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--model-path" in done.stderr
