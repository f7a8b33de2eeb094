"""Every rule of the binding says what to do, and no advice is left without a rule."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from relax_slurm.core import binding
from relax_slurm.core.binding_advice import ADVICE, advice

PLACES = {"Problem": 1, "_plan_problem": 1, "refuse": 3, "_broken": 0}
"""Calls that make a problem, and which argument is its text."""
NAMED = ("problem", "NO_GRES", "NO_IDENTITY")
"""Names that hold such a text."""


def literals() -> list[str]:
    """Every problem text in the source, with 7 for whatever is filled in."""
    found = []
    for path in sorted(Path(binding.__file__).parent.glob("binding*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                at = PLACES.get(name)
                if at is not None and at < len(node.args):
                    found += texts(node.args[at])
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in NAMED:
                found += texts(node.value)
            if isinstance(node, ast.FunctionDef) and node.name == "_fault":
                found += [text for part in ast.walk(node) if isinstance(part, ast.Return) for text in texts(part.value)]
    return sorted(set(found) - {"7: 7"})


def texts(node: ast.expr | None) -> list[str]:
    if isinstance(node, ast.IfExp):
        return [*texts(node.body), *texts(node.orelse)]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return ["".join(part.value if isinstance(part, ast.Constant) else "7" for part in node.values)]  # type: ignore[misc]
    return []


def test_the_texts_are_found() -> None:
    assert len(literals()) > 40
    assert "the node reported nothing" in literals()


@pytest.mark.parametrize("problem", literals())
def test_every_rule_says_what_to_do(problem: str) -> None:
    assert advice(problem), problem


@pytest.mark.parametrize("pattern", [pattern for pattern, _ in ADVICE])
def test_every_row_belongs_to_a_rule(pattern: str) -> None:
    assert any(advice(problem) == dict(ADVICE)[pattern] for problem in literals() if re.search(pattern, problem))


def test_an_unknown_problem_has_no_advice() -> None:
    assert advice("something new") == ""
