"""Which GPUs one node really has: compares the step's claim with every other source and gives a verdict.

    claim      SLURM_STEP_GPUS (Slurm) or the indexes the local backend handed out
    against    scontrol show job -d, SLURM_JOB_GPUS on the batch host, NVML
    consistent SLURM_GPUS_ON_NODE, CUDA_VISIBLE_DEVICES

CONFIRMED needs the claim and one source from `against`; the consistency sources come from the same daemon
as the claim, so they can refute it and never prove it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from relax_slurm.core.binding_mask import Mask, MaskKind, parse_indexes, parse_mask
from relax_slurm.core.binding_types import AllocationFacts, Backend, BoundGpu, Problem, Says, Source, Verdict
from relax_slurm.core.report import GpuDevice, NodeReport

STEP, JOB, COUNT, MASK = "SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "CUDA_VISIBLE_DEVICES"
SCONTROL, NVML, BACKEND = "scontrol show job -d", "NVML", "local backend"
NO_GRES = "no GPUs requested from Slurm (missing --gres/--gpus-per-node)"
NO_IDENTITY = "nothing tells which GPUs this node has"


@dataclass(frozen=True, slots=True)
class NodeGpus:
    """The GPUs of one node in slot order, what was compared, and what was wrong."""

    gpus: tuple[BoundGpu, ...]
    devices: tuple[GpuDevice | None, ...]
    """NVML's device behind each of `gpus`."""
    verdict: Verdict
    reason: str
    sources: tuple[Source, ...]
    problems: tuple[Problem, ...]


def show(numbers: tuple[int, ...]) -> str:
    """Indexes as a comma list; `none` for no GPU."""
    return ",".join(str(number) for number in numbers) or "none"


def _ascending(numbers: tuple[int, ...]) -> bool:
    return list(numbers) == sorted(set(numbers))


