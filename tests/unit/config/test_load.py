"""Files, layers and precedence; every mistake is one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_slurm.config.layers import CLUSTER_FILE, OUR_OWN, TOP_LEVEL_VARIABLES
from relax_slurm.config.load import from_resolved, load
from relax_slurm.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "cluster" not in path.name)
RUN = """\
name: run
placement: decoupled
pools:
  main: {nodes: 1, gpus_per_node: 2, partition: blue}
roles:
  rollout:
    pool: main
    models:
      policy: {model_path: p, gpus: 2, gpus_per_engine: 2, engine_args: {tp_size: 2}}
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def fault(path: Path | str, *flags: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, flags, environ or {})
    message = caught.value.message
    assert "\n" not in message
    assert len(message) < 700
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load_and_round_trip(path: Path) -> None:
    config = load(path, environ={})
    assert from_resolved(config.resolved_json()) == config
    assert path.read_text().count("\nname:") == 1, "the name stands at column 0"


def test_the_shipped_cluster_file_fits_every_shipped_config() -> None:
    cluster = str(ROOT / "configs" / "cluster-example.yaml")
    for path in CONFIGS:
        config = load(path, environ={"RELAX_CLUSTER_FILE": cluster})
        assert config.slurm.account == "my-project"
        assert config.cluster == cluster


def test_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(RUN.replace("name:", "nmae:", 1))
    message = fault(path)
    assert message.startswith(f"{path}:nmae: unknown key 'nmae' at the top level; did you mean 'name'?")


def test_nested_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(RUN.replace("gpus_per_node", "gpu_per_node"))
    assert f"{path}:pools.main.gpu_per_node: unknown key 'gpu_per_node' in pools.main" in fault(path)
    assert "did you mean 'gpus_per_node'?" in fault(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "the file is empty"),
        (b"# only a comment\n", "the file is empty"),
        (b"a: [1\n", "not YAML"),
        (b"\x00\x01", "not text"),
        (b"\xff\xfe\xfa", "not text"),
        (b"- a\n", "holds a list"),
        (b"just text", "holds the single value"),
        (b"a: 1\na: 2\n", "already on line 1"),
        (b"1: x\n", "put it in quotes"),
        (b"a: *nope\n", "undefined alias"),
        (b"a: !!python/object:os.system x\n", "tags such as"),
        (b"a: !!binary aGk=\n", "tags such as"),
        (b"a: &a [*a]\n", "recursive"),
        (b"a: 1\n---\nb: 2\n", "single document"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: " + b"[" * 40 + b"]" * 40, "nested too deeply"),
        (b"x" * 300_000, "larger than"),
        (b"<<: {name: x}\n", "unknown key '<<'"),
    ],
    ids=lambda value: value[:12].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_bad_files(tmp_path: Path, text: bytes, words: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(text)
    message = fault(path)
    assert words in message
    assert message.startswith(str(path))


def test_an_alias_may_not_multiply_a_file(tmp_path: Path) -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x]"]
    lines += [f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 8)}]" for level in range(1, 12)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    assert "once aliases are followed" in fault(path)


def test_missing_folder_device_and_unreadable(tmp_path: Path) -> None:
    assert "no such file" in fault(tmp_path / "nope.yaml")
    assert "this is a folder" in fault(tmp_path)
    assert "device or socket" in fault("/dev/zero")
    assert "cannot be read" in fault("a\0b")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_no_bytes_crash_the_reader(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_bytes(raw)
    assert fault(path)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="ab:{}[]&*!#-?|>%@`'\",\n 01.~<", max_size=60))
def test_no_text_crashes_the_reader(tmp_path: Path, text: str) -> None:
    path = tmp_path / "fuzz.yaml"
    path.write_text(text)
    assert fault(path)


def test_values_that_look_like_something_else_stay_text(run_file: Path) -> None:
    assert load(run_file, ["slurm.time=1:00:00"], {}).slurm.time == "1:00:00"
    assert load(run_file, ["slurm.account=no"], {}).slurm.account == "no"
    assert load(run_file, ["slurm.account=0123"], {}).slurm.account == "0123"
    assert load(run_file, ["slurm.account=2024-01-01"], {}).slurm.account == "2024-01-01"
    assert load(run_file, ["control.beat_seconds=1e-1"], {}).control.beat_seconds == 0.1


