"""Which part of a borrowed allocation a run uses, and how several runs in one allocation keep apart.

An allocation may be larger than the plan: more nodes, more GPUs per node, another number of components. Nodes are taken
in Slurm's order, on each of them the lowest stretch of GPUs that no other run of ours has. Steps overlap, so Slurm
itself would give the same GPUs to two runs; therefore every run writes its share down, and holds a lock on it for as
long as its supervisor lives. A share without a supervisor still counts while Slurm shows steps of that run, or cannot
be asked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError

from relax_slurm.control.run_dir import write_atomically
from relax_slurm.core.plan import InferencePlacementPlan
from relax_slurm.errors import StartupFailed

FOLDER = ".borrowed"
BOOK_SECONDS = 30.0
"""How long another run of the same allocation may take to write its share down."""


class Share(BaseModel):
    """What one run uses of an allocation: GPU ordinals (positions among the allocation's GPUs) by node."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str
    label: str
    """End of the names of the run's steps."""
    gpus: dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A part of the allocation for a plan."""

    nodes: tuple[tuple[str, ...], ...]
    """Node names per component of the *plan*."""
    first_gpu: dict[str, int]
    """Ordinal of the first GPU used, by node."""
    gpus: dict[str, tuple[int, ...]]


def step_label(run: str, attempt: int) -> str:
    """Marks the steps of a run in an allocation that others use too."""
    return f"-{run}.{attempt}"


def choose(
    plan: InferencePlacementPlan,
    components: Sequence[Sequence[str]],
    gpu_counts: Mapping[str, int],
    shares: Collection[Share],
    head: str | None,
) -> Choice:
    """The first part of the allocation that carries the plan and that no share touches.

    `components` are the allocation's nodes by its own components; `gpu_counts` says how many GPUs it has on each node,
    where that is known. `head` is the node we run on. StartupFailed, with the numbers, when there is no such part.
    """
    taken: dict[str, set[int]] = {}
    for share in shares:
        for node, ordinals in share.gpus.items():
            taken.setdefault(node, set()).update(ordinals)
    every = [node for names in components for node in names]
    alike = len(components) == len(plan.components)
    nodes: list[tuple[str, ...]] = []
    first_gpu: dict[str, int] = {}
    gpus: dict[str, tuple[int, ...]] = {}
    for component in plan.components:
        if component.index == plan.head_component:
            nodes.append((head if head in every else every[0],))
            continue
        size = component.gpus_per_node
        found: dict[str, int] = {}
        for names in (components[component.index], every) if alike else (every,):
            free = {node: _stretch(size, gpu_counts.get(node, size), taken.get(node, ())) for node in names}
            found = {node: start for node, start in free.items() if start is not None and node not in first_gpu}
            if len(found) >= component.nodes:
                break
        if len(found) < component.nodes:
            raise _too_small(
                plan, components, gpu_counts, shares, f"{component.nodes} nodes with {size} GPUs", len(found)
            )
        mine = tuple(found)[: component.nodes]
        nodes.append(mine)
        for node in mine:
            first_gpu[node] = found[node]
            gpus[node] = tuple(range(found[node], found[node] + size))
    return Choice(tuple(nodes), first_gpu, gpus)


def _stretch(size: int, count: int, taken: Collection[int]) -> int | None:
    """Start of the lowest `size` free ordinals in a row."""
    run = 0
    for ordinal in range(count):
        run = 0 if ordinal in taken else run + 1
        if run == size:
            return ordinal - size + 1
    return None


def _too_small(
    plan: InferencePlacementPlan,
    components: Sequence[Sequence[str]],
    gpu_counts: Mapping[str, int],
    shares: Collection[Share],
    wanted: str,
    found: int,
) -> StartupFailed:
    sizes = " + ".join(str(len(names)) for names in components)
    counts = sorted({gpu_counts[node] for names in components for node in names if node in gpu_counts})
    gpus = f" with {' or '.join(map(str, counts))} GPUs" if counts else ""
    others = f"; runs {', '.join(sorted(share.run for share in shares))} use a part of it" if shares else ""
    return StartupFailed(
        f"the allocation has {sizes} nodes{gpus}, the plan of {plan.run} wants {wanted} more and {found} are free"
        f"{others}; borrow a larger allocation, stop another run, or make the plan smaller"
    )


class ShareBook:
    """The shares of one allocation, in `<runs root>/.borrowed/<job id>/`."""

    def __init__(self, root: Path, job_id: str, run: str) -> None:
        self._folder = root / FOLDER / job_id
        self._run = run
        self._held: FileLock | None = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Held while shares are read and one is added. StartupFailed when another run holds it for too long."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(str(self._folder / "book.lock"))
        try:
            lock.acquire(timeout=BOOK_SECONDS)
        except Timeout:
            raise StartupFailed(
                f"{lock.lock_file} was held for {BOOK_SECONDS:g} s by another run of this allocation; try again"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def others(self, living: Collection[str] | None) -> list[Share]:
        """Shares of other runs that are in use.

        `living`: the names of all steps in the allocation; None when Slurm could not be asked, then all shares count.
        """
        found = []
        for path in sorted(self._folder.glob("*.json")):
            if path.stem == self._run:
                continue
            try:
                share = Share.model_validate_json(path.read_text())
            except (OSError, ValidationError) as error:
                raise StartupFailed(f"{path} cannot be read ({error}); remove it if that run has ended") from None
            steps = living is None or any(name.endswith(share.label) for name in living)
            if steps or self._supervised(path):
                found.append(share)
        return found

    def take(self, share: Share) -> None:
        """Write our share down and hold it until this process ends."""
        path = self._folder / f"{self._run}.json"
        self._held = FileLock(str(path.with_suffix(".lock")))
        try:
            self._held.acquire(timeout=0)
        except Timeout:
            raise StartupFailed(f"run {self._run!r} is in this allocation already; stop it first") from None
        write_atomically(path, share.model_dump_json() + "\n")

    def _supervised(self, path: Path) -> bool:
        lock = FileLock(str(path.with_suffix(".lock")))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False
