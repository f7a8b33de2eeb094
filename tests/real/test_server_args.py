"""Command lines that we write, read by SGLang's own parser; and what we call ours, compared with what it knows."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from relax_slurm.config.engine_args import ALIASES, OWNED, canonical, owned_reason
from relax_slurm.core.plan import Role, WeightSource, WorkerType
from sidecars.command_line import build
from sidecars.worker import EnginePorts, WorkerSpec
from tests.contract.engine_program import real_sglang, worker

PORTS = EnginePorts(http=21001, nccl=21002, rendezvous=21003, bootstrap=21004)
ALL_ARGUMENTS: dict[str, Any] = {
    "mem_fraction_static": 0.7,
    "--context-length": 10_240,
    "chunked-prefill-size": 4096,
    "enable_metrics": True,
    "disable_cuda_graph": False,
    "cuda_graph_bs_decode": [1, 2, 4],
    "json_model_override_args": {"rope_scaling": None},
    "quantization": None,
    "dtype": "bfloat16",
    "schedule_policy": "lpm",
    "random_seed": 7,
}


PASSED_THROUGH = {
    *(
        "gated_launch_port",
        "grpc_port",
        "grpc_http_sidecar_port",
        "smg_http_sidecar_port",
        "engine_info_bootstrap_port",
    ),
    *("encoder_bootstrap_port", "encoder_urls", "encoder_register_urls", "media_url_max_file_size_mb"),
    *("remote_instance_weight_loader_seed_instance_service_port", "load_publish_endpoint"),
    *("remote_instance_weight_loader_send_weights_group_ports", "otlp_traces_endpoint"),
    *("decoupled_spec_bind_endpoint", "decoupled_spec_connect_endpoints", "hicache_host_memory_fraction"),
    *("hicache_host_memory_mode", "disaggregation_decode_host_receive_threshold"),
}
"""Options that name an address and do not belong to the plan."""


def spec(tmp: Path, **changes: Any) -> WorkerSpec:
    """A worker with SGLang's Python and fixed ports."""
    known = {"program": "sglang", "python": os.environ["RELAX_TEST_SGLANG_PYTHON"], "sim": {}, "ports": PORTS}
    return worker(tmp, **{**known, **changes})


