from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from relax_slurm.config.models import RunConfig
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan, Mode, PortWindow
from relax_slurm.errors import ConfigError, PlanRefused
from relax_slurm.slurm.script import ScriptPaths, comment, render

GOLDEN = Path(__file__).parent / "golden"
HEAD = ComponentPlan(0, "head", 1, 0, partition="cpu", cpus_per_node=2, mem="8G")
POLICY = ComponentPlan(1, "policy", 2, 8, "h100", cpus_per_node=96, mem="900G")
JUDGE = ComponentPlan(2, "judge", 1, 4, None, partition="small")
PATHS = ScriptPaths(
    command=("/opt/my env/bin/python", "-m", "relax_slurm", "supervise", "/runs/it's/attempt_1"),
    log=Path("/runs/it's 100%/attempt_1/logs/batch.log"),
    tag="relax-demo-1-0f3a",
)


def plan_of(*components: ComponentPlan, shape: str = "het") -> InferencePlacementPlan:
    return InferencePlacementPlan(
        version=1,
        run="demo",
        mode=Mode.DECOUPLED,
        job_shape=shape,
        head_component=None,
        components=components,
        pools=(),
        roles=(),
        training=None,
        ports=PortWindow(20_000, 20_100, 10),
        engine="sim",
    )


def config_of(name: str = "demo", **slurm: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": name,
            "placement": "decoupled",
            "pools": {"p": {"nodes": 1, "gpus_per_node": 1}},
            "roles": {"rollout": {"pool": "p", "models": {"m": {"model_path": "x", "gpus": 1}}}},
            "slurm": slurm,
        }
    )


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_het_job_is_the_golden_script() -> None:
    config = config_of(
        partition="gpu",
        account="rl",
        qos="high",
        constraint="ib&nvme",
        reservation="maint",
        time="1-02:00:00",
        comment="team-a",
        exclusive=True,
        requeue=False,
        signal_seconds=300,
        extra_sbatch=("--exclude=bad[1-2]", "--licenses=x:1", "--mail-user=a@b.c"),
        setup=("module load cuda/12", 'export NOTE="a # b"'),
    )
    text = render(plan_of(HEAD, POLICY, JUDGE), config, PATHS)
    assert text == (GOLDEN / "het.sbatch").read_text()


def test_single_job_is_the_golden_script() -> None:
    text = render(
        plan_of(replace(POLICY, index=0), shape="single"),
        config_of(gpu_request="gres", time="60"),
        replace(PATHS, chdir=Path("/work dir")),
    )
    assert text == (GOLDEN / "single.sbatch").read_text()


def test_gpus_are_asked_for_one_way_only_and_never_for_a_cpu_component() -> None:
    for way, other in (("gres", "--gpus-per-node"), ("gpus-per-node", "--gres")):
        lines = directives(render(plan_of(HEAD, POLICY, JUDGE), config_of(gpu_request=way), PATHS))
        assert not [line for line in lines if line.startswith(other)]
        head = lines[: lines.index("hetjob")]
        assert not [line for line in head if "gpu" in line]
        assert len([line for line in lines if line.startswith(f"--{way}=")]) == 2


def test_exactly_one_separator_between_components_and_one_exec() -> None:
    text = render(plan_of(HEAD, POLICY, JUDGE), config_of(), PATHS)
    assert directives(text).count("hetjob") == 2
    assert text.count("hetjob") == 2
    assert len([line for line in text.splitlines() if line.startswith("exec ")]) == 1
    assert "$((" not in text
    assert "wckey" not in text


def test_options_of_the_whole_job_stand_in_the_first_component_only() -> None:
    extra = ("--licenses=x", "-L y", "--exclude=n1", "--dependency=afterok:1")
    lines = directives(render(plan_of(HEAD, POLICY), config_of(extra_sbatch=extra), PATHS))
    first, second = lines[: lines.index("hetjob")], lines[lines.index("hetjob") :]
    assert [line for line in extra if line in first] == list(extra)
    assert [line for line in extra if line in second] == ["--exclude=n1"]
    assert [line for line in second if line.startswith(("--output", "--job-name", "--signal"))] == []


def test_comment_carries_the_mark() -> None:
    assert comment(config_of(), "tag") == "tag"
    assert comment(config_of(comment="mine"), "tag") == "mine,tag"


