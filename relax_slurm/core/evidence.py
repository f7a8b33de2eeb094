"""What proves that a GPU slot is free again.

One rule: a slot is released by proof and by nothing else. Silence, a timeout and a broken connection prove
nothing, however long they last and however many of them there are. What counts as proof depends on how the
site kills processes: with `proctrack/cgroup` the end of a step takes every process along, with anything
else a process can outlive its step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Proctrack(StrEnum):
    """How the backend keeps track of a step's processes (`ProctrackType` in `scontrol show config`)."""

    CGROUP = "proctrack/cgroup"
    """A step ends when its cgroup is empty: no process of it is left, daemons included."""
    LINUXPROC = "proctrack/linuxproc"
    """Follows parent pids: a process that re-parents itself outlives the step."""
    PGID = "proctrack/pgid"
    """Follows process groups: a process in a session of its own outlives the step."""
    LOCAL = "local"
    """Virtual nodes: the end of a sidecar says nothing about its engines."""
    UNKNOWN = "unknown"
    """Not read, or a plugin we do not know; treated like the weakest."""

    @classmethod
    def parse(cls, text: str | None) -> Proctrack:
        """The value of `ProctrackType`; anything unfamiliar is UNKNOWN."""
        value = (text or "").strip().lower()
        return next((member for member in cls if member.value == value), cls.UNKNOWN)

    @property
    def step_end_is_proof(self) -> bool:
        """Whether Slurm's record that a step ended on a live node proves that its processes are gone."""
        return self is Proctrack.CGROUP


_MEANING = {
    Proctrack.CGROUP: "the end of a node's step proves that its GPUs are free",
    Proctrack.LINUXPROC: "processes can outlive their step, so a GPU comes back only after a probe",
    Proctrack.PGID: "processes can outlive their step, so a GPU comes back only after a probe",
    Proctrack.LOCAL: "engines can outlive their sidecar, so a GPU comes back only after a probe",
    Proctrack.UNKNOWN: "processes may outlive their step, so a GPU comes back only after a probe",
}


def what_it_means(proctrack: Proctrack) -> str:
    """One sentence for the site check: what a lost node costs here."""
    advice = "" if proctrack.step_end_is_proof else "; proctrack/cgroup makes recovery automatic"
    if proctrack is Proctrack.LOCAL:
        advice = ""
    return f"{proctrack.value}: {_MEANING[proctrack]}{advice}"


class StepProof(StrEnum):
    """How much the end of a node's step is worth: the `proof` field of `step_ended`."""

    CGROUP = "cgroup"
    """Slurm's record on a node that answered, under proctrack/cgroup: nothing is left."""
    SWEPT = "swept"
    """Somebody looked on the node afterwards: no process carries the run's tag and GPU memory is free."""
    NONE = "none"
    """The step is over in the books only."""


def step_proof(proctrack: Proctrack, *, node_answered: bool, swept: bool = False) -> StepProof:
    """What the end of a step proves.

    `node_answered` is false when the controller closed the step because it had given up the node (DOWN,
    NODE_FAIL): tasks of a cut node run on until its slurmd registers again, so such a record proves nothing
    under any plugin.
    """
    if swept:
        return StepProof.SWEPT
    return StepProof.CGROUP if proctrack.step_end_is_proof and node_answered else StepProof.NONE


class Fact(StrEnum):
    """One thing that happened to a worker or to the node under it."""

    WORKER_EXITED = "worker_exited"
    """Its sidecar reaped it and saw every descendant gone."""
    EXIT_UNCONFIRMED = "exit_unconfirmed"
    """It should be gone, or its first process is, but descendants were not seen to end."""
    RELEASE_MEASURED = "release_measured"
    """Its sidecar acknowledged a release after it had measured the memory free."""
    RELEASE_REPLIED = "release_replied"
    """The engine answered a release with 200; memory was not measured, and it can lag behind."""
    STEP_ENDED_PROVEN = "step_ended_proven"
    """The node's step ended with proof `cgroup`."""
    STEP_ENDED = "step_ended"
    """The node's step ended with proof `none`."""
    SWEPT = "swept"
    """A probe found neither a process with the run's tag nor memory in use on the slot."""
    NODE_REBOOTED = "node_rebooted"
    """The node reports another boot id than it was bound with; no process survives that."""
    ORPHAN_FOUND = "orphan_found"
    """A probe found a process with the run's tag."""
    MEMORY_HELD = "memory_held"
    """A measurement found memory in use on the slot."""
    STARTED = "started"
    """A worker was started on the slot, or asked to start: it may hold memory from here on."""
    ONLOADED = "onloaded"
    """The worker took memory again, or was asked to."""
    SILENCE = "silence"
    """No beat for longer than allowed."""
    TIMEOUT = "timeout"
    """An operation did not answer in time; it may still happen."""
    DISCONNECTED = "disconnected"
    """The connection broke, or the sidecar's process was seen to end."""