class _Comparison:
    """Collects sources and problems while one node is looked at. Lives inside `identify` only."""

    def __init__(self, name: str, report: NodeReport, facts: AllocationFacts, component: int, wanted: int):
        self.name, self.report, self.facts = name, report, facts
        self.component, self.wanted = component, wanted
        self.local = facts.backend is Backend.LOCAL
        self.sources: list[Source] = []
        self.problems: list[Problem] = []
        self.devices = None if report.devices is None else sorted(report.devices, key=lambda gpu: gpu.ordinal)

    def source(self, name: str, seen: str | None, says: Says, note: str = "") -> None:
        self.sources.append(Source(name, "not set" if seen is None else seen, says, note))

    def refuse(self, source: str, seen: str, wanted: str, problem: str, gpu: str = "") -> None:
        self.problems.append(Problem(self.name, problem, gpu=gpu, source=source, seen=seen, wanted=wanted))

    def compare(self, source: str, seen: tuple[int, ...], claim: tuple[int, ...]) -> None:
        """An independent list of indexes: the claim must lie inside it (a step may take part of a node)."""
        if set(claim) <= set(seen):
            self.source(source, show(seen), Says.AGREES)
            return
        self.source(source, show(seen), Says.CONTRADICTS)
        claimed = BACKEND if self.local else STEP
        wanted = f"within {show(seen)} ({source})"
        self.refuse(claimed, show(claim), wanted, "the step claims GPUs that the job does not have here")

    # --- the claim -------------------------------------------------------------------------------------

    def claim(self) -> tuple[int, ...] | None:
        """The step's own word, or None when it said nothing readable."""
        if self.local:
            given = self.report.virtual_gpus
            self.source(
                BACKEND,
                None if given is None else show(given),
                Says.CLAIMS if given is not None else Says.ABSENT,
            )
            return given
        text = self.report.environ.get(STEP)
        step = parse_indexes(text)
        if step.kind is MaskKind.BROKEN:
            self.source(STEP, text, Says.CONTRADICTS, step.problem)
            self.refuse(STEP, text or "", step.wanted, step.problem)
            return None
        if step.kind is MaskKind.UNSET:
            self.source(STEP, text, Says.ABSENT)
            return None
        self.source(STEP, text, Says.CLAIMS)
        return step.numbers

    def fallback(self, mask: Mask) -> tuple[int, ...]:
        """The best guess for a node whose step said nothing, for a user who allows unverified nodes."""
        if self.name in self.facts.gpu_indexes:
            return self.facts.gpu_indexes[self.name]
        if self._on_batch_host():
            job = parse_indexes(self.report.environ.get(JOB))
            if job.kind is MaskKind.INDEX:
                return job.numbers
        if mask.kind is MaskKind.INDEX:
            return mask.numbers
        if self.devices is not None:
            return tuple(range(len(self.devices)))
        return tuple(range(len(mask.entries)))

    def _on_batch_host(self) -> bool:
        return not self.local and self.component == 0 and self.name == self.facts.batch_host

    # --- independent sources ---------------------------------------------------------------------------

    def against_allocation(self, claim: tuple[int, ...]) -> None:
        """scontrol (or the local backend's own record) and the batch script's variable."""
        recorded = self.facts.gpu_indexes.get(self.name)
        label = f"{BACKEND} record" if self.local else SCONTROL
        if recorded is None:
            self.source(label, None, Says.ABSENT)
        else:
            self.compare(label, recorded, claim)
        text = self.report.environ.get(JOB)
        if text is None:
            return
        job = parse_indexes(text)
        if not self._on_batch_host():
            self.source(
                JOB,
                text,
                Says.INHERITED,
                f"exported by srun from {self.facts.batch_host or 'the batch host'}",
            )
        elif job.kind is MaskKind.INDEX:
            self.compare(JOB, job.numbers, claim)
        else:
            self.source(JOB, text, Says.ABSENT, job.problem)

    def attribute(self, claim: tuple[int, ...], mask: Mask) -> tuple[GpuDevice | None, ...]:
        """NVML's device behind each claimed index; all None when there is no NVML or it does not fit."""
        nothing: tuple[GpuDevice | None, ...] = (None,) * len(claim)
        if self.devices is None:
            self.source(NVML, None, Says.ABSENT, self.report.devices_note)
            return nothing
        seen = f"{len(self.devices)} devices"
        found = self._match(claim)
        if found is None:
            self.source(NVML, seen, Says.CONTRADICTS)
            self.refuse(NVML, seen, f"a device for each of {show(claim)}", "NVML does not see every GPU of the step")
            return nothing
        names = self._by_uuid(mask, found)
        if names is None:
            self.source(NVML, seen, Says.CONTRADICTS)
            return nothing
        self.source(NVML, seen, Says.AGREES, ",".join(device.uuid for device in found)[:500])
        return tuple(found)

    def _match(self, claim: tuple[int, ...]) -> list[GpuDevice] | None:
        devices = self.devices or []
        if devices and all(device.index is not None for device in devices):
            by_index = {device.index: device for device in devices}
            found = [by_index.get(index) for index in claim]
        elif len(devices) == len(claim):
            found = list(devices)  # cgroups hide the others: positions follow the order of the indexes
        else:
            by_ordinal = {device.ordinal: device for device in devices}
            found = [by_ordinal.get(index) for index in claim] if len(devices) > len(claim) else []
        known = [device for device in found if device is not None]
        return known if len(known) == len(claim) else None

    def _by_uuid(self, mask: Mask, found: list[GpuDevice]) -> list[GpuDevice] | None:
        """Checks a UUID mask against the devices that the indexes led to."""
        if mask.kind is not MaskKind.UUID or len(mask.entries) != len(found):
            return found
        fits = True
        for entry, device in zip(mask.entries, found, strict=True):
            hits = [other for other in self.devices or [] if other.uuid.casefold().startswith(entry.casefold())]
            exact = [other for other in hits if other.uuid.casefold() == entry.casefold()]
            hits = exact or hits
            if hits == [device]:
                continue
            fits = False
            why = "is not on this node" if not hits else "fits several GPUs" if len(hits) > 1 else "is another GPU"
            self.refuse(MASK, entry, device.uuid, f"the UUID in this place {why}", gpu=device.uuid)
        return found if fits else None

    # --- consistency -----------------------------------------------------------------------------------

    def check_count(self, claim: tuple[int, ...], mask: Mask) -> None:
        """How many GPUs the step has, against the plan and against SLURM_GPUS_ON_NODE."""
        if not _ascending(claim):
            self.refuse(
                STEP if not self.local else BACKEND,
                show(claim),
                "ascending",
                "local GPU ids are not ascending",
            )
        text = None if self.local else self.report.environ.get(COUNT)
        if text is not None:
            agrees = text == str(len(claim))
            self.source(COUNT, text, Says.AGREES if agrees else Says.CONTRADICTS)
            if not agrees and len(claim) == self.wanted and len(mask.entries) in {0, self.wanted}:
                self.refuse(COUNT, text, str(len(claim)), "the count differs from the list of indexes")
        if mask.entries and len(mask.entries) < self.wanted:
            self._refuse_few(len(mask.entries), MASK, ",".join(mask.entries))
        elif len(claim) != self.wanted:
            self._refuse_few(len(claim), BACKEND if self.local else STEP, show(claim))
        elif mask.entries and len(mask.entries) != len(claim):
            self.refuse(MASK, f"{len(mask.entries)} GPUs", f"{len(claim)} GPUs", "the mask and the step disagree")

    def _refuse_few(self, count: int, source: str, seen: str) -> None:
        environ = self.report.environ
        per_task = environ.get("SLURM_GPUS_PER_TASK") is not None or environ.get("SLURM_NTASKS", "1") != "1"
        hidden = source == MASK and environ.get(COUNT) == str(self.wanted)
        bound = count < self.wanted and (per_task or hidden)
        if bound and not self.local:
            problem = f"task sees {count} of {self.wanted}, add --gpu-bind=none (or drop --gpus-per-task)"
        else:
            problem = f"GPU count is not as planned: {count} instead of {self.wanted}"
        self.refuse(source, seen, f"{self.wanted} GPUs", problem)

    def check_mask(self, claim: tuple[int, ...], mask: Mask) -> str:
        """An index mask is the claim itself (absolute) or 0..n-1 (relative). Returns a reason for doubt."""
        count = len(claim)
        plain = tuple(range(count))
        if mask.kind is MaskKind.UNSET and self.devices is None and claim != plain and not self.local:
            return f"{MASK} is not set and there is no NVML, so it is open how programs count GPUs {show(claim)}"
        numbers = mask.numbers
        if mask.kind is not MaskKind.INDEX or len(numbers) != count or numbers == claim == plain:
            return ""
        seen = ",".join(mask.entries)
        wanted = show(claim) if claim == plain else f"{show(claim)} or {show(plain)}"
        if not _ascending(numbers):
            self.refuse(MASK, seen, wanted, "local GPU ids are not ascending")
        elif numbers not in {claim, plain}:
            self.refuse(MASK, seen, wanted, "the mask names other GPUs than the step has")
        elif self.devices is not None and numbers == claim and len(self.devices) == count:
            self.refuse(
                MASK,
                seen,
                show(plain),
                f"cgroups show {count} devices counted from 0, so this mask finds no CUDA GPU",
            )
        elif self.devices is not None and numbers == plain and len(self.devices) > count:
            self.refuse(
                MASK,
                seen,
                show(claim),
                f"all {len(self.devices)} devices are visible, so this mask means GPUs of others",
            )
        return ""