@pytest.mark.parametrize(
    ("paths", "word"),
    [
        (replace(PATHS, log=Path("/data/exp-hetjob/log/x.log")), "hetjob"),
        (replace(PATHS, log=Path("/data/HetJob/x.log")), "hetjob"),
        (replace(PATHS, log=Path("/data/a#b/x.log")), "#"),
        (replace(PATHS, log=Path("/data/a\nb/x.log")), "line break"),
        (replace(PATHS, log=Path('/data/a"b/x.log')), "double quote"),
        (replace(PATHS, log=Path("/data/a\\b/x.log")), "backslash"),
        (replace(PATHS, chdir=Path("/x/hetjob")), "hetjob"),
        (replace(PATHS, tag="a\nb"), "control character"),
    ],
)
def test_paths_that_sbatch_would_cut_are_refused(paths: ScriptPaths, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        render(plan_of(HEAD), config_of(), paths)


@pytest.mark.parametrize("field", ["gpu_type", "partition", "mem"])
@pytest.mark.parametrize("value", ["a-hetjob", "a#b", "a\nb", 'a"b'])
def test_component_values_that_sbatch_would_cut_are_refused(field: str, value: str) -> None:
    bad = replace(POLICY, **{field: value})
    with pytest.raises(ConfigError) as caught:
        render(plan_of(HEAD, bad), config_of(), PATHS)
    assert field in caught.value.message
    assert "component 1 (policy)" in caught.value.message
    assert repr(value) in caught.value.message


@pytest.mark.parametrize("key", ["partition", "account", "qos", "constraint", "reservation", "comment"])
@pytest.mark.parametrize("value", ["a hetjob b", "a#", "a\nb", "a b"])
def test_the_run_file_refuses_them_already(key: str, value: str) -> None:
    with pytest.raises(ValidationError):
        config_of(**{key: value})


def test_values_that_came_in_unvalidated_are_refused_too() -> None:
    config = config_of()
    slurm = config.slurm.model_copy(update={"account": "x\n#SBATCH --gres=gpu:8"})
    with pytest.raises(ConfigError, match=r"slurm\.account"):
        render(plan_of(HEAD), config.model_copy(update={"slurm": slurm}), PATHS)
    slurm = config.slurm.model_copy(update={"extra_sbatch": ("--mail-user=hetjob@x",)})
    with pytest.raises(ConfigError, match=r"slurm\.extra_sbatch"):
        render(plan_of(HEAD), config.model_copy(update={"slurm": slurm}), PATHS)


@pytest.mark.parametrize("line", ["#SBATCH --nodes=3", "  #SBATCH -N3", "#PBS -l x", "#BSUB -n 2"])
def test_setup_lines_are_no_back_door_for_options(line: str) -> None:
    with pytest.raises(ConfigError, match=r"slurm\.setup"):
        render(plan_of(HEAD), config_of(setup=(line,)), PATHS)


def test_a_single_job_with_several_components_is_refused() -> None:
    with pytest.raises(PlanRefused, match="2 components"):
        render(plan_of(HEAD, POLICY, shape="single"), config_of(), PATHS)


def test_a_template_of_ones_own(tmp_path: Path) -> None:
    template = tmp_path / "my template.sh"
    template.write_text('#!/bin/sh\n{{directives}}\necho "${A[@]}" "$@" {x,{y,z}}\n{{command}}\n')
    text = render(plan_of(HEAD), config_of(template=str(template)), PATHS)
    assert text.startswith("#!/bin/sh\n#SBATCH --job-name=demo\n")
    assert 'echo "${A[@]}" "$@" {x,{y,z}}\n\'/opt/my env/bin/python\'' in text


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"{{directives}}\n{{command}}\n", "#!"),
        (b"#!/bin/sh\n{{command}}\n", "directives"),
        (b"#!/bin/sh\n{{directives}}\n", "command"),
        (b"#!/bin/sh\n{{directives}}{{directives}}{{command}}\n", "2 times"),
        (b"#!/bin/sh\n{{directives}}{{command}}{{nodes}}\n", "nodes"),
        (b"#!/bin/sh\r\n{{directives}}\r\n{{command}}\r\n", "Windows"),
        (b"#!/bin/sh\n\xff\xfe", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_templates_that_cannot_work(tmp_path: Path, content: bytes | None, word: str) -> None:
    template = tmp_path / "t.sh"
    if content is not None:
        template.write_bytes(content)
    with pytest.raises(ConfigError, match=word):
        render(plan_of(HEAD), config_of(template=str(template)), PATHS)


def test_modules_venv_and_setup_come_in_this_order_and_a_missing_module_ends_the_job() -> None:
    config = config_of(modules=("cuda/12.4", "openmpi"), venv="/data/my env", setup=("export A=1",))
    lines = render(plan_of(HEAD), config, PATHS).splitlines()
    wanted = [
        "type module >/dev/null 2>&1 || . /etc/profile",
        "module load cuda/12.4 || exit 6",
        "module load openmpi || exit 6",
        ". '/data/my env'/bin/activate || exit 6",
        "export A=1",
    ]
    at = lines.index(wanted[0])
    assert lines[at : at + 5] == wanted
    assert at < next(number for number, line in enumerate(lines) if line.startswith("exec "))
