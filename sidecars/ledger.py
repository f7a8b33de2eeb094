"""The ledger that stands for the physical cards of one node when there are none.

Simulated engines write down what they hold on which GPU. Like a real card, the ledger refuses what does not
fit and forgets a process the moment it is dead, however it died. Two roles that are resident together by
mistake therefore fail in the way they would fail on hardware: the second one is out of memory.

One JSON file per node, replaced as a whole under a lock, so a kill at any instant leaves the old or the new
content.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from relax_slurm.errors import EngineFailed, RecoveryRequired
from sidecars import proc

GIB = 1 << 30
DEFAULT_CAPACITY = 80 * GIB
"""Bytes per card when nobody says otherwise."""


class OutOfMemory(EngineFailed):
    """What was asked for does not fit on a card; the ledger is unchanged."""

    code = "out_of_memory"


@dataclass(frozen=True, slots=True)
class Entry:
    """Memory that one process holds on one GPU. `tag` is the part of the engine it belongs to."""

    gpu: int
    owner: str
    tag: str
    pid: int
    start_ticks: int
    bytes: int


class NodeLedger:
    """The cards of one node. Any number of processes may use the same directory and node at once."""

    def __init__(self, directory: Path, node: str, capacity: int = DEFAULT_CAPACITY) -> None:
        if not node or "/" in node:
            raise ValueError(f"node {node!r} cannot name a ledger file")
        self._path = Path(directory) / f"{node}.ledger.json"
        self._capacity = capacity

    @property
    def path(self) -> Path:
        """The file; it is JSON and may be looked at while engines run."""
        return self._path

    @property
    def capacity(self) -> int:
        """Bytes per card."""
        return self._capacity

    def take(self, owner: str, gpus: Sequence[int], size: int, tag: str = "", pid: int | None = None) -> None:
        """Write down that `pid` (default: this process) holds `size` more bytes on each of `gpus`, all or
        nothing.

        Raises `OutOfMemory` when one card cannot hold it, and `RecoveryRequired` when the file is not a
        ledger.
        """
        if size < 0:
            raise ValueError(f"size is {size}, wanted 0 or more")
        holder = os.getpid() if pid is None else pid
        found = proc.info(holder) if holder > 0 else None
        if found is None:
            raise ValueError(f"pid {holder} is not a live process and cannot hold memory")
        with self._change() as entries:
            for gpu in gpus:
                used = sum(entry.bytes for entry in entries if entry.gpu == gpu)
                if used + size > self._capacity:
                    raise self._does_not_fit(owner, gpu, size, used, entries)
            entries.extend(Entry(gpu, owner, tag, holder, found.start_ticks, size) for gpu in gpus)

    def give(self, owner: str, tags: Iterable[str] | None = None, pid: int | None = None) -> int:
        """Forget what `owner` holds under `tags` (default: all of it); the number of bytes that became free.

        With `pid`, only what that process holds.
        """
        chosen = None if tags is None else frozenset(tags)

        def leaves(entry: Entry) -> bool:
            same_pid = pid is None or entry.pid == pid
            return entry.owner == owner and same_pid and (chosen is None or entry.tag in chosen)

        with self._change() as entries:
            freed = sum(entry.bytes for entry in entries if leaves(entry))
            entries[:] = [entry for entry in entries if not leaves(entry)]
        return freed

    def used(self, gpu: int) -> int:
        """Bytes that live processes hold on `gpu`."""
        return sum(entry.bytes for entry in self.entries() if entry.gpu == gpu)

    def used_by_gpu(self, gpus: Iterable[int]) -> dict[int, int]:
        """Bytes held on each of `gpus`, in one look: a memory meter for `sidecars.residency`."""
        totals = dict.fromkeys(gpus, 0)
        for entry in self.entries():
            if entry.gpu in totals:
                totals[entry.gpu] += entry.bytes
        return totals

    def entries(self) -> list[Entry]:
        """What live processes hold. Reads without the lock: a reader sees the file before or after a
        change.
        """
        return self._read()

    @contextmanager
    def _change(self) -> Iterator[list[Entry]]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            entries = self._read()
            yield entries
            self._write(entries)
        finally:
            os.close(lock)

    def _read(self) -> list[Entry]:
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return []
        try:
            entries = [Entry(**item) for item in json.loads(raw)["entries"]]
        except (ValueError, TypeError, KeyError) as error:
            raise RecoveryRequired(
                f"{self._path}: not a memory ledger ({error}); stop what runs on this node and delete it"
            ) from error
        is_alive = _remembering(proc.alive)
        return [entry for entry in entries if is_alive(entry.pid, entry.start_ticks)]

    def _write(self, entries: list[Entry]) -> None:
        # One name is enough, because only the holder of the lock writes; a leftover of a killed writer is
        # overwritten.
        fresh = self._path.with_suffix(".new")
        document = {"version": 1, "capacity": self._capacity, "entries": [asdict(entry) for entry in entries]}
        fresh.write_text(json.dumps(document, indent=1) + "\n")
        os.replace(fresh, self._path)

    def _does_not_fit(self, owner: str, gpu: int, size: int, used: int, entries: Iterable[Entry]) -> OutOfMemory:
        held: dict[str, int] = {}
        for entry in entries:
            if entry.gpu == gpu:
                held[entry.owner] = held.get(entry.owner, 0) + entry.bytes
        others = ", ".join(f"{name} holds {_gib(amount)}" for name, amount in held.items()) or "nothing is held"
        return OutOfMemory(
            f"{owner}: out of memory on GPU {gpu}: tried to allocate {_gib(size)}, "
            f"{_gib(self._capacity - used)} of {_gib(self._capacity)} is free ({others}); offload the other "
            "owner first or lower mem_fraction_static",
            detail={"gpu": gpu, "wanted": size, "free": self._capacity - used, "held": held},
        )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _remembering(check: Callable[[int, int], bool]) -> Callable[[int, int], bool]:
    known: dict[tuple[int, int], bool] = {}

    def ask(pid: int, start_ticks: int) -> bool:
        key = (pid, start_ticks)
        if key not in known:
            known[key] = check(pid, start_ticks)
        return known[key]

    return ask
