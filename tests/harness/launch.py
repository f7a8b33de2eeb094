"""A run as a user sees it: launched with the command line, asked over HTTP, looked at from outside.

`Site` is one way to get nodes (fake Slurm commands, virtual nodes, a real Slurm); `LaunchedRun` is one run on it.
The same test runs on all sites through the `site` fixture of `tests.harness.sites`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx

from relax_slurm.cli.common import ask
from relax_slurm.control.run_dir import RunDir
from relax_slurm.errors import RelaxError
from sidecars.ledger import Entry, NodeLedger
from tests.harness.slurm_proc import Proc, processes, wait_gone
from tests.harness.wait import until

READY_SECONDS = 60.0
END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Ran:
    """What one call of the command line did."""

    rc: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """stdout as the one JSON document it has to be."""
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document

    @property
    def said(self) -> str:
        """Everything, for assertion messages."""
        return f"exit {self.rc}\n{self.out}\n{self.err}"


class Site(Protocol):
    """Where runs get their nodes."""

    kind: str
    """`fake`, `local` or `slurm`."""
    env: Mapping[str, str]
    root: Path
    """Folder of all runs."""

    def jobs(self) -> list[str]:
        """Ids of jobs that are not over; none on a site without jobs."""
        ...

    def steps(self) -> list[tuple[str, str]]:
        """Name and node of every sidecar step that runs, as the site's own records have it."""
        ...