def _ordinal(device: GpuDevice | None) -> int | None:
    """CUDA's integer for a device. A MIG slice has none: it can only be named by UUID."""
    return None if device is None or device.mig_parent is not None else device.ordinal


def _entries(claim: tuple[int, ...], mask: Mask, devices: tuple[GpuDevice | None, ...]) -> list[tuple[str, int | None]]:
    """Per slot: the entry for an engine's mask, and the same as an integer where that is known."""
    result: list[tuple[str, int | None]] = []
    for slot, (index, device) in enumerate(zip(claim, devices, strict=True)):
        if slot < len(mask.entries):
            entry = mask.entries[slot]
            number = mask.numbers[slot] if mask.kind is MaskKind.INDEX else _ordinal(device)
        else:
            entry = str(index) if device is None else device.uuid
            number = index if device is None else _ordinal(device)
        result.append((entry, number))
    return result


def identify(name: str, report: NodeReport, facts: AllocationFacts, component: int, wanted: int) -> NodeGpus:
    """Compare all sources of one node that should have `wanted` GPUs in the job's component `component`."""
    work = _Comparison(name, report, facts, component, wanted)
    text = report.environ.get(MASK)
    mask = parse_mask(text)
    claim = work.claim()
    broken_claim = bool(work.problems)
    if mask.kind is MaskKind.BROKEN:
        work.source(MASK, text, Says.CONTRADICTS, mask.problem)
        work.refuse(MASK, text or "", mask.wanted, mask.problem)
    elif mask.kind is MaskKind.NONE:
        work.source(MASK, text, Says.CONTRADICTS, "no GPU")
        work.refuse(MASK, text or "(empty)", f"{wanted} GPUs", "no GPU is visible" if work.local else NO_GRES)
    else:
        work.source(MASK, text, Says.ABSENT if mask.kind is MaskKind.UNSET else Says.AGREES, mask.kind.value)
    if mask.kind in {MaskKind.BROKEN, MaskKind.NONE} or broken_claim:
        return NodeGpus(
            (), (), Verdict.CONTRADICTED, work.problems[0].problem, tuple(work.sources), tuple(work.problems)
        )

    indexes = claim if claim is not None else work.fallback(mask)
    work.against_allocation(indexes)
    work.check_count(indexes, mask)
    doubt = work.check_mask(indexes, mask)
    devices = work.attribute(indexes, mask)
    verdict, reason = _verdict(work, claim, doubt)
    if not indexes:
        work.refuse(BACKEND if work.local else STEP, "not set", f"{wanted} GPUs", NO_IDENTITY)
        verdict, reason = Verdict.CONTRADICTED, NO_IDENTITY
    uuids = [None if device is None else device.uuid for device in devices]
    if mask.kind is MaskKind.UUID and len(mask.entries) == len(indexes):
        uuids = [uuid or entry for uuid, entry in zip(uuids, mask.entries, strict=True)]
    gpus = tuple(
        BoundGpu(slot, index, slot, uuids[slot], entry, number)
        for slot, (index, (entry, number)) in enumerate(zip(indexes, _entries(indexes, mask, devices), strict=True))
    )
    return NodeGpus(gpus, devices, verdict, reason, tuple(work.sources), tuple(work.problems))


def part(node: NodeGpus, first: int, count: int) -> NodeGpus:
    """`count` GPUs of a node from the ordinal `first` on; slots are counted anew, identities stay."""
    gpus = tuple(replace(gpu, slot=slot) for slot, gpu in enumerate(node.gpus[first : first + count]))
    return replace(node, gpus=gpus, devices=node.devices[first : first + count])


def _verdict(work: _Comparison, claim: tuple[int, ...] | None, doubt: str) -> tuple[Verdict, str]:
    if work.problems:
        return Verdict.CONTRADICTED, work.problems[0].problem
    claimed = BACKEND if work.local else STEP
    if claim is None:
        return Verdict.CANNOT_VERIFY, f"{claimed} did not say which GPUs this step has"
    if doubt:
        return Verdict.CANNOT_VERIFY, doubt
    independent = {f"{BACKEND} record", SCONTROL, JOB, NVML}
    if work.local or any(entry.says is Says.AGREES and entry.name in independent for entry in work.sources):
        return Verdict.CONFIRMED, ""
    return Verdict.CANNOT_VERIFY, f"only {claimed} speaks: neither {SCONTROL} nor NVML could be compared"
