"""`doctor --site`: what this Slurm will not do for us, or for one plan. Facts in, findings out; nothing is asked here.

sbatch looks at the components of a heterogeneous job one by one, so a job that wants more nodes than there are is
accepted and waits for ever. Totals are therefore counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

from relax_slurm.config.models import RunConfig
from relax_slurm.core.plan import ComponentPlan, InferencePlacementPlan
from relax_slurm.slurm.site_facts import Node, Partition, SiteFacts, minutes

MAX_TOGETHER = 12
"""Components of which every combination is counted; larger jobs are counted one by one and as a whole."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """As wanted."""
    NOTE = "note"
    """Good to know; nothing has to be done."""
    WARN = "warn"
    """Works, but not as well as it could, or not always."""
    UNKNOWN = "unknown"
    """Could not be found out here."""
    BAD = "bad"
    """A launch will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor."""

    level: Level
    what: str
    """Subject, such as `scheduler` or `component 1 (judge)`."""
    seen: str
    advice: str = ""

    def as_row(self) -> dict[str, str]:
        """The finding as JSON carries it."""
        return {"level": str(self.level), "what": self.what, "seen": self.seen, "advice": self.advice}


def check_site(
    facts: SiteFacts, config: RunConfig | None = None, plan: InferencePlacementPlan | None = None
) -> list[Finding]:
    """Everything that can be said, about the site and, with a plan, about this run on it."""
    if facts.missing:
        where = "they are not on the PATH; use a login node, load Slurm's module, or --backend local"
        return [Finding(Level.BAD, "commands", f"missing: {', '.join(facts.missing)}", where)]
    found = [
        Finding(Level.UNKNOWN, "commands", words, "run it by hand; nothing was learned here") for words in facts.failed
    ]
    het = plan is not None and plan.job_shape == "het"
    if facts.config is not None:
        found += _configuration(facts.config, het=het, requeue=config is None or config.slurm.requeue)
    found += _gpus(facts)
    if config is not None and plan is not None:
        found += _run(facts, config, plan)
    return found


def _configuration(config: Mapping[str, str], *, het: bool, requeue: bool) -> Iterator[Finding]:
    version = config.get("SLURM_VERSION", "")
    yield Finding(Level.OK if version else Level.UNKNOWN, "version", version or "not told")
    scheduler = config.get("SchedulerType", "")
    if scheduler == "sched/backfill":
        yield Finding(Level.OK, "scheduler", scheduler)
    elif scheduler:
        advice = "only sched/backfill starts heterogeneous jobs; set slurm.het_jobs: false, or job_shape: single"
        yield Finding(Level.BAD if het else Level.WARN, "scheduler", scheduler, advice)
    parameters = config.get("SchedulerParameters", "")
    if "disable_hetjob_steps" in parameters:
        advice = "steps over several components are off here; ours never span components, so this run is not touched"
        yield Finding(Level.NOTE, "het steps", "disable_hetjob_steps", advice)
    interval = next((word for word in parameters.split(",") if word.startswith("bf_interval=")), None)
    if het and scheduler == "sched/backfill":
        seen = interval or "bf_interval=30 (default)"
        yield Finding(
            Level.NOTE, "het start", seen, "a heterogeneous job starts at a pass of the backfill scheduler only"
        )
    yield from _evidence(config)
    if "gpu" not in config.get("GresTypes", "").split(","):
        advice = (
            "GPUs are no resource of this Slurm, so none can be asked for; ask the administrators for GresTypes=gpu"
        )
        yield Finding(Level.BAD, "GresTypes", config.get("GresTypes", "not told"), advice)
    if config.get("JobRequeue") == "0" and requeue:
        advice = "slurm.requeue is asked for explicitly and works all the same, unless the site refuses the option"
        yield Finding(Level.NOTE, "JobRequeue", "0", advice)
    wait = config.get("KillWait", "").partition(" ")[0]
    if wait.isdigit() and int(wait) < 10:
        advice = "after TERM a job has only this long; a preempted run may be killed before it has drained"
        yield Finding(Level.WARN, "KillWait", f"{wait} s", advice)


def _evidence(config: Mapping[str, str]) -> Iterator[Finding]:
    kind = config.get("ProctrackType", "")
    if kind == "proctrack/cgroup":
        yield Finding(Level.OK, "ProctrackType", kind, "the end of a step proves that its processes are gone")
    elif kind:
        advice = "a process can outlive its step here, so the end of a step proves nothing and freed GPUs are probed"
        yield Finding(Level.WARN, "ProctrackType", kind, advice)
    else:
        yield Finding(Level.UNKNOWN, "ProctrackType", "not told", "the end of a step is then no proof")


def _gpus(facts: SiteFacts) -> Iterator[Finding]:
    """One line per partition: its nodes, and what GPUs they have."""
    if facts.partitions is None or facts.nodes is None:
        return
    for partition in facts.partitions.values():
        nodes = [facts.nodes[name] for name in partition.nodes if name in facts.nodes]
        kinds: dict[str, int] = {}
        for node in nodes:
            if node.gpus is not None and node.gpus.total:
                label = f"{'/'.join(node.gpus.types) or 'untyped'}:{node.gpus.total}"
                kinds[label] = kinds.get(label, 0) + 1
        usable = sum(node.usable for node in nodes)
        gpus = ", ".join(f"{count} x gpu:{label}" for label, count in sorted(kinds.items())) or "no GPUs"
        state = "" if partition.state in {"UP", ""} else f", {partition.state}"
        seen = f"{len(nodes)} nodes, {usable} usable, {gpus}{state}"
        level = Level.NOTE if usable and partition.state in {"UP", ""} else Level.WARN
        yield Finding(level, f"partition {partition.name}{'*' if partition.default else ''}", seen)


def _run(facts: SiteFacts, config: RunConfig, plan: InferencePlacementPlan) -> Iterator[Finding]:
    if facts.partitions is None:
        return
    fits: list[tuple[ComponentPlan, frozenset[str]]] = []
    for component in plan.components:
        where = f"component {component.index} ({component.name})"
        wanted = component.partition or config.slurm.partition
        partition = facts.partitions.get(wanted) if wanted else facts.default_partition
        if partition is None and wanted and "," in wanted:
            yield Finding(Level.UNKNOWN, where, f"partitions {wanted}", "several are named; look at each of them")
            continue
        if partition is None:
            known = ", ".join(facts.partitions)
            seen = f"partition {wanted}" if wanted else "no partition, and the site has no default"
            yield Finding(Level.BAD, where, seen, f"set slurm.partition to one of {known}")
            continue
        yield from _limits(where, component, partition, config)
        if facts.nodes is not None:
            able = [facts.nodes[name] for name in partition.nodes if name in facts.nodes]
            good, why = _able(able, component, config)
            fits.append((component, frozenset(node.name for node in good)))
            yield _enough(where, component, partition, good, why)
    yield from _together(fits)


def _limits(where: str, component: ComponentPlan, partition: Partition, config: RunConfig) -> Iterator[Finding]:
    if partition.state not in {"UP", ""}:
        yield Finding(Level.BAD, where, f"partition {partition.name} is {partition.state}", "use another partition")
    if partition.max_nodes is not None and component.nodes > partition.max_nodes:
        seen = f"{component.nodes} nodes, MaxNodes={partition.max_nodes} in {partition.name}"
        yield Finding(Level.BAD, where, seen, "use fewer nodes or another partition")
    if component.nodes < partition.min_nodes:
        seen = f"{component.nodes} nodes, MinNodes={partition.min_nodes} in {partition.name}"
        yield Finding(Level.BAD, where, seen, "use another partition")
    asked = minutes(config.slurm.time)
    if asked is not None and partition.max_minutes is not None and asked > partition.max_minutes:
        seen = (
            f"slurm.time {config.slurm.time} is {asked} min, MaxTime is {partition.max_minutes} min in {partition.name}"
        )
        yield Finding(Level.BAD, where, seen, f"set slurm.time to at most {partition.max_minutes}")
    account, qos = config.slurm.account, config.slurm.qos
    if account is not None and (
        account in partition.denied_accounts or (partition.accounts is not None and account not in partition.accounts)
    ):
        yield Finding(Level.BAD, where, f"account {account} may not use {partition.name}", "change slurm.account")
    if qos is not None and partition.qos is not None and qos not in partition.qos:
        seen = f"QOS {qos} is not among {', '.join(sorted(partition.qos))} of {partition.name}"
        yield Finding(Level.BAD, where, seen, "change slurm.qos")


def _able(nodes: list[Node], component: ComponentPlan, config: RunConfig) -> tuple[list[Node], str]:
    """The nodes that can carry the component, and the first wish that none or too few of them meet."""
    plain = config.slurm.constraint if (config.slurm.constraint or "").replace("_", "").isalnum() else None
    wishes: list[tuple[str, Callable[[Node], bool]]] = [
        ("are usable", lambda node: node.usable),
        (f"have {component.gpus_per_node} GPUs", lambda node: _has(node, component)),
        (f"have the feature {plain}", lambda node: plain is None or plain in node.features),
        (f"have {component.cpus_per_node} CPUs", lambda node: node.cpus >= (component.cpus_per_node or 0)),
    ]
    left = nodes
    for words, meets in wishes:
        before = len(left)
        left = [node for node in left if meets(node)]
        if len(left) < component.nodes:
            kind = f" of type {component.gpu_type}" if component.gpu_type and "GPUs" in words else ""
            return left, f"{len(left)} of {before} nodes {words}{kind}"
    return left, ""


def _has(node: Node, component: ComponentPlan) -> bool:
    if not component.gpus_per_node:
        return True
    if node.gpus is None:
        return True  # its GRES text cannot be read, which is no reason to say no
    if component.gpu_type is None:
        return node.gpus.total >= component.gpus_per_node
    folded = {kind.casefold(): count for kind, count in node.gpus.by_type.items() if kind is not None}
    return folded.get(component.gpu_type.casefold(), 0) >= component.gpus_per_node


def _enough(where: str, component: ComponentPlan, partition: Partition, good: list[Node], why: str) -> Finding:
    wanted = f"{component.nodes} nodes with {component.gpus_per_node} GPUs"
    if len(good) >= component.nodes:
        return Finding(Level.OK, where, f"{len(good)} nodes of {partition.name} can carry it, wanted {component.nodes}")
    advice = "it would be refused or wait for ever; lower nodes or gpus_per_node, or correct gpu_type and partition"
    return Finding(Level.BAD, where, f"wanted {wanted}; in {partition.name} {why}", advice)


def _together(fits: list[tuple[ComponentPlan, frozenset[str]]]) -> Iterator[Finding]:
    """Components with GPUs need nodes of their own: a group of them needs as many nodes as all its members together."""
    gpu = [(component, names) for component, names in fits if component.gpus_per_node]
    sizes = range(2, len(gpu) + 1) if len(gpu) <= MAX_TOGETHER else (len(gpu),)
    for size in sizes:
        for group in combinations(gpu, size):
            wanted = sum(component.nodes for component, _ in group)
            names = frozenset().union(*(found for _, found in group))
            if wanted > len(names) and all(component.nodes <= len(found) for component, found in group):
                who = " + ".join(component.name for component, _ in group)
                advice = "sbatch looks at components one by one, so it would take the job and it would wait for ever"
                seen = f"{wanted} nodes wanted by {who}, {len(names)} there for all of them"
                yield Finding(Level.BAD, "total nodes", seen, f"{advice}; use fewer nodes or another partition")
                return
    if len(gpu) > 1:
        yield Finding(Level.OK, "total nodes", f"{sum(component.nodes for component, _ in gpu)} wanted, enough for all")
