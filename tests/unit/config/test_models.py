"""Sections: what they accept, what they refuse, and that they survive being written and read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_slurm.config.base import directive_fault
from relax_slurm.config.load import from_mapping, from_resolved
from relax_slurm.config.models import RunConfig
from relax_slurm.config.options import SBATCH, SRUN, owned
from relax_slurm.errors import ConfigError


def run(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": "run",
        "placement": "decoupled",
        "pools": {"main": {"nodes": 1, "gpus_per_node": 2}},
        "roles": {"rollout": {"pool": "main", "models": {"policy": {"model_path": "p", "gpus": 2}}}},
    }
    return {**base, **changes}


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_mapping(run(**changes), "run.yaml")
    assert "\n" not in caught.value.message
    assert "Traceback" not in caught.value.message
    return caught.value.message


def test_defaults_are_filled_in_and_survive_json() -> None:
    config = from_mapping(run())
    assert config.control.silence_seconds == 10
    assert config.gateway.token is True
    assert from_resolved(config.resolved_json()) == config


def test_config_is_frozen() -> None:
    config = from_mapping(run())
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"


@pytest.mark.parametrize("name", ["a b", "", "x" * 49, "é", "a/b", "-a", ".hidden", "a\n", "exp-hetjob", "x-PackJob"])
def test_names_that_would_break_a_script_or_a_path_are_refused(name: str) -> None:
    assert "run.yaml:name" in refusal(name=name)


def test_hetjob_is_named_in_the_refusal() -> None:
    assert "contains the word 'hetjob'" in refusal(name="exp-hetjob")


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint", "reservation", "comment"])
@pytest.mark.parametrize("value", ["a b", "a#b", "a\nb", "hetjob", "", "a\x1bb"])
def test_directive_values_that_sbatch_would_cut_are_refused(key: str, value: str) -> None:
    assert f"run.yaml:slurm.{key}" in refusal(slurm={key: value})


@given(st.text(max_size=20))
def test_what_is_accepted_as_a_directive_is_one_printable_word(value: str) -> None:
    if directive_fault(value) is None:
        assert value.split() == [value]
        assert "#" not in value
        assert "hetjob" not in value.lower()
        assert value.isprintable()


@pytest.mark.parametrize("value", ["60", 60, "1:00", "1:00:00", "2-0", "2-12:30", "2-12:30:00"])
def test_slurm_times(value: Any) -> None:
    assert from_mapping(run(slurm={"time": value})).slurm.time == str(value)


@pytest.mark.parametrize("value", ["", "soon", "1h", "-1", "1:2:3:4", True, 1.5])
def test_other_times_are_refused(value: Any) -> None:
    assert "run.yaml:slurm.time" in refusal(slurm={"time": value})


@pytest.mark.parametrize(
    "line", ["--gres=gpu:8", "--gpus-per-node=8", "-N4", "--nodes 3", "--wrap=x", "-Jx", "-p main"]
)
def test_sbatch_options_of_the_tool_are_refused(line: str) -> None:
    assert "which the tool writes itself" in refusal(slurm={"extra_sbatch": [line]})


@pytest.mark.parametrize(
    "line",
    [
        *("--mail-type=END", "--nice 100", "--gres=nvme:1", "--licenses=a:1", "--exclude=n[1-2]", "--mem-per-cpu=1G"),
        *("--time-min=10", "--nodelist=n1", "--no-kill", "--export=ALL", "-H", "--gres-flags=enforce-binding"),
    ],
)
def test_other_sbatch_options_are_kept(line: str) -> None:
    assert from_mapping(run(slurm={"extra_sbatch": [line]})).slurm.extra_sbatch == (line,)


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--job-na=x", "--job-name"),
        ("--outp=x", "--output"),
        ("--gr=gpu:8", "--gres"),
        ("--gpus-per-n 8", "--gpus-per-node"),
        ("--mail-type=END --job-name=x", "--job-name"),
        ("-QW", "-W"),
        ("-HJx", "-J"),
        ("--test-only", "--test-only"),
        ("--test", "--test-only"),
        ("--wait", "--wait"),
        ("--gpus-per-task=1", "--gpus-per-task"),
        ("--wrap=true", "--wrap"),
        ("--pars", "--parsable"),
        ("--chdir=/", "--chdir"),
        ("--version", "--version"),
    ],
)
def test_sbatch_options_are_known_however_they_are_spelt(line: str, option: str) -> None:
    assert f"sets {option}, which" in refusal(slurm={"extra_sbatch": [line]})


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("--nodes=2", "--nodes"),
        ("--ntas=2", "--ntasks"),
        ("-w n1", "-w"),
        ("-vn2", "-n"),
        ("--het-group=0", "--het-group"),
        ("--gpus-per-task=1", "--gpus-per-task"),
        ("--test-only", "--test-only"),
        ("--outp=/dev/null", "--output"),
        ("--export=NONE", "--export"),
        ("--pty", "--pty"),
        ("--cpu-bind=none --job-name=x", "--job-name"),
    ],
)
def test_srun_options_that_change_the_step_are_refused(line: str, option: str) -> None:
    assert f"sets {option}, which" in refusal(slurm={"extra_srun": [line]})


@pytest.mark.parametrize("line", ["--cpu-bind=none", "--mpi=pmix", "--mem=10G", "--label", "--propagate=NONE", "-K"])
def test_other_srun_options_are_kept(line: str) -> None:
    assert from_mapping(run(slurm={"extra_srun": [line]})).slurm.extra_srun == (line,)


@given(st.sampled_from(sorted(SBATCH.owned)), st.data())
def test_no_prefix_of_an_owned_option_gets_through(option: str, data: st.DataObject) -> None:
    if option.startswith("--"):
        name = option[: data.draw(st.integers(3, len(option)))]
        assert owned(f"{name}=gpu", SBATCH) is not None


@given(st.text(max_size=40))
def test_any_text_is_read(line: str) -> None:
    for program in (SBATCH, SRUN):
        found = owned(line, program)
        assert found is None or found[0] in program.owned


def test_an_option_must_look_like_one() -> None:
    assert "is not an option" in refusal(slurm={"extra_srun": ["mail"]})


@pytest.mark.parametrize(
    ("control", "words"),
    [
        ({"silence_seconds": 2}, "at least three beats (3 s)"),
        ({"operation_seconds": 20}, "make operation_seconds larger"),
        ({"bind_seconds": 5}, "make bind_seconds larger"),
        ({"beat_seconds": 0}, "greater than 0"),
    ],
)
def test_times_that_cannot_work_are_refused_with_the_numbers(control: dict[str, float], words: str) -> None:
    assert words in refusal(control=control)


def test_staleness_must_outlive_a_lost_heartbeat() -> None:
    assert "three of the coordinator's heartbeats" in refusal(gateway={"staleness_seconds": 2})


@pytest.mark.parametrize("value", ["a\0b", "a\nb", "a\rb"])
def test_text_for_a_command_line_is_plain(value: str) -> None:
    assert "NUL or a line break" in refusal(engine={"python": value})
    assert "NUL or a line break" in refusal(slurm={"template": value})


def test_the_runs_root_may_have_spaces_and_not_hetjob() -> None:
    assert from_mapping(run(runs_root="/data/my runs")).runs_root == "/data/my runs"
    assert "run.yaml:runs_root" in refusal(runs_root="/data/hetjobs")


def test_an_engine_must_have_time_to_start() -> None:
    assert "given up before it is up" in refusal(
        engine={"program": "sim", "startup_seconds": 1, "sim": {"startup_seconds": 5}}
    )


@pytest.mark.parametrize("key", ["CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "RELAX_RUN_TAG", "not a name"])
def test_engine_environment_keeps_off_what_the_tool_sets(key: str) -> None:
    assert "run.yaml:engine.env" in refusal(engine={"env": {key: "1"}})


def test_a_gateway_without_token_must_stay_on_loopback() -> None:
    assert "anybody on the cluster" in refusal(gateway={"token": False})
    assert "anybody on the cluster" in refusal(gateway={"token": False, "host": "0.0.0.0"})
    for host in ("127.0.0.1", "::1", "localhost"):
        assert from_mapping(run(gateway={"token": False, "host": host})).gateway.host == host


@pytest.mark.parametrize("ports", [{"first": 20000}, {"last": 20000}, {"first": 3, "last": 2}, {"first": 0, "last": 2}])
def test_port_windows_have_two_ends_in_order(ports: dict[str, int]) -> None:
    assert "run.yaml:ports" in refusal(ports=ports)


def test_simulator_settings_are_free_but_not_misspelt() -> None:
    config = from_mapping(run(engine={"program": "sim", "sim": {"wrong_rate": 0.1}}))
    assert config.engine.sim.model_extra == {"wrong_rate": 0.1}
    assert "misspelt 'tokens_per_second'" in refusal(engine={"sim": {"tokens_per_secnd": 1}})


def _roles(**model: Any) -> dict[str, Any]:
    return {"rollout": {"pool": "main", "models": {"policy": {"model_path": "p", **model}}}}


def test_external_urls_are_plain_and_alone() -> None:
    assert from_mapping(run(roles=_roles(external=["http://node:1"])))
    for url in ("node:1", "ftp://x", "http://u:p@x", "http://x?q=1", "http://[x", "http://x:0", "http://x:99999"):
        assert "bare http(s)://HOST" in refusal(roles=_roles(external=[url]))
        assert "bare http(s)://HOST" in refusal(roles=_roles(external=[{"url": url}]))
    both = {"url": "http://x", "api_key_env": "A", "api_key_file": "/a"}
    assert "keep one" in refusal(roles=_roles(external=[both]))
    assert "one URL twice" in refusal(roles=_roles(external=["http://x", "http://x/"]))
    assert "DIRECT" in refusal(roles=_roles(external=["http://x"], route_mode="SGLANG_ROUTER"))
    assert "model_path" in refusal(roles={"rollout": {"pool": "main", "models": {"policy": {"gpus": 1}}}})
    assert "no pool" in refusal(roles={"rollout": {"models": {"policy": {"model_path": "p", "gpus": 1}}}})
    external = {"policy": {"external": ["http://x"]}}
    assert "take none" in refusal(roles={"rollout": {"models": external, "gpus": 1}})
    assert from_mapping(run(roles={"rollout": {"models": external}}))
    assert "keep one" in refusal(roles=_roles(external=["http://x"], gpus=2))


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ({"default_model": "x"}, "routing.default_model: 'x'"),
        ({"aliases": {"old": "x"}}, "routing.aliases.old: 'x'"),
        ({"route_key_map": {"k": "x"}}, "routing.route_key_map.k: 'x'"),
        ({"aliases": {"policy": "policy"}}, "hides a model"),
        ({"aliases": {"": "policy"}}, "empty key"),
    ],
)
def test_routing_points_at_models_that_exist(routing: dict[str, Any], words: str) -> None:
    roles = _roles(gpus=2)
    roles["rollout"]["routing"] = routing
    assert words in refusal(roles=roles)


def test_judges_and_teachers_are_static() -> None:
    roles = {"genrm": {"pool": "main", "models": {"j": {"model_path": "p", "gpus": 2, "weight_source": "ACTOR"}}}}
    assert "must be STATIC" in refusal(roles=roles)


@pytest.mark.parametrize("key", ["pools", "roles"])
def test_empty_pools_and_roles_are_refused(key: str) -> None:
    assert "name at least one" in refusal(**{key: {}})


def test_a_wrong_role_name_gets_a_hint() -> None:
    message = refusal(roles={"rolout": {"pool": "main", "models": {}}})
    assert "run.yaml:roles.rolout" in message
    assert "did you mean 'rollout'?" in message


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("two", "an integer"), (2.5, "an integer"), (True, "an integer"), (0, "a number greater than or equal to 1")],
)
def test_types_are_not_converted(value: Any, wanted: str) -> None:
    message = refusal(pools={"main": {"nodes": value, "gpus_per_node": 2}})
    assert message.startswith("run.yaml:pools.main.nodes: seen ")
    assert wanted in message


def test_all_problems_are_in_the_detail() -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping(run(nmae="x", placement="defre", slurm={"tiem": 1}), "run.yaml")
    problems = caught.value.detail["problems"]
    assert len(problems) == 3
    assert caught.value.message.endswith("(and 2 more problems)")


def test_schema_has_no_key_without_a_default_but_the_four_needed() -> None:
    needed = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    assert needed == ["name", "placement", "pools", "roles"]


def routed(**router: Any) -> dict[str, Any]:
    model = {"model_path": "p", "gpus": 2, "route_mode": "SGLANG_ROUTER", "router": router}
    return {"rollout": {"pool": "main", "models": {"policy": model}}}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--port=1", "--port"),
        ("--po=1", "--port"),
        ("--policy=random", "router.policy"),
        ("--prometheus-port=29000", "--prometheus-port"),
        ("--retry-max-retries=3", "stay off"),
        ("--cb-failure-threshold=3", "stay off"),
        ("--api-key=x", "engine key"),
        ("policy random", "not an option"),
    ],
)
def test_router_options_that_the_tool_writes_are_refused(line: str, words: str) -> None:
    assert words in refusal(roles=routed(extra_args=[line]))


def test_router_settings_need_a_router() -> None:
    made = from_mapping(run(roles=routed(policy="manual", extra_args=["--cache-threshold=0.5"])))
    assert made.roles["rollout"].models["policy"].router.policy == "manual"
    roles = routed(policy="manual")
    del roles["rollout"]["models"]["policy"]["route_mode"]
    assert "no router" in refusal(roles=roles)