def test_precedence(run_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "site-cluster.yaml"
    cluster.write_text("slurm: {partition: low, account: acc, qos: q}\n")
    run_file.write_text(RUN + "cluster: site-cluster.yaml\nslurm: {partition: mid, qos: r}\n")
    environ = {"RELAX_SLURM__PARTITION": "high", "RELAX_RUNS_ROOT": "/r", "RELAX_OTHER__THING": "x"}
    config = load(run_file, ["slurm.partition=top"], environ)
    assert (config.slurm.partition, config.slurm.qos, config.slurm.account) == ("top", "r", "acc")
    assert config.runs_root == "/r"
    assert load(run_file, (), environ).slurm.partition == "high"
    assert load(run_file, (), {}).slurm.partition == "mid"


def test_the_stronger_cluster_file_wins(run_file: Path, tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        (tmp_path / name).write_text(f"slurm: {{account: {name}}}\n")
    run_file.write_text(RUN + "cluster: one\n")
    environ = {"RELAX_CLUSTER_FILE": str(tmp_path / "two")}
    assert load(run_file, (), {}).slurm.account == "one"
    assert load(run_file, (), environ).slurm.account == "two"
    assert load(run_file, [f"cluster={tmp_path / 'three'}"], environ).slurm.account == "three"


def test_a_cluster_file_describes_the_site_only(run_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    environ = {"RELAX_CLUSTER_FILE": str(cluster)}
    assert "no such file" in fault(run_file, environ=environ)
    cluster.write_text("name: x\n")
    assert "belongs in a run file" in fault(run_file, environ=environ)
    cluster.write_text("slrum: {}\n")
    assert "did you mean 'slurm'?" in fault(run_file, environ=environ)
    cluster.write_text("slurm: {partition: a b}\n")
    assert fault(run_file, environ=environ).startswith(f"{cluster}:slurm.partition: 'a b'")


def test_errors_name_their_source(run_file: Path) -> None:
    assert fault(run_file, "slurm.tiem=1").startswith("--set:slurm.tiem: unknown key 'tiem' in slurm")
    message = fault(run_file, environ={"RELAX_SLURM__PARTITION": "a b"})
    assert message.startswith("$RELAX_SLURM__PARTITION:slurm.partition: 'a b' contains a space")


@pytest.mark.parametrize("flag", ["foo", "=1", "a..b=1", ".a=1", "a.=1", "name.x=1", 'a."b=1', "a=[1"])
def test_bad_flags(run_file: Path, flag: str) -> None:
    assert fault(run_file, flag).startswith("--set")


def test_names_with_dots_are_quoted(run_file: Path) -> None:
    run_file.write_text(RUN.replace("policy:", "qwen2.5:"))
    config = load(run_file, ['roles.rollout.models."qwen2.5".gpus=4'], {})
    assert config.roles["rollout"].models["qwen2.5"].gpus == 4
    message = fault(run_file, 'roles.rollout.models."qwen2.5".gpsu=4')
    assert '--set:roles.rollout.models."qwen2.5".gpsu' in message


def test_a_differently_spelt_engine_argument_replaces_the_weaker_one(run_file: Path) -> None:
    config = load(run_file, ["roles.rollout.models.policy.engine_args.--tp-size=1"], {})
    assert config.roles["rollout"].models["policy"].engine_args == {"tp_size": 1}


def test_null_replaces_a_section(run_file: Path) -> None:
    run_file.write_text(RUN + "head: {cpus: 4}\n")
    assert load(run_file, ["head=null"], {}).head is None
    head = load(run_file, ["head.cpus=8"], {}).head
    assert head is not None
    assert head.cpus == 8


def test_a_pipe_can_be_read(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, RUN.encode())
    os.close(writer)
    try:
        assert load(f"/dev/fd/{reader}", (), {}).name == "run"
    finally:
        os.close(reader)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"name": "x"}', "[" * 100_000])
def test_damaged_resolved_configs(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^config\.json"):
        from_resolved(text)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("RELAX_RUN_ROOT", "RELAX_RUNS_ROOT"),
        ("RELAX_RUNS_ROOTS", "RELAX_RUNS_ROOT"),
        ("RELAX_CLUSTER", "RELAX_CLUSTER_FILE"),
        ("RELAX_CLUSTERFILE", "RELAX_CLUSTER_FILE"),
        ("RELAX_JOBSHAPE", "RELAX_JOB_SHAPE"),
        ("RELAX_SLRUM__PARTITION", "RELAX_SLURM__…"),
        ("RELAX_GATWAY__PORT", "RELAX_GATEWAY__…"),
        ("RELAX_SLURM_PARTITION", "RELAX_SLURM__PARTITION"),
        ("RELAX_ENGINE_STARTUP_SECONDS", "RELAX_ENGINE__STARTUP_SECONDS"),
    ],
)
def test_a_misspelt_variable_is_refused_with_a_hint(run_file: Path, variable: str, meant: str) -> None:
    message = fault(run_file, environ={variable: "x"})
    assert message.startswith(f"${variable}: no such setting")
    assert f"did you mean {meant}" in message


def test_what_the_tool_sets_itself_and_what_is_foreign_is_left_alone(run_file: Path) -> None:
    names = {*OUR_OWN, "RELAX_TEST_SGLANG_PYTHON", "RELAX_OTHER__THING", "RELAX_HOME", "RELAX_RUN_DIR", "RELAX_DEBUG"}
    assert load(run_file, environ=dict.fromkeys(names, "x")) == load(run_file, environ={})


def test_every_variable_that_the_tool_sets_is_known() -> None:
    known = {*OUR_OWN, *TOP_LEVEL_VARIABLES, CLUSTER_FILE}
    for package in ("relax_slurm", "sidecars"):
        for path in (ROOT / package).rglob("*.py"):
            found = set(re.findall(r"[\"'](RELAX_[A-Z]+(?:_[A-Z]+)*)[\"']", path.read_text()))
            assert found <= known, path


def test_a_cluster_file_is_told_apart_from_a_run_file() -> None:
    with pytest.raises(ConfigError, match=r"this is a cluster file \(it has only .*a run file has name, placement"):
        load(ROOT / "configs" / "cluster-example.yaml", environ={})
