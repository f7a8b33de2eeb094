"""A real Slurm of N nodes on this machine: own munge key, slurmctld, N slurmd on 127.0.0.1, fake GPUs.

    with SlurmCluster(4) as cluster:
        print(cluster.run("sinfo").out)

By hand (the last line of `up` is what a shell needs):

    python -m tests.harness.slurm_cluster up 4 --base /tmp/slurm
    export SLURM_CONF=/tmp/slurm/etc/slurm.conf
    python -m tests.harness.slurm_cluster down --base /tmp/slurm

Everything lives in one folder. Daemons run in the foreground of their own session, are remembered by pid and
start time, and are ended by exactly that. Several clusters may run at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from tests.harness.slurm_conf import ClusterSpec, cgroup_conf, gpu_links, gres_conf, slurm_conf
from tests.harness.slurm_host import free_ports, missing_programs, port_lock, remove_cgroups, slurm_version
from tests.harness.slurm_proc import Proc, end, processes, wait_gone

JOB_END_SECONDS = 1.5
"""How long jobs may take to end when the cluster goes down."""
MAX_SOCKET_PATH = 107
"""Longest path of a unix socket on Linux, in bytes."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did."""

    rc: int
    out: str
    err: str


class ClusterFailed(RuntimeError):
    """The cluster did not come up (or go down); the message holds the end of the daemons' logs."""


