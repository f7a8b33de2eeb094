"""Reads answers of `/generate`: text, ids, log-probs, versions. Pure; whatever does not fit is a ValueError.

SGLang tells log-probs as lists of `[logprob, token id, text or null]`, the first input one with `null` for a log-prob
(there is nothing before it), and candidates of a position as a list of those.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def meta_of(answer: Any) -> Mapping[str, Any]:
    """`meta_info` of one answer."""
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise ValueError(f"the answer has no meta_info, seen {str(answer)[:80]}")
    return meta


def finish_type(meta: Mapping[str, Any]) -> str:
    """`stop`, `length` or `abort`."""
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if not isinstance(kind, str):
        raise ValueError(f"finish_reason is {reason!r:.80}, wanted an object with a type")
    return kind


def rows_of(meta: Mapping[str, Any], name: str) -> list[Any]:
    """One of the log-prob lists."""
    rows = meta.get(name)
    if not isinstance(rows, list):
        raise ValueError(f"{name} is {str(rows)[:60]}, wanted a list; was return_logprob sent?")
    return rows


def entry(row: Any, name: str, place: int) -> tuple[float, int]:
    """Log-prob and token id of one entry."""
    if not isinstance(row, Sequence) or isinstance(row, str) or len(row) < 2:
        raise ValueError(f"{name}[{place}] is {str(row)[:60]}, wanted [logprob, token id, text]")
    value, token = row[0], row[1]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}[{place}] has the log-prob {value!r:.40}, wanted a finite number")
    if type(token) is not int or token < 0:
        raise ValueError(f"{name}[{place}] has the token id {token!r:.40}, wanted a whole number from 0 on")
    return float(value), token


def ids_of(rows: Sequence[Any], name: str) -> list[int]:
    """Token ids of a log-prob list, whose first log-prob may be null."""
    found = []
    for place, row in enumerate(rows):
        if not isinstance(row, Sequence) or len(row) < 2 or type(row[1]) is not int or row[1] < 0:
            raise ValueError(f"{name}[{place}] is {str(row)[:60]}, wanted [logprob, token id, text]")
        found.append(row[1])
    return found


def log_probs(rows: Sequence[Any], name: str, wanted_ids: Sequence[int]) -> list[float]:
    """Log-probs of a list that must be about exactly these tokens."""
    if len(rows) != len(wanted_ids):
        raise ValueError(f"{name} has {len(rows)} values, wanted {len(wanted_ids)}")
    found = []
    for place, (row, wanted) in enumerate(zip(rows, wanted_ids, strict=True)):
        value, token = entry(row, name, place)
        if token != wanted:
            raise ValueError(f"{name}[{place}] is about token {token}, wanted {wanted}: another tokenizer?")
        found.append(value)
    return found


def top_rows(rows: Sequence[Any], name: str, length: int, width: int) -> tuple[list[list[int]], list[list[float]]]:
    """[length, width] ids and log-probs of the likeliest tokens per position."""
    if len(rows) != length:
        raise ValueError(f"{name} has {len(rows)} positions, wanted {length}")
    ids: list[list[int]] = []
    values: list[list[float]] = []
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) < width:
            raise ValueError(f"{name}[{place}] has {_count(row)} candidates, wanted {width}")
        pairs = [entry(candidate, f"{name}[{place}]", rank) for rank, candidate in enumerate(row[:width])]
        ids.append([token for _, token in pairs])
        values.append([value for value, _ in pairs])
    return ids, values


def chosen_rows(rows: Sequence[Any], name: str, wanted: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-probs of the wanted ids of every position, out of rows that hold more ids than these."""
    if len(rows) != len(wanted):
        raise ValueError(f"{name} has {len(rows)} positions, wanted {len(wanted)}")
    found = []
    for place, (row, ids) in enumerate(zip(rows, wanted, strict=True)):
        if not isinstance(row, list):
            raise ValueError(f"{name}[{place}] is {str(row)[:60]}, wanted a list of candidates")
        known = {token: value for value, token in (entry(one, f"{name}[{place}]", i) for i, one in enumerate(row))}
        missing = [token for token in ids if token not in known]
        if missing:
            raise ValueError(f"{name}[{place}] does not tell of token {missing[0]}, which was asked for")
        found.append([known[token] for token in ids])
    return found


def versions_of(meta: Mapping[str, Any]) -> list[str]:
    """Weight versions that wrote the answer, in order, without repetition; empty when none is known.

    `weight_versions` tells of spans (an update may fall into a generation), `weight_version` of the last one.
    """
    spans = meta.get("weight_versions")
    told: list[Any] = []
    if isinstance(spans, list):
        told = [span.get("version") if isinstance(span, dict) else span for span in spans]
    if not told:
        told = [meta.get("weight_version")]
    found: list[str] = []
    for version in told:
        text = str(version) if isinstance(version, str | int) and not isinstance(version, bool) else ""
        if not text:
            return []
        if not found or found[-1] != text:
            found.append(text)
    return found


def _count(row: Any) -> str:
    return str(len(row)) if isinstance(row, list) else "no"
