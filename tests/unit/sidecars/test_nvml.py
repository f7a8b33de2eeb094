"""NVML through recorded answers: the module's functions as `nvidia-ml-py` has them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sidecars import nvml as subject
from sidecars.nvml import read_devices

GIB = 1 << 30


class NvmlFault(Exception):
    """Stands for pynvml.NVMLError."""


@dataclass
class Card:
    """What one card answers."""

    uuid: str | bytes
    used: int = 0
    processes: list[tuple[int, int | None]] | None = field(default_factory=list)
    slices: list[Card | None] = field(default_factory=list)
    knows_mig: bool = True


@dataclass
class Recorded:
    """The functions of pynvml that the code calls, answering from `cards`."""

    cards: list[Card]
    start: str = ""
    second_version: bool = True
    shut: int = 0
    NVMLError: type[Exception] = NvmlFault
    nvmlMemory_v2: int = 33554472

    def nvmlInit(self) -> None:
        if self.start:
            raise NvmlFault(self.start)

    def nvmlShutdown(self) -> None:
        self.shut += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str | bytes:
        if card.uuid == "lost":
            raise NvmlFault("GPU is lost")
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> Any:
        if version is not None and not self.second_version:
            raise NvmlFault("Function Not Found")
        reserve = 0 if version is not None else GIB  # the first version counts the driver's reserve as used
        return SimpleNamespace(total=80 * GIB, used=card.used + reserve)

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:
        if card.processes is None:
            raise NvmlFault("Insufficient Permissions")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if not card.knows_mig:
            raise NvmlFault("Not Supported")
        return [int(bool(card.slices)), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return len(card.slices)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        found = card.slices[index]
        if found is None:
            raise NvmlFault("Not Found")
        return found


def test_devices_in_order_with_own_and_foreign_memory() -> None:
    cards = [
        Card("GPU-a", 30 * GIB, [(10, 20 * GIB), (11, 10 * GIB)]),
        Card(b"GPU-b", 5 * GIB, [(12, None)], knows_mig=False),
        Card("GPU-c", GIB, None),
    ]
    recorded = Recorded(cards)
    found, reason = read_devices({10}, nvml=recorded)
    assert reason == ""
    assert found is not None
    assert [(device.ordinal, device.uuid, device.memory_used) for device in found] == [
        (0, "GPU-a", 30 * GIB),
        (1, "GPU-b", 5 * GIB),
        (2, "GPU-c", GIB),
    ]
    assert found[0].own_memory == 20 * GIB
    assert [(entry.pid, entry.memory) for entry in found[0].foreign] == [(11, 10 * GIB)]
    assert [(entry.pid, entry.memory) for entry in found[1].foreign] == [(12, None)]
    assert found[2].foreign == ()
    assert all(device.index is None for device in found)  # NVML does not know Slurm's index
    assert recorded.shut == 1


def test_old_driver_without_the_second_memory_call() -> None:
    found, _ = read_devices(nvml=Recorded([Card("GPU-a")], second_version=False))
    assert found is not None
    assert found[0].memory_used == GIB


def test_mig_slices_stand_in_place_of_their_card() -> None:
    cards = [Card("GPU-a", slices=[Card("MIG-1"), None, Card("MIG-2")]), Card("GPU-b")]
    found, _ = read_devices(nvml=Recorded(cards))
    assert found is not None
    assert [(device.ordinal, device.uuid, device.mig_parent) for device in found] == [
        (0, "MIG-1", "GPU-a"),
        (1, "MIG-2", "GPU-a"),
        (2, "GPU-b", None),
    ]


def test_a_lost_gpu_gives_a_reason_and_no_half_list() -> None:
    recorded = Recorded([Card("GPU-a"), Card("lost")])
    assert read_devices(nvml=recorded) == (None, "NVML stopped answering: GPU is lost")
    assert recorded.shut == 1


def test_no_gpu_is_not_the_same_as_no_nvml() -> None:
    assert read_devices(nvml=Recorded([])) == ((), "")


def test_package_or_driver_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_devices() == (None, "nvidia-ml-py is not installed")
    monkeypatch.setitem(sys.modules, "pynvml", Recorded([], start="Driver Not Loaded"))
    assert subject.load() == (None, "NVML did not start: Driver Not Loaded")
    monkeypatch.setitem(sys.modules, "pynvml", Recorded([Card("GPU-a")]))
    found, _ = read_devices()
    assert found is not None
    assert found[0].uuid == "GPU-a"
