"""Columns to bytes and back, without an array library.

Numbers are little-endian: whole ones of 64 bits (`<i8`), others `<f8`. A ragged column is its values in one piece
and the lengths of its rows; a column of rows [length, K] has K per sample besides. Reading refuses what does not fit
together, so that a damaged file cannot become a shorter batch.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from relax_slurm.workload.training_batch import Kind

Buffers = dict[str, bytes]
_INTEGER = frozenset({Kind.INT, Kind.INTS, Kind.INT_ROWS})


def pack_column(kind: Kind, values: Sequence[Any]) -> Buffers:
    """The buffers of one column: `data`, and where they are due `lengths` and `widths`."""
    if kind is Kind.JSON:
        return {"data": json.dumps(list(values), ensure_ascii=False, allow_nan=False).encode()}
    if kind in (Kind.INT, Kind.FLOAT):
        return {"data": _pack(kind, values)}
    if kind in (Kind.INTS, Kind.FLOATS):
        flat = [value for row in values for value in row]
        return {"data": _pack(kind, flat), "lengths": _pack(Kind.INT, [len(row) for row in values])}
    widths = [len(row[0]) if row else 0 for row in values]
    if any(len(entry) != width for row, width in zip(values, widths, strict=True) for entry in row):
        raise ValueError("a row has candidates of different numbers")
    return {
        "data": _pack(kind, [value for row in values for entry in row for value in entry]),
        "lengths": _pack(Kind.INT, [len(row) for row in values]),
        "widths": _pack(Kind.INT, widths),
    }


def unpack_column(kind: Kind, buffers: Mapping[str, bytes], rows: int) -> list[Any]:
    """The column's `rows` entries. ValueError when the buffers do not fit together."""
    if kind is Kind.JSON:
        values = json.loads(buffers["data"])
        if not isinstance(values, list) or len(values) != rows:
            raise ValueError(f"a column has no list of {rows} entries")
        return values
    flat = _unpack(kind, buffers["data"])
    if kind in (Kind.INT, Kind.FLOAT):
        if len(flat) != rows:
            raise ValueError(f"a column has {len(flat)} entries, wanted {rows}")
        return flat
    lengths = _unpack(Kind.INT, buffers["lengths"])
    ragged = kind in (Kind.INTS, Kind.FLOATS)
    widths = [1] * rows if ragged else _unpack(Kind.INT, buffers["widths"])
    due = sum(length * width for length, width in zip(lengths, widths, strict=True))
    if len(lengths) != rows or len(flat) != due or min([0, *lengths, *widths]) < 0:
        raise ValueError(f"a column has {len(lengths)} rows and {len(flat)} values, wanted {rows} and {due}")
    found: list[Any] = []
    at = 0
    for length, width in zip(lengths, widths, strict=True):
        part = flat[at : at + length * width]
        found.append(part if ragged else [part[place : place + width] for place in range(0, len(part), width or 1)])
        at += length * width
    return found


def _pack(kind: Kind, values: Sequence[Any]) -> bytes:
    packed = array("q" if kind in _INTEGER else "d", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpack(kind: Kind, data: bytes) -> list[Any]:
    packed = array("q" if kind in _INTEGER else "d")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
