"""The plan as a picture in text: one column per bundle, one row per role, one block per phase.

    pool actor: 1 node x 8 GPUs, component 0
      bundle:           0 1 2 3 4 5 6 7
      phase 0  rollout: R R R R R R R R
      phase 1  genrm:   G G G G G G G G

A pool that is too wide for a line is drawn node by node, with equal neighbours folded into one row.
"""

from __future__ import annotations

from dataclasses import dataclass

from relax_slurm.core.plan import InferencePlacementPlan, Mode, PoolPlan, Role, RolePlan

LETTERS = {Role.ROLLOUT: "R", Role.GENRM: "G", Role.TEACHER: "T"}
TRAINING = "#"
PLACEHOLDER = "-"
FREE = "."


@dataclass(frozen=True, slots=True)
class Row:
    """One role (or training) over all bundles of a pool."""

    label: str
    phase: int | None
    cells: str
    """One letter per bundle."""


def picture(plan: InferencePlacementPlan, *, width: int = 100) -> str:
    """The whole picture; lines are at most `width` characters unless one node alone is wider."""
    lines: list[str] = []
    for pool in plan.pools:
        if lines:
            lines.append("")
        lines.extend(_pool(plan, pool, width))
    used = "".join(row.cells for pool in plan.pools for row in rows(plan, pool))
    key = [f"{letter} {role}" for role, letter in LETTERS.items() if letter in used]
    key += [f"{TRAINING} training"] if TRAINING in used else []
    key += [f"{PLACEHOLDER} placeholder"] if PLACEHOLDER in used else []
    lines += ["", f"  {', '.join([*key, f'{FREE} free'])}" + _note(plan)]
    return "\n".join(lines) + "\n"


def rows(plan: InferencePlacementPlan, pool: PoolPlan) -> list[Row]:
    """The rows of one pool, phase by phase; training comes last, since it runs when inference has made room."""
    size = pool.nodes * pool.gpus_per_node
    mine = [role for role in plan.roles if role.pool == pool.name]
    found = [Row(role.role.value, role.phase, _cells(role, size)) for role in mine]
    if plan.training and plan.training.pool == pool.name:
        gpus = plan.training.gpus
        found.append(Row("training", None, TRAINING * gpus + FREE * (size - gpus)))
    return found


def _cells(role: RolePlan, size: int) -> str:
    cells = [FREE] * size
    for model in role.models:
        for replica in model.replicas:
            letter = LETTERS[role.role] if replica.workers else PLACEHOLDER
            for bundle in replica.bundles:
                cells[bundle] = letter
    return "".join(cells)


def _pool(plan: InferencePlacementPlan, pool: PoolPlan, width: int) -> list[str]:
    nodes = f"{pool.nodes} node{'s' if pool.nodes > 1 else ''} x {pool.gpus_per_node}"
    kind = f"{pool.gpu_type} " if pool.gpu_type else ""
    plural = "s" if pool.gpus_per_node > 1 else ""
    title = f"pool {pool.name}: {nodes} {kind}GPU{plural}, component {pool.component}"
    table = rows(plan, pool)
    phased = plan.mode is Mode.DEFER
    heads = [_head(row, phased) for row in table]
    indent = 2 + max([len(head) for head in heads] + [len("bundle:")])
    size = pool.nodes * pool.gpus_per_node
    cell = len(str(size - 1)) + 1
    if indent + cell * size + 2 * (pool.nodes - 1) <= width:
        lines = [title, _line("bundle:", indent, [str(number) for number in range(size)], cell, pool)]
        for head, row in zip(heads, table, strict=True):
            lines.append(_line(head, indent, list(row.cells), cell, pool))
        return lines
    return [title, *_folded(pool, table, heads, indent)]


def _head(row: Row, phased: bool) -> str:
    if not phased:
        return f"{row.label}:"
    phase = "" if row.phase is None else f"phase {row.phase}"
    return f"{phase:8} {row.label}:"


def _line(head: str, indent: int, cells: list[str], cell: int, pool: PoolPlan) -> str:
    step = pool.gpus_per_node
    nodes = ["".join(text.rjust(cell) for text in cells[at : at + step]) for at in range(0, len(cells), step)]
    return "  " + head.ljust(indent - 2) + " |".join(nodes)


def runs_of_nodes(
    plan: InferencePlacementPlan, pool: PoolPlan, *, fold: bool
) -> tuple[list[Row], list[tuple[int, int]]]:
    """The rows of a pool, and its nodes as (first, last) of each run of neighbours that look alike; one each unless
    `fold`."""
    table = rows(plan, pool)
    if not fold:
        return table, [(node, node) for node in range(pool.nodes)]
    return table, _runs(pool, _looks(pool, table))


def _looks(pool: PoolPlan, table: list[Row]) -> list[tuple[str, ...]]:
    step = pool.gpus_per_node
    return [tuple(row.cells[at : at + step] for row in table) for at in range(0, pool.nodes * step, step)]


def _runs(pool: PoolPlan, looks: list[tuple[str, ...]]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    first = 0
    while first < pool.nodes:
        last = first
        while last + 1 < pool.nodes and looks[last + 1] == looks[first]:
            last += 1
        runs.append((first, last))
        first = last + 1
    return runs


def _folded(pool: PoolPlan, table: list[Row], heads: list[str], indent: int) -> list[str]:
    """One block per run of nodes that look alike."""
    step = pool.gpus_per_node
    cell = len(str(step - 1)) + 1
    looks = _looks(pool, table)
    lines: list[str] = []
    for first, last in _runs(pool, looks):
        nodes = f"node {first}" if first == last else f"nodes {first}-{last}, all alike"
        lines.append(f"  {nodes}: bundles {first * step}-{(last + 1) * step - 1}")
        lines.append("  " + "gpu:".ljust(indent - 2) + "".join(str(gpu).rjust(cell) for gpu in range(step)))
        for head, cells in zip(heads, looks[first], strict=True):
            if set(cells) != {FREE}:
                lines.append("  " + head.ljust(indent - 2) + "".join(letter.rjust(cell) for letter in cells))
    return lines


def _note(plan: InferencePlacementPlan) -> str:
    if plan.mode is Mode.DEFER:
        return "; one phase at a time, each ends with an acknowledged offload"
    if plan.mode is Mode.SPLIT:
        return "; training takes its GPUs once inference has offloaded"
    return ""
