"""What NVML says about this node's GPUs, through the optional package `nvidia-ml-py` (module `pynvml`).

NVML ignores CUDA_VISIBLE_DEVICES but obeys cgroups: under ConstrainDevices it enumerates only the step's
devices, from 0.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from relax_slurm.core.report import ForeignProcess, GpuDevice

MAX_DEVICES = 1024


def load() -> tuple[Any | None, str]:
    """The initialised `pynvml` module, or None with the reason why there is none."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, f"NVML did not start: {error}"
    return nvml, ""


def read_devices(
    own_pids: Collection[int] = (), *, nvml: Any | None = None
) -> tuple[tuple[GpuDevice, ...] | None, str]:
    """All devices in NVML's order, MIG slices in place of their card; or None and why there is no NVML.

    `own_pids` are processes of ours whose memory is not foreign. `nvml` is the module to ask, for recorded
    data.
    """
    reason = ""
    if nvml is None:
        nvml, reason = load()
    if nvml is None:
        return None, reason
    try:
        found = list(_devices(nvml, own_pids))
    except nvml.NVMLError as error:
        return None, f"NVML stopped answering: {error}"
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return tuple(found), ""


def memory_meter(
    visible: Sequence[str], indexes: Sequence[int], *, nvml: Any | None = None
) -> Callable[[Sequence[int]], Mapping[int, int]] | None:
    """What measures the used bytes of an engine's GPUs, by physical index; None when there is no NVML.

    `visible` is the engine's mask: an ordinal in it counts in NVML's own enumeration, with cgroups and without.
    """
    if nvml is None:
        nvml, _ = load()
    if nvml is None or len(visible) != len(indexes):
        return None
    mask = dict(zip(indexes, visible, strict=True))

    def measure(gpus: Sequence[int]) -> Mapping[int, int]:
        return {gpu: int(_memory(nvml, _handle(nvml, mask[gpu])).used) for gpu in gpus if gpu in mask}

    return measure


def _handle(nvml: Any, visible: str) -> Any:
    if visible.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(visible))
    return nvml.nvmlDeviceGetHandleByUUID(visible)


def _devices(nvml: Any, own_pids: Collection[int]) -> Iterator[GpuDevice]:
    ordinal = 0
    for position in range(min(nvml.nvmlDeviceGetCount(), MAX_DEVICES)):
        card = nvml.nvmlDeviceGetHandleByIndex(position)
        slices = _mig_slices(nvml, card)
        parent = _text(nvml.nvmlDeviceGetUUID(card)) if slices else None
        for handle in slices or [card]:
            yield _device(nvml, handle, ordinal, own_pids, parent)
            ordinal += 1


def _mig_slices(nvml: Any, card: Any) -> list[Any]:
    """Handles of a card's MIG slices; empty for a card without MIG."""
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(card)
        if not current:
            return []
        places = nvml.nvmlDeviceGetMaxMigDeviceCount(card)
    except nvml.NVMLError:  # cards that know no MIG answer "not supported"
        return []
    found = []
    for place in range(places):
        with suppress(nvml.NVMLError):  # an unused place answers "not found"
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(card, place))
    return found


def _device(nvml: Any, handle: Any, ordinal: int, own_pids: Collection[int], parent: str | None) -> GpuDevice:
    memory = _memory(nvml, handle)
    own, foreign = 0, []
    for process in _processes(nvml, handle):
        used = process.usedGpuMemory  # None where the driver may not tell
        if process.pid in own_pids:
            own += used or 0
        else:
            foreign.append(ForeignProcess(pid=process.pid, memory=used))
    return GpuDevice(
        ordinal=ordinal,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_total=int(memory.total),
        memory_used=int(memory.used),
        own_memory=own,
        foreign=tuple(foreign[:256]),
        mig_parent=parent,
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Memory without the driver's reserve (second version of the call), or with it on old drivers."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
    return nvml.nvmlDeviceGetMemoryInfo(handle)


def _processes(nvml: Any, handle: Any) -> list[Any]:
    """Compute processes on a device; empty where the driver does not list them (used memory still counts)."""
    try:
        return list(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return []


def _text(value: str | bytes) -> str:
    """Old versions of the package return bytes."""
    return value.decode() if isinstance(value, bytes) else value
