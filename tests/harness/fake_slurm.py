"""Slurm commands that are small scripts in a folder: enough of Slurm to launch a run end to end without it.

fake = FakeSlurm(tmp_path / "slurm")
subprocess.run(["relax-slurm", "launch", …], env=os.environ | fake.env)
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.harness import fake_slurm_program

COMMANDS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


class FakeSlurm:
    """The commands' folder and what they remember. Nodes `fake1` … `fake6` with 8 GPUs each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.state = folder / "state"
        self.bin.mkdir(parents=True)
        self.state.mkdir()
        for name in COMMANDS:
            words = [sys.executable, "-I", "-S", fake_slurm_program.__file__, name, str(self.state)]
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
            script.chmod(0o755)

    @property
    def env(self) -> dict[str, str]:
        """This process's environment without any Slurm variable, with the commands first on the PATH."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
        return env | {"PATH": f"{self.bin}{os.pathsep}{env.get('PATH', '')}"}

    def lie(self, node: str, **variables: str) -> None:
        """Make the tasks on a node see these variables instead of the true ones."""
        path = self.state / "lies.json"
        lies = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(lies | {node: variables}))

    def run(self, *words: str | Path) -> str:
        """One of the commands, as a user calls it; its output."""
        done = subprocess.run(words, env=self.env, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout

    def jobs(self) -> list[dict[str, Any]]:
        """All jobs, oldest first."""
        found = [json.loads(path.read_text()) for path in self.state.glob("job-*.json")]
        return sorted(found, key=lambda job: job["ids"][0])

    def steps(self) -> list[tuple[str, str]]:
        """Name and node of every step that runs."""
        found = []
        for path in self.state.glob("step-*.json"):
            with contextlib.suppress(FileNotFoundError):
                step = json.loads(path.read_text())
                found.append((step["name"], step["node"]))
        return sorted(found)
