"""The configuration files of a test cluster, as text. No files, no processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """What a test cluster looks like. All nodes are alike and live on 127.0.0.1."""

    base: Path
    hostname: str
    user: str
    ctld_port: int
    node_ports: tuple[int, ...]
    gpus: int = 8
    cpus: int = 8
    memory_mb: int = 16_000
    gpu_type: str | None = "h100"
    node_prefix: str = "node"
    proctrack: str = "proctrack/linuxproc"
    slurmd_timeout: int = 10
    min_job_age: int = 300
    kill_wait: int = 5
    task_prolog: Path | None = None
    extra: tuple[str, ...] = field(default=())

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names, `node1` to `nodeN`."""
        return tuple(f"{self.node_prefix}{index + 1}" for index in range(len(self.node_ports)))

    @property
    def conf(self) -> Path:
        """Path of slurm.conf: the one thing a client needs to know (SLURM_CONF)."""
        return self.base / "etc" / "slurm.conf"

    @property
    def munge_socket(self) -> Path:
        """Path of the cluster's own munge socket."""
        return self.base / "run" / "munge.socket"


def slurm_conf(spec: ClusterSpec) -> str:
    """slurm.conf. `SlurmctldHost` must be the machine's hostname, otherwise every client hangs."""
    base = spec.base
    cgroup = spec.proctrack.endswith("cgroup")
    lines = [
        "ClusterName=harness",
        f"SlurmctldHost={spec.hostname}(127.0.0.1)",
        f"SlurmctldPort={spec.ctld_port}",
        f"SlurmUser={spec.user}",
        f"SlurmdUser={spec.user}",
        "AuthType=auth/munge",
        "CredType=cred/munge",
        # Credentials live two minutes otherwise, and a requeued job waits for the old one to expire.
        f"AuthInfo=socket={spec.munge_socket},cred_expire=10",
        f"StateSaveLocation={base}/state",
        f"SlurmctldPidFile={base}/run/slurmctld.pid",
        f"SlurmctldLogFile={base}/log/slurmctld.log",
        f"SlurmdPidFile={base}/run/slurmd.%n.pid",
        f"SlurmdLogFile={base}/log/slurmd.%n.log",
        f"SlurmdSpoolDir={base}/spool/%n",
        "SlurmctldDebug=info",
        "SlurmdDebug=info",
        f"ProctrackType={spec.proctrack}",
        f"TaskPlugin={'task/cgroup' if cgroup else 'task/none'}",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/none",
        "MpiDefault=none",
        "SwitchType=switch/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core_Memory",
        # Only the backfill scheduler starts het jobs; its default interval is 30 s.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=2,"
        "bf_interval=1,bf_window=1440,bf_resolution=60",
        "SlurmdParameters=config_overrides",
        "GresTypes=gpu",
        "ReturnToService=2",
        "MailProg=/bin/true",
        "SlurmctldTimeout=10",
        f"SlurmdTimeout={spec.slurmd_timeout}",
        "InactiveLimit=0",
        f"MinJobAge={spec.min_job_age}",
        f"KillWait={spec.kill_wait}",
        "Waittime=0",
        "CompleteWait=0",
        "MessageTimeout=10",
        "TCPTimeout=2",
        "UnkillableStepTimeout=30",
        "JobRequeue=1",
        "PropagateResourceLimits=NONE",
        "DefMemPerCPU=100",
    ]
    if spec.task_prolog is not None:
        lines.append(f"TaskProlog={spec.task_prolog}")
    lines += spec.extra
    gres = f"gpu:{spec.gpu_type}:{spec.gpus}" if spec.gpu_type else f"gpu:{spec.gpus}"
    for name, port in zip(spec.nodes, spec.node_ports, strict=True):
        node = (
            f"NodeName={name} NodeHostname={spec.hostname} NodeAddr=127.0.0.1 Port={port} CPUs={spec.cpus} "
            f"Boards=1 SocketsPerBoard=1 CoresPerSocket={spec.cpus} ThreadsPerCore=1 "
            f"RealMemory={spec.memory_mb}"
        )
        lines.append(f"{node} Gres={gres} State=UNKNOWN" if spec.gpus else f"{node} State=UNKNOWN")
    every = ",".join(spec.nodes)
    lines.append(f"PartitionName=main Nodes={every} Default=YES MaxTime=INFINITE DefaultTime=60 State=UP")
    lines.append(f"PartitionName=high Nodes={every} PriorityTier=10 MaxTime=INFINITE DefaultTime=60 State=UP")
    return "\n".join(lines) + "\n"


def gres_conf(spec: ClusterSpec) -> str:
    """gres.conf. A device file must be a character device to count as a GPU with an index; see `gpu_links`."""
    lines = ["AutoDetect=off"]
    if spec.gpus:
        kind = f" Type={spec.gpu_type}" if spec.gpu_type else ""
        files = f"{spec.base}/dev/nvidia[0-{spec.gpus - 1}]" if spec.gpus > 1 else f"{spec.base}/dev/nvidia0"
        lines += [f"NodeName={name} Name=gpu{kind} File={files} Flags=nvidia_gpu_env" for name in spec.nodes]
    return "\n".join(lines) + "\n"


def gpu_links(spec: ClusterSpec) -> dict[Path, Path]:
    """Symlinks to make: fake GPU device -> a character device that everybody has."""
    return {spec.base / "dev" / f"nvidia{index}": Path("/dev/null") for index in range(spec.gpus)}


def cgroup_conf(version: tuple[int, int], proctrack: str) -> str:
    """cgroup.conf. The plugin must be named: autodetection fails on machines without a cgroup v2 tree."""
    old = version < (23, 0)
    plugin = "cgroup/v1" if old or proctrack.endswith("cgroup") else "disabled"
    constrain = "ConstrainCores=no\nConstrainRAMSpace=no\nConstrainDevices=no\n"
    return f"{'CgroupAutomount=no' if old else ''}\n{constrain}CgroupPlugin={plugin}\n"
