"""The house keeps its shape: import directions, a pure core, module sizes, slim imports, dependencies with reasons."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("relax_slurm", "sidecars")
FLOORS = {
    "errors": 0,
    "config": 1,
    "forward": 1,
    "children": 1,
    "resources": 1,
    "core": 2,
    "wire": 3,
    "slurm": 3,
    "control": 4,
    "gateway": 4,
    "client": 4,
    "sidecars": 4,
    "workload": 5,
    "cli": 6,
    "__main__": 7,
}
"""Imports go to a lower floor or stay on their own."""
SIDECARS_USE = {"wire", "core", "forward", "slurm", "config", "errors", "sidecars"}
CORE_USES = {
    *("__future__", "bisect", "collections", "dataclasses", "enum", "functools", "hashlib", "ipaddress", "itertools"),
    *("json", "math", "operator", "re", "struct", "sys", "types", "typing"),
    "pydantic",
}
"""What pure code needs. A module with a clock, a socket, a file, a process or randomness has no place here."""
MAX_LINES, REVIEW_LINES = 600, 400
HEAVY = {"torch", "sglang", "transformers", "ray", "submitit", "numpy"}
"""Never imported by merely importing a module of ours; submitit is imported by the submission itself."""


@cache
def modules() -> dict[str, ast.Module]:
    """Path below the root to its tree, of all that is shipped."""
    paths = sorted(path for folder in SHIPPED for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and full name of everything a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            assert node.module is not None
            if node.module == "relax_slurm":
                yield from ((node.lineno, f"relax_slurm.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


def room(name: str) -> str | None:
    """The room of a module; None for what is not ours or belongs to no room (the package's own name)."""
    first, _, rest = name.partition(".")
    if first == "sidecars":
        return first
    part = rest.partition(".")[0]
    return part if first == "relax_slurm" and part and not part.startswith("__version") else None


def owned() -> Iterator[tuple[str, str, int, str]]:
    """Place, room, line and name of every import in a room."""
    for path, tree in modules().items():
        own = room(path.removesuffix(".py").replace("/", "."))
        if own is not None and own != "__init__":
            for line, name in imports(tree):
                yield path, own, line, name


def test_every_room_has_a_floor() -> None:
    rooms = {room(path.removesuffix(".py").replace("/", ".")) for path in modules()} - {None, "__init__"}
    assert rooms <= FLOORS.keys()
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| `(\w+)(?:\.py|/)?`", page, flags=re.MULTILINE)
    assert {name: int(floor) for floor, name in rows} == FLOORS, "docs/architecture.md, Rooms"


def test_imports_go_downwards() -> None:
    wrong = []
    for path, own, line, name in owned():
        target = room(name)
        if target is None:
            continue
        allowed = (
            target in SIDECARS_USE if own == "sidecars" else FLOORS[target] <= FLOORS[own] and target != "sidecars"
        )
        if not allowed:
            wrong.append(f"{path}:{line} {own} imports {name}")
    assert not wrong


def test_the_core_is_pure() -> None:
    wrong = [
        f"{path}:{line} imports {name}"
        for path, own, line, name in owned()
        if own == "core" and room(name) is None and name.partition(".")[0] not in CORE_USES
    ]
    for path, tree in modules().items():
        if path.startswith("relax_slurm/core/"):
            wrong += [
                f"{path}:{node.lineno} calls {node.func.id}"
                for node in ast.walk(tree)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"open", "input"}
            ]
    assert not wrong


@pytest.mark.filterwarnings("default:over .* lines:UserWarning")
def test_modules_are_small() -> None:
    sizes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in modules()}
    review = sorted(path for path, lines in sizes.items() if lines > REVIEW_LINES)
    if review:
        warnings.warn(f"over {REVIEW_LINES} lines, look for a second subject: {', '.join(review)}", stacklevel=1)
    assert not {path: lines for path, lines in sizes.items() if lines > MAX_LINES}


# --- what is imported at run time -------------------------------------------------------------------------------


def imported_by(*words: str) -> set[str]:
    """Every module that a fresh Python imports."""
    command = [sys.executable, "-X", "importtime", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize(
    "module",
    [
        "relax_slurm.cli.launch",
        "relax_slurm.control.supervisor",
        "relax_slurm.control.head",
        "relax_slurm.control.gateway_process",
        "relax_slurm.client.inference",
    ],
)
def test_the_head_node_stays_slim(module: str) -> None:
    seen = imported_by("-c", f"import {module}")
    assert module in seen
    assert not {name for name in seen if name.partition(".")[0] in {*HEAVY, "sidecars"}}


def test_a_sidecar_needs_no_model_library() -> None:
    assert not {name for name in imported_by("-c", "import sidecars.node") if name.partition(".")[0] in HEAVY}


def test_the_version_costs_next_to_nothing() -> None:
    seen = imported_by("-m", "relax_slurm", "--version")
    ours = {name for name in seen if name.startswith("relax_slurm")}
    assert ours <= {"relax_slurm", "relax_slurm.__main__"}
    costly = {"argparse", "asyncio", "json", "typing", "pydantic", "zmq", "yaml", "rich", "uvloop", "subprocess"}
    assert not seen & costly - imported_by("-c", "pass")


# --- dependencies -----------------------------------------------------------------------------------------------


def normal(requirement: str) -> str:
    """The name in a requirement, in PyPI's normal form."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def project() -> dict[str, object]:
    """The project table of pyproject.toml."""
    table: dict[str, object] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


def listed(title: str, column: int) -> list[str]:
    """Names in one column of the table under a heading of docs/dependencies.md."""
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    part = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in part.splitlines() if line.startswith("|")][2:]
    return [row[column].strip().strip("`") for row in rows]


def test_every_runtime_dependency_has_a_reason() -> None:
    table = project()
    assert listed("At run time", 1) == sorted(normal(entry) for entry in table["dependencies"])  # type: ignore[attr-defined]


def test_every_extra_has_a_reason() -> None:
    extras: dict[str, list[str]] = project()["optional-dependencies"]  # type: ignore[assignment]
    shown = list(zip(listed("Extras", 1), listed("Extras", 2), strict=True))
    assert sorted(shown) == sorted((name, normal(entry)) for name in extras if name != "dev" for entry in extras[name])
    assert listed("For development", 1) == sorted(normal(entry) for entry in extras["dev"])


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    declared = {normal(entry) for entry in project()["dependencies"]}  # type: ignore[attr-defined]
    extras: dict[str, list[str]] = project()["optional-dependencies"]  # type: ignore[assignment]
    optional = {normal(entry) for name, entries in extras.items() if name != "dev" for entry in entries}
    names = {"yaml": "pyyaml", "zmq": "pyzmq", "transfer_queue": "transferqueue"}
    used = set()
    for tree in modules().values():
        for _, name in imports(tree):
            top = name.partition(".")[0]
            if top not in SHIPPED and top not in sys.stdlib_module_names:
                used.add(names.get(top, top))
    assert used <= declared | optional
    assert declared - used <= {"httpx"}, "httpx is for scripts beside a run; anything else unused has no place"