def ask(lines: list[list[str]]) -> dict[str, Any]:
    """What SGLang's Python says to these command lines; importing it takes seconds, so ask once for many."""
    program = Path(__file__).with_name("print_options.py")
    python = os.environ["RELAX_TEST_SGLANG_PYTHON"]
    env = {**os.environ, **real_sglang()["env"]}
    done = subprocess.run(
        [python, str(program)],
        input=json.dumps(lines),
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@cache
def options() -> dict[str, list[str]]:
    """SGLang's options by name, each with its spellings."""
    return dict(ask([])["options"])


Case = tuple[dict[str, Any], dict[str, Any]]
CASES: dict[str, Callable[[Path], Case]] = {
    "a policy on two GPUs": lambda tmp: (
        {"engine_args": ALL_ARGUMENTS},
        {
            "tp_size": 2,
            "port": 21001,
            "nccl_port": 21002,
            "dist_init_addr": "127.0.0.1:21003",
            "nnodes": 1,
            "node_rank": 0,
            "host": "127.0.0.1",
            "served_model_name": "policy",
            "model_path": "sim/policy",
            "enable_memory_saver": True,
            "mem_fraction_static": 0.7,
            "context_length": 10_240,
            "chunked_prefill_size": 4096,
            "enable_metrics": True,
            "disable_cuda_graph": False,
            "cuda_graph_bs_decode": [1, 2, 4],
            "json_model_override_args": '{"rope_scaling":null}',
            "dtype": "bfloat16",
            "random_seed": 7,
        },
    ),
    "a judge that is offloaded": lambda tmp: (
        {"role": Role.GENRM, "weight_source": WeightSource.STATIC},
        {"enable_weights_cpu_backup": True, "enable_memory_saver": True},
    ),
    "a judge without offload": lambda tmp: (
        {"role": Role.GENRM, "memory_saver": False},
        {"enable_weights_cpu_backup": False, "enable_memory_saver": False},
    ),
    "a teacher over two nodes": lambda tmp: (
        {
            "role": Role.TEACHER,
            "nnodes": 2,
            "node_rank": 1,
            "rendezvous_host": "10.0.0.1",
            "host": "10.0.0.2",
            "engine_args": {"tensor-parallel-size": 4},
        },
        {"tp_size": 4, "nnodes": 2, "node_rank": 1, "dist_init_addr": "10.0.0.1:21003", "host": "10.0.0.2"},
    ),
    "a replica over two nodes with IPv6": lambda tmp: (
        {"nnodes": 2, "rendezvous_host": "fd00::1", "host": "fd00::1"},
        {"dist_init_addr": "[fd00::1]:21003", "tp_size": 4},
    ),
    "a pipeline": lambda tmp: ({"engine_args": {"pp": 2}}, {"pp_size": 2, "tp_size": 1}),
    "experts": lambda tmp: (
        {"engine_args": {"tp": 2, "dp": 2, "ep": 2, "enable_dp_attention": True}},
        {"tp_size": 2, "dp_size": 2, "ep_size": 2, "enable_dp_attention": True},
    ),
    "a prefill worker": lambda tmp: (
        {"worker_type": WorkerType.PREFILL},
        {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 21004},
    ),
    "a decode worker": lambda tmp: ({"worker_type": WorkerType.DECODE}, {"disaggregation_mode": "decode"}),
    "an engine with keys": lambda tmp: (
        {"api_key": "secret-1", "admin_key": "secret-2"},
        {"config": str(tmp / "engine.keys.yaml"), "api_key": None, "admin_api_key": None},
    ),
}


def test_every_planned_command_line_is_understood(tmp_path: Path) -> None:
    wanted: list[dict[str, Any]] = []
    lines: list[list[str]] = []
    for make in CASES.values():
        changes, want = make(tmp_path)
        argv = build(spec(tmp_path, **changes), {}).argv
        assert argv[1:3] == ("-m", "sglang.launch_server")
        lines.append(list(argv[3:]))
        wanted.append(want)
    for name, want, seen in zip(CASES, wanted, ask(lines)["parsed"], strict=True):
        assert isinstance(seen, dict), f"{name}: {seen}"
        assert {key: seen[key] for key in want} == want, name


def test_what_we_own_exists() -> None:
    spellings = {word.removeprefix("--").replace("-", "_") for words in options().values() for word in words}
    assert not set(OWNED) - spellings


def test_second_names_are_sglangs() -> None:
    by_spelling = {word: name for name, words in options().items() for word in words}
    for alias, name in ALIASES.items():
        word = "--" + alias.replace("_", "-")
        # A shortened option is no alias: SGLang may accept it, as argparse does, while it is the only one.
        assert by_spelling.get(word, name) == name
        assert name in options()


def test_no_spelling_of_an_owned_option_gets_through() -> None:
    for name, words in options().items():
        if name in OWNED:
            for word in words:
                assert owned_reason(word), f"{word} sets {name}"


def test_nothing_else_is_refused() -> None:
    names = {canonical(word) for words in options().values() for word in words if word.startswith("--")}
    refused = {name for name in names if owned_reason(name)}
    assert refused <= set(OWNED), "a whole option that looks like a shortened one"


def test_sglang_does_read_shortened_options() -> None:
    (seen,) = ask([["--model-path", "m", "--dist-init", "h:1"]])["parsed"]
    assert isinstance(seen, dict)
    assert seen["dist_init_addr"] == "h:1", "why shortened owned options are refused"


def test_options_that_name_an_address_are_known_to_us() -> None:
    words = {"port", "ports", "addr", "url", "urls", "host", "endpoint", "endpoints"}
    found = {option for option in options() if words & set(option.split("_"))}
    assert not found - set(OWNED) - PASSED_THROUGH, "a new one: does it belong to the plan?"


# ---- 0.5.12.post1, which is not installed: its options are on record -------------------------------------------------

OLDER = json.loads(Path(__file__).with_name("options-0.5.12.post1.json").read_text(encoding="utf-8"))
TYPES: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "human_readable_int": int}
FLAGS = ("store_true", "DeprecatedStoreTrueAction")


def older_parser() -> argparse.ArgumentParser:
    """A parser with the options of 0.5.12.post1: their spellings, kinds of values and choices."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for option in OLDER:
        if option.get("action") in FLAGS:
            parser.add_argument(*option["names"], action="store_true")
        else:
            known = {key: option[key] for key in ("dest", "nargs", "choices", "const") if key in option}
            parser.add_argument(*option["names"], type=TYPES.get(option.get("type", ""), str), **known)
    return parser


def test_every_planned_command_line_is_understood_by_the_older_version_too(tmp_path: Path) -> None:
    parser = older_parser()
    only_newer = {"cuda_graph_bs_decode": "cuda_graph_bs"}
    for name, make in CASES.items():
        changes, want = make(tmp_path)
        given = {only_newer.get(key, key): value for key, value in changes.pop("engine_args", {}).items()}
        line = build(spec(tmp_path, engine_args=given, **changes), {}).argv[3:]
        seen = {canonical(full): value for full, value in vars(parser.parse_args(line)).items()}
        wanted = {only_newer.get(key, key): value for key, value in want.items()}
        assert {key: seen[key] for key in wanted} == wanted, name


def test_no_option_of_the_older_version_gets_round_what_we_own() -> None:
    names = {canonical(word) for option in OLDER for word in option["names"]}
    refused = {name for name in names if owned_reason(name)}
    assert refused <= set(OWNED)
    emitted = {"host", "port", "nccl_port", "dist_init_addr", "nnodes", "node_rank", "config", "enable_memory_saver"}
    assert emitted | {"api_key", "admin_api_key", "enable_weights_cpu_backup", "disaggregation_mode"} <= names
    words = {"port", "ports", "addr", "url", "urls", "host", "endpoint", "endpoints"}
    found = {option for option in names if words & set(option.split("_"))}
    assert found - set(OWNED) <= PASSED_THROUGH, "an address that only the older version knows"
