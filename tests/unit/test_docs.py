"""What the pages show is true: marked blocks run, command lines parse, targets and paths exist, generated pages match.

A block under `<!-- test: run -->` is executed, in the order of its page, against one live run of
configs/quickstart.yaml on this machine. Every other `sh` block, and every command in the text, is read: it must name
verbs, arguments, targets and files that are there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from relax_slurm.__main__ import VERBS

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^(?P<mark><!-- test: run -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
PLACEHOLDERS = {"RUN": "quickstart", "CONFIG": "configs/quickstart.yaml", "PROMPTS.jsonl": "prompts.jsonl"}
BUILT = ("plan", "launch", "status", "top", "logs", "stop", "batch")


def blocks(page: Path, kinds: set[str], *, marked: bool) -> list[str]:
    """The page's blocks of these kinds."""
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [match["text"] for match in found if match["kind"] in kinds and bool(match["mark"]) is marked]


def commands(page: Path) -> Iterator[list[str]]:
    """Words of every simple command in the page's `sh` blocks, and of inline code that is one of ours."""
    lines = []
    for marked in (False, True):
        for text in blocks(page, {"sh"}, marked=marked):
            lines += text.replace("\\\n", " ").splitlines()
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    lines += re.findall(r"`((?:relax-slurm|make|python -m|python tools/)[^`]*)`", prose)
    for line in lines:
        for part in re.split(r"&&|\||;", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a piece of a quoted text with ; or | in it
                continue
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield [PLACEHOLDERS.get(word, word) for word in words]


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser that `relax-slurm VERB` uses; it raises instead of ending the process."""
    parser = argparse.ArgumentParser(prog=verb, exit_on_error=False)
    import_module(f"relax_slurm.cli.{verb}").add_arguments(parser)
    for flag in ("--json", "--debug"):
        parser.add_argument(flag, action="store_true")
    return parser


def check_ours(words: list[str]) -> None:
    """`relax-slurm …` must be a verb with arguments that it takes, and a run file that is there."""
    if not words or words == ["--version"]:
        return
    verb, rest = words[0], words[1:]
    assert verb in VERBS, f"relax-slurm {verb}: no such verb"
    if verb not in BUILT or rest == ["--help"] or "VERB" in verb:
        return
    known, unknown = parser_of(verb).parse_known_args(rest or [PLACEHOLDERS["CONFIG"]])
    assert not unknown, f"relax-slurm {verb}: {unknown}"
    if hasattr(known, "config"):
        assert (ROOT / known.config).exists(), known.config


def targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def check(words: list[str]) -> None:
    """One command line names what there is. Commands that are not ours are left alone."""
    head, rest = words[0].rpartition("/")[2], words[1:]
    if head == "relax-slurm":
        check_ours(rest)
    elif head == "make":
        wanted = {word for word in rest if re.fullmatch(r"[a-z]+", word)}
        assert wanted <= targets(), f"make {wanted - targets()}"
    elif head in {"python", "python3"} and rest[:2] == ["-m", "relax_slurm"]:
        check_ours(rest[2:])
    elif head in {"python", "python3"} and rest[:1] == ["-m"]:
        assert rest[1] in {"venv", "pip", "pytest", "mypy", "ruff"} or find_spec(rest[1]) is not None, rest[1]
    elif head in {"python", "python3"} and rest and rest[0].endswith(".py"):
        assert (ROOT / rest[0]).exists(), rest[0]
        flags = {word for word in rest[1:] if word.startswith("--")}
        assert all(flag in (ROOT / rest[0]).read_text(encoding="utf-8") for flag in flags), f"{rest[0]}: {flags}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_command_lines_are_possible(page: Path) -> None:
    for words in commands(page):
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    missing = [link for link in links if not (page.parent / link).exists()]
    named = re.findall(r"(?<![\w/.{-])((?:docs|tools|configs|tests|relax_slurm|sidecars|sbatch)/[\w./-]*\w)", text)
    missing += [name for name in named if not (ROOT / name).exists()]
    inside = re.findall(r"`((?:core|wire|slurm|control|gateway|client|forward|config)/\w+\.py)`", text)
    missing += [name for name in inside if not (ROOT / "relax_slurm" / name).exists()]
    assert not missing


def test_the_readme_begins_with_the_two_commands() -> None:
    first = blocks(ROOT / "README.md", {"sh"}, marked=False)[0]
    assert [line.split()[:2] for line in first.splitlines()] == [["make", "quickstart"], ["make", "test"]]


def test_the_readme_tells_of_every_row() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What works")[2]
    rows = set(re.findall(r"\b([LDGEPBRV]\d+)\b (?!\()", text))
    wanted = {"L": 6, "D": 5, "G": 4, "E": 11, "P": 3, "B": 5, "R": 4, "V": 5}
    assert rows >= {f"{letter}{number}" for letter, last in wanted.items() for number in range(1, last + 1)}


def test_every_page_is_linked_from_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert not [page.name for page in (ROOT / "docs").glob("*.md") if f"(docs/{page.name})" not in text]


@pytest.mark.parametrize("words", [["tools/state_machines.py"], ["-m", "relax_slurm.config.reference"]], ids=str)
def test_generated_pages_are_up_to_date(words: list[str]) -> None:
    done = subprocess.run([sys.executable, *words, "--check"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0, f"run: make docs ({' '.join(words)})"


# --- pages against the code ---------------------------------------------------------------------------------------


def table(page: str, title: str) -> list[list[str]]:
    """Cells of the table under a heading of a page."""
    part = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_all_exit_codes_are_explained() -> None:
    codes = {int(code) for row in table("operations.md", "Exit codes") for code in row[0].split(",")}
    assert codes == {*range(10), 130, 143}


# --- a live run ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Environment of a shell in which a run of configs/quickstart.yaml is the newest one."""
    folder = tmp_path_factory.mktemp("docs")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RELAX_", "SLURM_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    environment = {**kept, "RELAX_RUNS_ROOT": str(folder / "runs"), "PATH": path, "no_proxy": "*", "HOME": str(folder)}
    run = [sys.executable, "-m", "relax_slurm"]
    launch = [*run, "launch", "configs/quickstart.yaml", "--backend", "local"]
    try:
        subprocess.run(launch, cwd=ROOT, env=environment, check=True, timeout=60)
        yield environment
    finally:
        subprocess.run([*run, "stop"], cwd=ROOT, env=environment, check=False, timeout=100)


def executed(environment: dict[str, str], *words: str) -> str:
    """A command's output, in a folder that has the checkout's tools."""
    folder = Path(environment["HOME"])
    for name in ("tools", "configs"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_readme_runs(live: dict[str, str]) -> None:
    outputs = []
    shells = blocks(ROOT / "README.md", {"sh"}, marked=True)
    assert len(shells) == 2
    for text in shells:
        outputs.append(executed(live, "bash", "-euo", "pipefail", "-c", text))
    assert '"input_token_logprobs"' in outputs[0]
    assert '"response":"1"' in outputs[0]
    assert '"schema_version":2' in outputs[0]
    counted = json.loads(outputs[1])
    assert counted["prompts"] == counted["ok"] == counted["correct"] + counted["wrong"] == 200
    assert counted["correct"] > counted["wrong"]
    (program,) = blocks(ROOT / "README.md", {"python"}, marked=True)
    assert executed(live, sys.executable, "-c", program).strip() == "42"


def test_the_direct_client_of_the_docs_runs(live: dict[str, str]) -> None:
    (program,) = blocks(ROOT / "docs" / "discovery.md", {"python"}, marked=True)
    rest = """
import asyncio, json, subprocess, sys
from pathlib import Path
state = json.loads(subprocess.check_output([sys.executable, "-m", "relax_slurm", "status", "--json"]))
token = Path(state["token_file"]).read_text().strip()
key = (Path(state["run_dir"]) / "keys" / "engine.token").read_text().strip()
print(asyncio.run(ask(state["gateway_url"], token, key)))
"""
    assert executed(live, sys.executable, "-c", program + rest).strip().lstrip("-").isdigit()


def test_the_state_document_has_the_keys_of_the_page(live: dict[str, str]) -> None:
    state = json.loads(executed(live, "relax-slurm", "status", "--json"))
    shown = {key for row in table("operations.md", "Status") for key in re.findall(r"`(\w+)`", row[0])}
    assert shown == state.keys()
    for name in ("nodes", "replicas"):
        (row,) = [row for row in table("operations.md", "Status") if row[0] == f"`{name}`"]
        assert set(re.findall(r"`(\w+)`", row[1])) == state[name][0].keys()


def test_the_run_directory_has_the_files_of_the_page(live: dict[str, str]) -> None:
    folder = Path(json.loads(executed(live, "relax-slurm", "status", "--json"))["run_dir"])
    shown = {row[0].strip("`").rstrip("/") for row in table("operations.md", "Run directory")}
    there = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    there |= {f"../{path.name}" for path in folder.parent.iterdir() if not path.name.startswith((".", "attempt_"))}
    assert there - shown <= {"../epoch.lock"}
    assert shown - there <= {"outcome.json", "partitions"}


@pytest.mark.parametrize(
    "line",
    [
        "relax-slurm launhc configs/split.yaml",
        "relax-slurm launch configs/nowhere.yaml",
        "relax-slurm stop --hard",
        "make everything",
        "python tools/nothing.py",
        "python tools/ask_rollout.py p.jsonl --twice",
        "python -m relax_slurm.nothing",
    ],
)
def test_an_untrue_line_is_seen(line: str) -> None:
    with pytest.raises((AssertionError, argparse.ArgumentError)):
        check(shlex.split(line))
