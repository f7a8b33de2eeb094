# ruff: noqa: T201 - the summary is the output
"""Sends prompts through `/rollout/generate`, so many at a time, and accounts for every one of them.

    python tools/ask_rollout.py prompts.jsonl [--run NAME] [--at-once 64]

The run's gateway and token come from `relax-slurm status`; `--url` and `--token-file` name others. Prints one JSON
document: `prompts` is the sum of `ok` and all `errors`, `ok` the sum of `correct`, `wrong` and `unlabelled`. Nothing is
sent twice. Exit 0 when every prompt was answered with 200, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def agrees(answer: str, label: str) -> bool:
    """Whether the answer's last number is the label, or the texts are equal."""
    found = NUMBER.findall(answer)
    if found and NUMBER.fullmatch(label.strip()):
        return Fraction(found[-1]) == Fraction(label.strip())
    return answer.strip() == label.strip()


def verdict(status: int, body: Any, label: str | None) -> str:
    """What one answer counts as: correct, wrong, unlabelled, or the error's name."""
    if status != 200:
        return f"status {status}"
    if not isinstance(body, dict) or not isinstance(body.get("text"), str):
        return "200 without text"
    if label is None:
        return "unlabelled"
    return "correct" if agrees(body["text"], label) else "wrong"


async def ask_all(
    url: str, token: str | None, rows: list[dict[str, Any]], at_once: int, seconds: float
) -> Counter[str]:
    """A verdict per prompt."""
    counts: Counter[str] = Counter()
    waiting = iter(rows)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)

    async def worker(client: httpx.AsyncClient) -> None:
        for row in waiting:
            body = {"text": row["prompt"], "sampling_params": {"max_new_tokens": 64}}
            try:
                answer = await client.post("/rollout/generate", json=body)
                said = answer.json() if answer.status_code == 200 else None
                counts[verdict(answer.status_code, said, row.get("label"))] += 1
            except (httpx.HTTPError, ValueError) as error:
                counts[type(error).__name__] += 1

    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=seconds, trust_env=False
    ) as client:
        await asyncio.gather(*(worker(client) for _ in range(at_once)))
    return counts


def summary(counts: Counter[str], sent: int, seconds: float) -> dict[str, Any]:
    """The document; AssertionError when a prompt is not accounted for."""
    kinds = {name: counts.pop(name, 0) for name in ("correct", "wrong", "unlabelled")}
    ok = sum(kinds.values())
    assert ok + counts.total() == sent, f"{ok} answers and {counts.total()} errors for {sent} prompts"
    return {"prompts": sent, "ok": ok, **kinds, "errors": dict(sorted(counts.items())), "seconds": round(seconds, 2)}


def read(path: Path) -> list[dict[str, Any]]:
    """The prompts. ValueError names the line that is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
                raise ValueError(f'line {number} has no text under \'prompt\'; write {{"prompt": …, "label": …}}')
            rows.append(row)
    return rows


def gateway(run: str | None) -> tuple[str, Path]:
    """Gateway URL and token file of a run. ValueError when it has none."""
    command = [sys.executable, "-m", "relax_slurm", "status", *([run] if run else []), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ValueError("relax-slurm status did not answer; its words are above")
    state = json.loads(done.stdout)
    if not state.get("gateway_url") or state["state"] not in ("READY", "DEGRADED"):
        raise ValueError(f"run {state['run']!r} is {state['state']}, wanted READY; launch it first")
    return state["gateway_url"], Path(state["token_file"])


def main(words: Sequence[str] | None = None) -> int:
    """Exit 0 when every prompt was answered."""
    parser = argparse.ArgumentParser(description="prompts through /rollout/generate, every answer accounted for")
    parser.add_argument("file", type=Path, metavar="FILE", help='JSON lines {"prompt", "label"}')
    parser.add_argument("--run", default=None, help="name of a run (default: the newest)")
    parser.add_argument("--url", default=None, help="gateway URL instead of a run")
    parser.add_argument("--token-file", type=Path, default=None, help="file with the bearer token, with --url")
    parser.add_argument("--at-once", type=int, default=64, metavar="N", help="requests in flight (default 64)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one answer")
    arguments = parser.parse_args(words)
    if arguments.at_once < 1:
        parser.error(f"--at-once is {arguments.at_once}, wanted 1 or more")
    try:
        rows = read(arguments.file)
        url, token_file = (arguments.url, arguments.token_file) if arguments.url else gateway(arguments.run)
        token = token_file.read_text().strip() if token_file is not None else None
    except (OSError, ValueError) as error:
        print(f"error: {arguments.file}: {error}", file=sys.stderr)
        return 2
    began = time.monotonic()
    counts = asyncio.run(ask_all(url, token, rows, arguments.at_once, arguments.timeout))
    document = summary(counts, len(rows), time.monotonic() - began)
    print(json.dumps(document, indent=2))
    return 0 if document["ok"] == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
