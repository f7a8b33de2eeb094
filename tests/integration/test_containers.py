"""Engines in a container and everything else on the host, with stand-ins for the runtimes."""

from __future__ import annotations

import os
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launch import Site
from tests.harness.sites import FAKE, LOCAL, NewRun, small

APPTAINER = r"""#!/bin/bash
# apptainer exec [--nv] [--bind A:B]... IMAGE COMMAND...: says what it was asked and becomes the command.
printf '%s\n' "$*" >> "$APPTAINER_ASKED"
shift
while [[ $1 == -* ]]; do [[ $1 == --bind ]] && shift; shift; done
[[ $1 == /images/sglang.sif ]] || { echo "no image $1" >&2; exit 255; }
shift
exec "$@"
"""


@pytest.mark.parametrize("site", [LOCAL], indirect=True)
def test_engines_run_in_apptainer_and_end_with_the_run(
    new: NewRun, site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    asked = tmp_path / "asked"
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("APPTAINER_ASKED", str(asked))
    image: dict[str, Any] = {
        "runtime": "apptainer",
        "image": "/images/sglang.sif",
        "python": sys.executable,
        "mounts": ["/m:/models:ro"],
    }
    run = new(small(engine={"container": image}))
    run.up()
    answer = run.http().post("/rollout/generate", json={"text": "1", "sampling_params": {"max_new_tokens": 2}})
    assert answer.status_code == 200
    lines = asked.read_text().splitlines()
    assert len(lines) == 4, "two policy engines, a judge, a teacher"
    folder = run.run_dir.path
    for line in lines:
        binds = f"--bind {folder}:{folder} --bind /m:/models:ro"
        assert line.startswith(f"exec --nv {binds} /images/sglang.sif {sys.executable} -m sidecars.sim ")
    tokens = [path.read_text().strip() for path in (folder / "keys").glob("*token*")]
    assert not [token for token in tokens if token in asked.read_text()], "keys never stand in a command line"
    assert run.call("stop").rc == 0
    run.nothing_left()


@pytest.mark.parametrize("site", [FAKE], indirect=True)
def test_pyxis_puts_the_nodes_step_into_the_image(new: NewRun, site: Any) -> None:
    image: dict[str, Any] = {"runtime": "pyxis", "image": "/images/sglang.sqsh", "python": sys.executable}
    image |= {"mounts": ["/m:/models:ro"]}
    run = new(small(engine={"container": image}, slurm={"extra_srun": ["--no-container-mount-home"]}))
    run.up()
    steps = [shlex.split(line) for line in (site.slurm.state / "srun.log").read_text().splitlines()]
    mine = [words for words in steps if str(run.run_dir.path) in words]
    assert len(mine) == 2, "one step per node"
    folder = run.run_dir.path
    for words in mine:
        assert "--container-image=/images/sglang.sqsh" in words
        assert f"--container-mounts={folder}:{folder},/m:/models:ro" in words
        assert "--no-container-mount-home" in words
        assert words[words.index(sys.executable) :][:3] == [sys.executable, "-m", "sidecars.node"]
    assert run.call("stop").rc == 0
    run.nothing_left()