def command_line(site: Site, *words: str, seconds: float = 90.0, **env: str) -> Ran:
    """`relax-slurm WORDS…` from a folder that has nothing to do with the run."""
    done = subprocess.run(
        [sys.executable, "-m", "relax_slurm", *words],
        env=dict(site.env) | {"RELAX_RUNS_ROOT": str(site.root)} | env,
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


def arguments(pid: int) -> list[str]:
    """The command line of a process; empty when it is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [os.fsdecode(word) for word in raw.split(b"\0")[:-1]]


@dataclass(slots=True)
class LaunchedRun:
    """One run, from the moment its run file exists."""

    site: Site
    name: str
    config: Path
    opened: list[httpx.Client] = field(default_factory=list)

    # --- the command line -----------------------------------------------------------------------------------

    def launch(self, *words: str, seconds: float = 90.0) -> Ran:
        """`relax-slurm launch`, on this site's backend."""
        backend = "local" if self.site.kind == "local" else "slurm"
        argv = ["launch", str(self.config), "--backend", backend, *words]
        return command_line(self.site, *argv, seconds=seconds)

    def up(self, *words: str) -> dict[str, Any]:
        """Launch and be READY; answers the document of `launch --json`."""
        done = self.launch("--json", *words)
        assert done.rc == 0, done.said + self.logs()
        return done.json

    def call(self, verb: str, *words: str, seconds: float = 60.0) -> Ran:
        """Another verb on this run."""
        return command_line(self.site, verb, self.name, *words, seconds=seconds)

    # --- what it left on disk -------------------------------------------------------------------------------

    @property
    def run_dir(self) -> RunDir:
        """The newest attempt."""
        return RunDir((self.site.root / self.name / "latest").resolve())

    @property
    def exists(self) -> bool:
        """Whether there is an attempt at all."""
        return (self.site.root / self.name / "latest").exists()

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of events.jsonl, all or those of one kind."""
        path = self.run_dir.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines]
        return [event for event in found if kind is None or event["event"] == kind]

    def outcome(self, seconds: float = END_SECONDS) -> dict[str, Any]:
        """The content of outcome.json, as soon as it is there."""
        found = until(lambda: self.run_dir.read("outcome.json"), seconds, self.logs)
        assert found is not None
        return found

    def engine_logs(self) -> list[str]:
        """Names of the log files that engines write."""
        names = (path.name for path in self.run_dir.logs.glob("*.log"))
        return sorted(name for name in names if not name.startswith("head_") and "_sidecar" not in name)

    def ledgers(self) -> list[Path]:
        """Ledger files: one per node on which a simulated engine ever took memory."""
        return sorted(self.run_dir.ledger.glob("*.ledger.json"))

    def held(self) -> list[Entry]:
        """What live engines hold on the cards of all nodes."""
        names = [path.name.removesuffix(".ledger.json") for path in self.ledgers()]
        return [entry for name in names for entry in NodeLedger(self.run_dir.ledger, name).entries()]

    def logs(self) -> str:
        """The end of every log, for assertion messages."""
        if not self.exists:
            return "(no attempt)"
        parts = []
        for path in [*sorted(self.run_dir.logs.glob("*.log")), self.run_dir.path / "events.jsonl"]:
            if path.exists():
                tail = path.read_text(errors="replace").splitlines()[-12:]
                parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n" + "\n".join(parts)

    # --- the coordinator ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any] | None:
        """The state document, None while nobody answers."""
        try:
            return ask(self.run_dir, "get_state", timeout_seconds=1.0)
        except RelaxError:
            return None

    def wait_state(self, *wanted: str, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait for one of these states of the run."""
        found: list[dict[str, Any]] = []

        def reached() -> bool:
            now = self.state()
            found[:] = [] if now is None else [now]
            return now is not None and now["state"] in wanted

        until(reached, seconds, lambda: f"{wanted}, last {found}{self.logs()}")
        return found[0]

    def wait_replica(self, replica: str, generation: int, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait until a replica is READY in this generation or a later one; answers the state document."""
        found: list[dict[str, Any]] = []

        def reached() -> bool:
            now = self.state()
            found[:] = [] if now is None else [now]
            rows = [] if now is None else now["replicas"]
            return any(
                row["replica"] == replica and row["state"] == "READY" and row["generation"] >= generation
                for row in rows
            )

        until(reached, seconds, lambda: f"{replica} READY again, last {found}{self.logs()}")
        return found[0]

    def worker(self, worker_id: str) -> dict[str, Any]:
        """The status of one worker, once its engine's pid is known."""

        def look() -> dict[str, Any] | None:
            nodes = (self.state() or {"nodes": []})["nodes"]
            rows = (row for node in nodes for row in node["workers"])
            return next((row for row in rows if row["worker_id"] == worker_id and row["pid"]), None)

        found = until(look, 10.0, f"no worker {worker_id}")
        assert found is not None
        return found

    # --- processes ------------------------------------------------------------------------------------------

    def processes(self) -> list[Proc]:
        """Every living process that has this run in its environment or its arguments."""
        folder = str(self.site.root / self.name)
        found = []
        for proc in processes():
            tag = proc.environ().get("RELAX_RUN_TAG", "")
            if f"@{folder}/" in tag or any(word.startswith(folder + "/") for word in arguments(proc.pid)):
                found.append(proc)
        return found

    def ours(self, *words: str, node: str | None = None) -> list[Proc]:
        """Those whose arguments hold all these words, on one (virtual) node if it is named."""
        found = []
        for proc in self.processes():
            argv = arguments(proc.pid)
            here = node is None or node in argv or proc.environ().get("SLURMD_NODENAME") == node
            if all(word in argv for word in words) and here:
                found.append(proc)
        return found

    def the(self, *words: str, node: str | None = None) -> Proc:
        """The one process with these words (srun, which has them too, left out)."""
        found = [proc for proc in self.ours(*words, node=node) if "--overlap" not in arguments(proc.pid)]
        assert len(found) == 1, (words, node, [arguments(proc.pid) for proc in found])
        return found[0]

    def coordinator(self) -> Proc:
        """The coordinator's process."""
        return self.the("relax_slurm.control.head")

    def gateway(self) -> Proc:
        """The gateway's process."""
        return self.the("relax_slurm.control.gateway_process")

    def supervisor(self) -> Proc:
        """The supervisor's process."""
        return self.the("relax_slurm.control.supervisor")

    def sidecar(self, node: str) -> Proc:
        """The sidecar of one node."""
        return self.the("sidecars.node", node=node)

    def nothing_left(self, seconds: float = END_SECONDS) -> None:
        """No job, no step, no process and no memory of the run, anywhere; fails otherwise."""
        until(
            lambda: not self.processes(),
            seconds,
            lambda: f"{[arguments(proc.pid) for proc in self.processes()]} are left{self.logs()}",
        )
        until(lambda: not self.site.jobs(), seconds, lambda: f"jobs {self.site.jobs()} are left")
        assert self.site.steps() == []
        assert self.held() == []

    def clean_up(self) -> None:
        """Whatever the test did: end the run and whatever is left of it."""
        for client in self.opened:
            client.close()
        if not self.exists:
            return
        if self.processes() or self.site.jobs():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.call("stop", "--timeout", "10", seconds=40)
        left = self.processes()
        for proc in left:
            proc.send(signal.SIGCONT)
            proc.send(signal.SIGKILL)
        assert wait_gone(left, 10.0) == []

    # --- HTTP -----------------------------------------------------------------------------------------------

    @property
    def token(self) -> str:
        """The gateway's bearer token."""
        return self.run_dir.token_file.read_text().strip()

    @property
    def gateway_url(self) -> str:
        """Where the gateway says that it listens."""
        url = (self.run_dir.read("endpoint.json") or {}).get("gateway_url")
        assert isinstance(url, str)
        return url

    def http(self, *, token: bool = True, seconds: float = 30.0) -> httpx.Client:
        """A client of the gateway; closed at the end of the test."""
        headers = {"Authorization": f"Bearer {self.token}"} if token else {}
        client = httpx.Client(base_url=self.gateway_url, headers=headers, timeout=seconds, trust_env=False)
        self.opened.append(client)
        return client


@contextlib.contextmanager
def new_run(site: Site, body: Mapping[str, Any], folder: Path, name: str) -> Iterator[LaunchedRun]:
    """A run of this config under a name of its own, cleaned up at the end. JSON is YAML."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(dict(body) | {"name": name}))
    run = LaunchedRun(site, name, path)
    try:
        yield run
    finally:
        run.clean_up()
