"""Writes down the options of an SGLang that is not installed: python -m tests.real.record_options WHEEL > FILE

A wheel comes from `pip download --no-deps sglang==VERSION`. Its server_args.py is read, not run: every call of
`add_argument` with the words that decide how a command line is understood.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from typing import Any

SOURCE = "sglang/srt/server_args.py"
KEPT = ("action", "dest", "nargs", "type", "choices", "const")


def literal(node: ast.expr) -> Any:
    """A constant as it is, a name as its text; None for what only running it would tell."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return node.id if isinstance(node, ast.Name) else None


def options(source: str) -> list[dict[str, Any]]:
    """Each option with its spellings, in the order of the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [literal(word) for word in node.args]
            words = {word.arg: literal(word.value) for word in node.keywords if word.arg in KEPT}
            if names and all(isinstance(name, str) and name.startswith("-") for name in names):
                found.append({"names": names, **{key: value for key, value in words.items() if value is not None}})
    return found


def main(wheel: str) -> None:
    """One option per line, so that a new record shows what has changed."""
    with zipfile.ZipFile(wheel) as archive:
        found = options(archive.read(SOURCE).decode())
    lines = ",\n".join(json.dumps(entry) for entry in sorted(found, key=lambda entry: list(entry["names"])))
    sys.stdout.write(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main(sys.argv[1])
