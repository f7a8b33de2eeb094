"""Runs in SGLang's own Python: reads command lines as JSON, prints what SGLang's parser makes of them, and its options.

stdin: a list of lists of words. stdout: {"options": {dest: [spellings]}, "parsed": [{dest: value} or an error]}.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from typing import Any

from sglang.srt.server_args import ServerArgs


def parsed(parser: argparse.ArgumentParser, words: list[str]) -> dict[str, Any] | str:
    """The options of one command line, or what the parser says against it."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return vars(parser.parse_args(words))
    except SystemExit:
        return said.getvalue().strip().splitlines()[-1]


def main() -> None:
    """One answer to one question."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    lines = json.load(sys.stdin)
    document = {
        "options": {action.dest: action.option_strings for action in parser._actions},
        "parsed": [parsed(parser, words) for words in lines],
    }
    json.dump(document, sys.stdout, default=str)


main()
