"""The plan's picture as SVG: the same rows as `picture`, a square per bundle, nodes apart, equal nodes folded.

Self-contained: no script, no style sheet, no font but the reader's own, so that a page may carry it inline.
"""

from __future__ import annotations

from html import escape

from relax_slurm.cli.picture import FREE, LETTERS, PLACEHOLDER, TRAINING, Row, runs_of_nodes
from relax_slurm.core.plan import InferencePlacementPlan, Mode, PoolPlan, Role

CELL, GAP, NODE_GAP, ROW = 18, 2, 10, 24
LEFT, MARGIN, TITLE = 150, 16, 26
COLOURS = {
    LETTERS[Role.ROLLOUT]: "#4878a8",
    LETTERS[Role.GENRM]: "#c8553d",
    LETTERS[Role.TEACHER]: "#588b58",
    TRAINING: "#8a8a8a",
    PLACEHOLDER: "#d8c9a8",
    FREE: "#f0f0f0",
}
NAMES = {**{letter: role.value for role, letter in LETTERS.items()}, TRAINING: "training", PLACEHOLDER: "placeholder"}
MAX_COLUMNS = 64
"""Bundles that are drawn side by side; a wider pool is drawn as runs of nodes that look alike."""


def svg(plan: InferencePlacementPlan) -> str:
    """The whole picture as one SVG document."""
    parts: list[str] = []
    top, width = MARGIN, 0
    used: set[str] = set()
    for pool in plan.pools:
        top, right = _pool(plan, pool, top, parts, used)
        width = max(width, right)
    top, right = _key(top, parts, used)
    width = max(width, right) + MARGIN
    title = escape(f"{plan.run}: {plan.mode}")
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + MARGIN}" width="{width}" '
        f'height="{top + MARGIN}" role="img" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f"<title>{title}</title>", *parts, "</svg>"]) + "\n"


def _pool(plan: InferencePlacementPlan, pool: PoolPlan, top: int, parts: list[str], used: set[str]) -> tuple[int, int]:
    """Draws a pool; answers where the next one begins and how far right this one went."""
    kind = f" {pool.gpu_type}" if pool.gpu_type else ""
    title = f"pool {pool.name}: {pool.nodes} x {pool.gpus_per_node}{kind} GPUs, component {pool.component}"
    parts.append(_text(MARGIN, top + 14, title, weight="bold"))
    top += TITLE
    table, runs = runs_of_nodes(plan, pool, fold=pool.nodes * pool.gpus_per_node > MAX_COLUMNS)
    left = MARGIN + LEFT
    for first, last in runs:
        name = f"node {first}" if first == last else f"nodes {first}-{last}"
        parts.append(_text(left, top + 12, name))
        left += max(pool.gpus_per_node * (CELL + GAP), 8 * len(name)) + NODE_GAP
    right = left
    top += ROW - 6
    for row in table:
        parts.append(_text(MARGIN, top + 13, _label(plan, row)))
        left = MARGIN + LEFT
        for first, last in runs:
            name = f"node {first}" if first == last else f"nodes {first}-{last}"
            cells = row.cells[first * pool.gpus_per_node : (first + 1) * pool.gpus_per_node]
            for gpu, cell in enumerate(cells):
                used.add(cell)
                bundle = first * pool.gpus_per_node + gpu
                hint = f"bundle {bundle}: {NAMES.get(cell, 'free')}"
                parts.append(
                    f'<rect x="{left + gpu * (CELL + GAP)}" y="{top}" width="{CELL}" height="{CELL}" rx="2" '
                    f'fill="{COLOURS[cell]}"><title>{escape(hint)}</title></rect>'
                )
            left += max(pool.gpus_per_node * (CELL + GAP), 8 * len(name)) + NODE_GAP
        top += ROW
    return top + 8, right


def _label(plan: InferencePlacementPlan, row: Row) -> str:
    phase = f"phase {row.phase}  " if plan.mode is Mode.DEFER and row.phase is not None else ""
    return f"{phase}{row.label}"


def _key(top: int, parts: list[str], used: set[str]) -> tuple[int, int]:
    left = MARGIN
    for cell, name in NAMES.items():
        if cell in used:
            parts.append(f'<rect x="{left}" y="{top}" width="{CELL}" height="{CELL}" rx="2" fill="{COLOURS[cell]}"/>')
            parts.append(_text(left + CELL + 6, top + 13, name))
            left += CELL + 20 + 8 * len(name)
    return top + ROW, left


def _text(x: int, y: int, words: str, *, weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" font-weight="{weight}" fill="#222">{escape(words)}</text>'