class Release(StrEnum):
    """May the slot be given to somebody else?"""

    RELEASED = "released"
    """Yes: there is proof and nothing later contradicts it."""
    FENCED = "fenced"
    """No, until there is proof."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """A fact about one generation of one worker. Order in a list is the order in which it was learned."""

    fact: Fact
    generation: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict and the sentence that explains it. `missing`: what would release it; empty if released."""

    release: Release
    reason: str
    missing: str = ""


PROOF = {
    Fact.WORKER_EXITED: "the worker's exit was confirmed by its sidecar",
    Fact.RELEASE_MEASURED: "the release was acknowledged and the memory measured free",
    Fact.STEP_ENDED_PROVEN: "Slurm recorded the end of the node's step under proctrack/cgroup",
    Fact.SWEPT: "a probe found no process of the run and the memory free",
    Fact.NODE_REBOOTED: "the node was rebooted since",
}
"""Facts that release a slot, and how that is said."""

DOUBT = {
    Fact.ORPHAN_FOUND: "a process of the run was found on the node",
    Fact.MEMORY_HELD: "memory is still in use on the GPU",
    Fact.STARTED: "a worker was started on it",
    Fact.ONLOADED: "the worker took its memory again",
    Fact.EXIT_UNCONFIRMED: "the worker's descendants were not seen to end",
}
"""Facts that take away what an earlier proof gave."""

NEUTRAL = {
    Fact.RELEASE_REPLIED: "the engine answered the release but the memory was not measured",
    Fact.STEP_ENDED: "the node's step ended in a way that does not prove its processes gone",
    Fact.SILENCE: "the node is silent, which proves nothing",
    Fact.TIMEOUT: "an operation timed out and may still happen",
    Fact.DISCONNECTED: "the connection is gone, which proves nothing",
}
"""Facts that neither give nor take."""


def judge(evidence: Iterable[Evidence], generation: int, proctrack: Proctrack = Proctrack.UNKNOWN) -> Judgement:
    """Weigh what is known about the worker of this generation. Facts about other generations are ignored.

    The last fact that is proof or doubt decides; `proctrack` only shapes the advice, because its weight is
    already in the kind of step end (`step_proof`).
    """
    deciding: Evidence | None = None
    last: Evidence | None = None
    for entry in evidence:
        if entry.generation != generation:
            continue
        last = entry
        if entry.fact not in NEUTRAL:
            deciding = entry
    if deciding is not None and deciding.fact in PROOF:
        return Judgement(Release.RELEASED, _say(PROOF[deciding.fact], deciding))
    if last is None:
        reason = f"nothing is known about generation {generation}"
    elif last.fact in NEUTRAL:
        reason = _say(NEUTRAL[last.fact], last)
        if deciding is not None and deciding.fact not in {Fact.STARTED, Fact.ONLOADED}:
            reason = f"{_say(DOUBT[deciding.fact], deciding)}; then {reason}"
    else:
        reason = _say(DOUBT[last.fact], last)
    return Judgement(Release.FENCED, reason, _missing(proctrack))


def _say(sentence: str, entry: Evidence) -> str:
    return f"{sentence} ({entry.note})" if entry.note else sentence


def _missing(proctrack: Proctrack) -> str:
    probe = "a probe that finds no process of the run and the memory free, or a reboot of the node"
    if proctrack.step_end_is_proof:
        return f"a confirmed exit, a measured release, the end of the step on a live node, {probe}"
    return f"a confirmed exit, a measured release, {probe}"


def step_fact(proof: StepProof) -> Fact:
    """The fact that a `step_ended` message stands for."""
    return {
        StepProof.CGROUP: Fact.STEP_ENDED_PROVEN,
        StepProof.SWEPT: Fact.SWEPT,
        StepProof.NONE: Fact.STEP_ENDED,
    }[proof]
