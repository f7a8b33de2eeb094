"""What the supervisor has to know about where it runs, and the Slurm answer to it.

Every Slurm command has a time limit, and one that fails means *unknown*: a fact that could not be had is left out, and
the binding says that it cannot verify.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from relax_slurm.config.models import RunConfig
from relax_slurm.control.allocation import Allocation
from relax_slurm.control.borrow import Choice, Share, ShareBook, choose, step_label
from relax_slurm.control.run_dir import RunDir
from relax_slurm.control.steps import SlurmSteps, StepRunner
from relax_slurm.core.binding import Backend
from relax_slurm.core.evidence import Proctrack
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.errors import StartupFailed
from relax_slurm.slurm.command import Done, run_async
from relax_slurm.slurm.container import own_mounts, step_options
from relax_slurm.slurm.environment import JobEnvironment, read_job
from relax_slurm.slurm.job_json import parse_jobs_json, show_job_json
from relax_slurm.slurm.scontrol import JobRecord, parse_config, parse_jobs, show_config, show_job
from relax_slurm.slurm.steps import list_steps, parse_steps
from relax_slurm.wire.host import boot_id, interface_addresses, net_ns

LOOPBACK = "127.0.0.1"
BORROWED = "borrowed"
"""`backend` of job.json for an allocation that we were started in (`control.backends.BackendKind`)."""
_DOWN = re.compile(r"State=\S*(DOWN|NOT_RESPONDING|FAIL|\*)")


class Site(Protocol):
    """Where a run's nodes are and how their steps are started."""

    absent: frozenset[str]
    """Nodes that never start (a pretence of the local backend)."""

    async def allocate(self) -> Allocation:
        """Find out everything about the allocation; `StartupFailed` when it is not the planned one."""
        ...

    def runner(self, environ: Mapping[str, str], command: Sequence[str]) -> StepRunner:
        """What starts and ends the nodes' steps."""
        ...

    async def node_answers(self, node: str) -> bool:
        """Whether the node itself, and not only the books, says that its step is over."""
        ...


def gpu_components(plan: InferencePlacementPlan) -> tuple[int, ...]:
    """Components whose nodes carry a sidecar: all but a CPU-only head component."""
    return tuple(component.index for component in plan.components if component.index != plan.head_component)


class SlurmSite:
    """The allocation that this process runs in."""

    def __init__(
        self, run_dir: RunDir, config: RunConfig, plan: InferencePlacementPlan, environ: Mapping[str, str]
    ) -> None:
        self.absent: frozenset[str] = frozenset()
        self._run_dir, self._config, self._plan, self._environ = run_dir, config, plan, environ
        self._job: JobEnvironment | None = None
        self._borrowed = (run_dir.read("job.json") or {}).get("backend") == BORROWED
        self._book: ShareBook | None = None

    async def allocate(self) -> Allocation:
        """See `Site.allocate`."""
        job = self._job = read_job(self._environ)
        wanted = [component.nodes for component in self._plan.components]
        seen = [len(names) for names in job.nodes]
        if seen != wanted and not self._borrowed:
            raise StartupFailed(
                f"job {job.job_id} has components of {seen} nodes, the plan wants {wanted}; launch again"
            )
        # Unset on a login node, where an interactive allocation leaves its shell: then we are on none of the nodes.
        here = self._environ.get("SLURMD_NODENAME")
        jobs, settings, nodes = await asyncio.gather(
            self._ask(show_job(job.job_id)),
            self._ask(show_config()),
            self._ask(["scontrol", "show", "node", here or job.nodes[0][0]]),
        )
        records = parse_jobs(jobs.out) if jobs.ok else ()
        indexes = _indexes(records)
        if records and not indexes:
            # A text form that is not known. Newer versions tell the same as JSON.
            again = await self._ask(show_job_json(job.job_id))
            records = parse_jobs_json(again.out) if again.ok else records
            indexes = _indexes(records)
        counts = {node: len(gpus) for node, gpus in indexes.items()} if self._borrowed else {}
        choice = await self._share(job, counts, here) if self._borrowed else None
        return Allocation(
            backend=Backend.SLURM,
            nodes=job.nodes if choice is None else choice.nodes,
            gpu_counts=counts,
            first_gpu={} if choice is None else choice.first_gpu,
            job_ids=job.component_ids,
            batch_host=here,
            gpu_indexes=indexes,
            gpu_types={node: kind for record in records for node, kind in record.gpu_types.items()},
            proctrack=Proctrack.parse(parse_config(settings.out).get("ProctrackType") if settings.ok else None),
            head_hostname=socket.gethostname(),
            head_boot_id=boot_id(),
            head_net_ns=net_ns(),
            head_address=_head_address(nodes.out if here else "", self._config.slurm.interface),
            head_addresses=interface_addresses(),
            gpu_components=gpu_components(self._plan),
        )

    async def _share(self, job: JobEnvironment, counts: Mapping[str, int], here: str | None) -> Choice:
        """Our part of a borrowed allocation, written down for other runs in it."""
        label = step_label(self._run_dir.run, self._run_dir.attempt)
        listed = await self._ask(list_steps(job.component_ids))
        living = [row.name for row in parse_steps(listed.out)] if listed.ok else None
        book = self._book = ShareBook(self._run_dir.path.parent.parent, job.job_id, self._run_dir.run)
        with book.open():
            choice = choose(self._plan, job.nodes, counts, book.others(living), here)
            book.take(Share(run=self._run_dir.run, label=label, gpus=choice.gpus))
        return choice

    def runner(self, environ: Mapping[str, str], command: Sequence[str]) -> StepRunner:
        """See `Site.runner`."""
        if self._job is None:
            raise StartupFailed("the allocation has not been looked at yet; call allocate() first")
        component_of = {name: index for index, names in enumerate(self._job.nodes) for name in names}
        return SlurmSteps(
            command=command,
            environ=environ,
            component_of=component_of,
            component_ids=self._job.component_ids,
            het=self._job.het,
            label=step_label(self._run_dir.run, self._run_dir.attempt) if self._borrowed else "",
            extra=self._config.slurm.extra_srun,
            container=step_options(self._config.engine.container, own_mounts(self._run_dir.path)),
        )

    async def node_answers(self, node: str) -> bool:
        """See `Site.node_answers`."""
        done = await self._ask(["scontrol", "show", "node", node])
        return done.ok and not _DOWN.search(done.out)

    async def _ask(self, argv: Sequence[str]) -> Done:
        done = await run_async(argv, seconds=self._config.slurm.command_seconds, env=self._environ)
        if not done.ok:
            self._run_dir.append_event({"event": "slurm_unknown", "command": " ".join(argv), "words": done.words})
        return done


def _indexes(records: Sequence[JobRecord]) -> dict[str, tuple[int, ...]]:
    """GPU indexes by node, as far as Slurm tells them."""
    return {node: gpus for record in records for node, gpus in record.gpus.items() if gpus is not None}


def _head_address(node: str, interface: str | None) -> str:
    """The address of the interface that the user names, else the one that the cluster uses (NodeAddr), else any."""
    found = {entry.interface: entry.address for entry in reversed(interface_addresses())}
    if interface is not None:
        if interface not in found:
            raise StartupFailed(
                f"slurm.interface is {interface!r}, which the head node does not have; it has {', '.join(found)}"
            )
        return found[interface]
    match = re.search(r"\bNodeAddr=(\S+)", node)
    try:
        if match is not None:
            return socket.gethostbyname(match[1])
    except OSError:
        pass  # a name that only the controller can resolve
    return next((address for address in found.values() if not address.startswith("127.")), LOOPBACK)