class SlurmCluster:
    """Context manager around a cluster; see the module's docstring. `base` must be short (unix socket inside)."""

    def __init__(
        self,
        nodes: int = 4,
        *,
        gpus: int = 8,
        cpus: int = 8,
        memory_mb: int = 16_000,
        gpu_type: str | None = "h100",
        base: Path | None = None,
        extra: Sequence[str] = (),
        task_prolog: str | None = None,
        proctrack: str = "proctrack/linuxproc",
        node_prefix: str | None = None,
        slurmd_timeout: int = 10,
        min_job_age: int = 300,
        kill_wait: int = 5,
    ) -> None:
        self._own_base = base is None
        self.base = Path(tempfile.mkdtemp(prefix="slurm-")) if base is None else base.absolute()
        # cgroup folders are named after the node and shared by the whole machine, so these names must differ.
        default_prefix = f"n{os.getpid()}x" if proctrack.endswith("cgroup") else "node"
        self._task_prolog = task_prolog
        self._wanted = nodes
        self.spec = ClusterSpec(
            base=self.base,
            hostname=socket.gethostname(),
            user=pwd.getpwuid(os.getuid()).pw_name,
            ctld_port=0,
            node_ports=(0,) * nodes,
            gpus=gpus,
            cpus=cpus,
            memory_mb=memory_mb,
            gpu_type=gpu_type,
            node_prefix=node_prefix or default_prefix,
            proctrack=proctrack,
            slurmd_timeout=slurmd_timeout,
            min_job_age=min_job_age,
            kill_wait=kill_wait,
            task_prolog=None if task_prolog is None else self.base / "etc" / "task_prolog",
            extra=tuple(extra),
        )
        self._daemons: dict[str, Proc] = {}

    # ------------------------------------------------------------------ facts

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names."""
        return self.spec.nodes

    @property
    def conf(self) -> Path:
        """Path of slurm.conf."""
        return self.spec.conf

    @property
    def env(self) -> dict[str, str]:
        """Environment for a client: this process's without any Slurm variable, plus SLURM_CONF."""
        env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "SBATCH"))}
        env["PATH"] = os.pathsep.join([env.get("PATH", ""), "/usr/sbin", "/sbin"])
        env["SLURM_CONF"] = str(self.conf)
        return env

    def run(
        self, *argv: str | Path, seconds: float = 20.0, check: bool = True, env: dict[str, str] | None = None
    ) -> Ran:
        """Run a command against the cluster; a non-zero exit is an error unless `check=False`."""
        done = subprocess.run(
            [str(word) for word in argv],
            env=self.env | (env or {}),
            cwd=self.base,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        if check and done.returncode != 0:
            raise ClusterFailed(f"{argv} ended with {done.returncode}: {done.stderr.strip()}")
        return Ran(done.returncode, done.stdout, done.stderr)

    def wait_jobs_gone(self, seconds: float = 20.0) -> None:
        """Wait until squeue shows no job that is pending, running or completing."""
        deadline = time.monotonic() + seconds
        while self.run("squeue", "-h", "-o", "%i").out.strip():
            if time.monotonic() > deadline:
                raise ClusterFailed(f"jobs are still there: {self.run('squeue').out}")
            time.sleep(0.05)

    def job_processes(self) -> list[Proc]:
        """Living processes of this cluster's jobs: step daemons, and whatever has a job's environment."""
        found = []
        for proc in processes():
            env = proc.environ()
            if env.get("SLURM_CONF") == str(self.conf) and ("SLURM_JOB_ID" in env or proc.comm() == "slurmstepd"):
                found.append(proc)
        return found

    # ------------------------------------------------------------------ up and down

    def __enter__(self) -> SlurmCluster:
        try:
            self.up()
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self, seconds: float = 20.0) -> None:
        """Write the files, start the daemons, wait until every node is idle."""
        lacking = missing_programs()
        if lacking:
            raise ClusterFailed(f"Slurm programs are missing: {', '.join(lacking)}; install slurm-wlm and munge")
        if len(os.fsencode(self.spec.munge_socket)) > MAX_SOCKET_PATH:
            raise ClusterFailed(f"{self.base} is too long a path for a unix socket; choose a shorter base")
        with port_lock():
            ports = free_ports(1 + len(self.spec.node_ports))
            self.spec = replace(self.spec, ctld_port=ports[0], node_ports=tuple(ports[1:]))
            self._write()
            run = self.base / "run"
            self._start(
                "munged",
                "munged",
                "--foreground",
                "--force",
                f"--key-file={self.base}/munge/munge.key",
                f"--socket={self.spec.munge_socket}",
                f"--pid-file={run}/munged.pid",
                f"--log-file={self.base}/munge/munged.log",
                f"--seed-file={self.base}/munge/munged.seed",
                "--num-threads=2",
            )
            self._until(self.spec.munge_socket.exists, seconds, "munged")
            self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))
            for name in self.nodes:
                self.start_node(name)
            self._until(self._all_idle, seconds, "nodes are not idle")

    def start_node(self, name: str) -> None:
        """Start the slurmd of one node."""
        self._start(f"slurmd.{name}", "slurmd", "-D", "-f", str(self.conf), "-N", name)

    def kill_node(self, name: str, sig: int) -> None:
        """Signal the slurmd of one node; its tasks live on."""
        self._daemons[f"slurmd.{name}"].send(sig)

    def start_controller(self) -> None:
        """Start slurmctld (again)."""
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.conf))

    def kill_controller(self, sig: int) -> None:
        """Signal slurmctld; steps go on."""
        self._daemons["slurmctld"].send(sig)

    def down(self) -> None:
        """End jobs, daemons and step daemons of this cluster; remove the folder if it was made here.

        Jobs get a moment to end by themselves, then whatever is left of them is killed: nothing may outlive the
        cluster, not even what Slurm itself cannot reach.
        """
        if "slurmctld" in self._daemons and self._daemons["slurmctld"].alive:
            with contextlib.suppress(subprocess.TimeoutExpired, ClusterFailed):
                self.run("scancel", f"--user={self.spec.user}", seconds=5, check=False)
        left = end(wait_gone(self.job_processes(), JOB_END_SECONDS), term_seconds=0.0)
        slurm = [proc for name, proc in self._daemons.items() if name != "munged"]
        left += end(slurm, term_seconds=3.0)
        left += end([proc for name, proc in self._daemons.items() if name == "munged"], term_seconds=2.0)
        left += end(self.job_processes(), term_seconds=0.0)
        self._daemons.clear()
        if self.spec.proctrack.endswith("cgroup"):
            remove_cgroups(self.nodes)
        if self._own_base:
            shutil.rmtree(self.base, ignore_errors=True)
        if left:
            raise ClusterFailed(f"could not end {[proc.pid for proc in left]}")

    # ------------------------------------------------------------------ by hand

    def save(self) -> None:
        """Remember the daemons in the folder, for a `down` by another process."""
        state = {
            "proctrack": self.spec.proctrack,
            "nodes": list(self.nodes),
            "kill_wait": self.spec.kill_wait,
            "prefix": self.spec.node_prefix,
            "daemons": {name: [proc.pid, proc.start] for name, proc in self._daemons.items()},
        }
        (self.base / "cluster.json").write_text(json.dumps(state), encoding="utf-8")

    @classmethod
    def saved(cls, base: Path) -> SlurmCluster:
        """The cluster that `save` described."""
        state = json.loads((base / "cluster.json").read_text(encoding="utf-8"))
        cluster = cls(
            len(state["nodes"]),
            base=base,
            proctrack=state["proctrack"],
            kill_wait=state["kill_wait"],
            node_prefix=state["prefix"],
        )
        cluster._daemons = {name: Proc(pid, start) for name, (pid, start) in state["daemons"].items()}
        return cluster

    # ------------------------------------------------------------------ inside

    def _write(self) -> None:
        for folder in (
            "etc",
            "log",
            "run",
            "state",
            "dev",
            "munge",
            *(f"spool/{name}" for name in self.nodes),
        ):
            (self.base / folder).mkdir(parents=True, exist_ok=True)
        self.base.chmod(0o755)  # munged wants the way to its socket open
        (self.base / "munge").chmod(0o700)
        key = self.base / "munge" / "munge.key"
        if not key.exists():
            key.write_bytes(os.urandom(1024))
            key.chmod(0o400)
        for link, target in gpu_links(self.spec).items():
            if not link.is_symlink():
                link.symlink_to(target)
        etc = self.base / "etc"
        (etc / "slurm.conf").write_text(slurm_conf(self.spec), encoding="utf-8")
        (etc / "gres.conf").write_text(gres_conf(self.spec), encoding="utf-8")
        (etc / "cgroup.conf").write_text(cgroup_conf(slurm_version(), self.spec.proctrack), encoding="utf-8")
        (etc / "plugstack.conf").write_text("", encoding="utf-8")
        if self.spec.task_prolog is not None:
            self.spec.task_prolog.write_text(self._task_prolog or "", encoding="utf-8")
            self.spec.task_prolog.chmod(0o755)

    def _start(self, name: str, *argv: str) -> None:
        with (self.base / "log" / f"{name}.start").open("ab") as log:
            child = subprocess.Popen(
                argv,
                env=self.env,
                cwd=self.base / "log",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        child.returncode = 0  # ended and reaped through /proc (slurm_proc), never through this object
        proc = Proc.of(child.pid)
        if proc is None:
            raise ClusterFailed(f"{name} ended at once:\n{self._logs()}")
        self._daemons[name] = proc

    def _until(self, condition: object, seconds: float, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            dead = [name for name, proc in self._daemons.items() if not proc.alive]
            if dead or time.monotonic() > deadline:
                raise ClusterFailed(f"{what} (ended: {dead or 'none'}):\n{self._logs()}")
            time.sleep(0.05)

    def _all_idle(self) -> bool:
        try:
            seen = self.run("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N", seconds=5, check=False)
        except subprocess.TimeoutExpired:
            return False
        return len(set(seen.out.split())) == self._wanted

    def _logs(self) -> str:
        parts = []
        for path in sorted((self.base / "log").glob("*")):
            tail = path.read_text(encoding="utf-8", errors="replace").splitlines()[-8:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """`up N --base DIR` or `down --base DIR`."""
    parser = argparse.ArgumentParser(prog="python -m tests.harness.slurm_cluster", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    verbs = parser.add_subparsers(dest="verb", required=True)
    up = verbs.add_parser("up", help="start a cluster")
    up.add_argument("nodes", type=int)
    up.add_argument("--gpus", type=int, default=8)
    up.add_argument("--cpus", type=int, default=8)
    up.add_argument("--proctrack", default="proctrack/linuxproc")
    down = verbs.add_parser("down", help="end a cluster")
    for verb in (up, down):
        verb.add_argument("--base", type=Path, required=True)
    args = parser.parse_args(argv)
    if args.verb == "down":
        SlurmCluster.saved(args.base.absolute()).down()
        return 0
    cluster = SlurmCluster(args.nodes, gpus=args.gpus, cpus=args.cpus, base=args.base, proctrack=args.proctrack)
    try:
        cluster.up()
    except BaseException:
        cluster.down()
        raise
    cluster.save()
    print(f"export SLURM_CONF={cluster.conf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
