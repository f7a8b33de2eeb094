"""One file with the columns of some rows: msgpack, or safetensors where that extra is installed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol

import msgpack

from relax_slurm.errors import ConfigError
from relax_slurm.workload.publishers.columns import Buffers, pack_column, unpack_column
from relax_slurm.workload.training_batch import Kind, TrainingBatch


class Format(Protocol):
    """Columns to the bytes of a file, and back."""

    suffix: str

    def dump(self, columns: Mapping[str, Buffers]) -> bytes:
        """The file."""

    def load(self, data: bytes) -> Mapping[str, Buffers]:
        """The columns; ValueError when it is not such a file."""


class Msgpack:
    """`{column: {buffer: bytes}}`."""

    suffix = "msgpack"

    def dump(self, columns: Mapping[str, Buffers]) -> bytes:
        """Part of Format."""
        return bytes(msgpack.packb(columns))

    def load(self, data: bytes) -> Mapping[str, Buffers]:
        """Part of Format."""
        value = msgpack.unpackb(data)
        if not isinstance(value, dict):
            raise ValueError("not a file of columns")
        return value


class Safetensors:
    """Tensors `column` (int64, float64; JSON as uint8), `column.lengths` and `column.widths`: arrays for any reader."""

    suffix = "safetensors"

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self._kinds = kinds

    def dump(self, columns: Mapping[str, Buffers]) -> bytes:
        """Part of Format."""
        import numpy
        from safetensors.numpy import save

        tensors: dict[str, Any] = {}
        for name, buffers in columns.items():
            for part, data in buffers.items():
                tensors[_tensor(name, part)] = numpy.frombuffer(data, self._type(name, part))
        return bytes(save(tensors))

    def load(self, data: bytes) -> Mapping[str, Buffers]:
        """Part of Format."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ValueError(str(error)) from None
        found: dict[str, Buffers] = {}
        for name in self._kinds:
            parts = {part: tensors.get(_tensor(name, part)) for part in ("data", "lengths", "widths")}
            found[name] = {part: tensor.tobytes() for part, tensor in parts.items() if tensor is not None}
        return found

    def _type(self, name: str, part: str) -> str:
        if part != "data" or self._kinds[name] in (Kind.INT, Kind.INTS, Kind.INT_ROWS):
            return "<i8"
        return "u1" if self._kinds[name] is Kind.JSON else "<f8"


def _tensor(name: str, part: str) -> str:
    return name if part == "data" else f"{name}.{part}"


def format_of(name: str, kinds: Mapping[str, Kind]) -> Format:
    """The format of this name; ConfigError when what it needs is not installed."""
    if name == Msgpack.suffix:
        return Msgpack()
    if name != Safetensors.suffix:
        raise ConfigError(f"batch.publisher.format: {name!r} is not known, wanted msgpack or safetensors")
    if find_spec("safetensors") is None or find_spec("numpy") is None:
        raise ConfigError(
            "batch.publisher.format: safetensors needs the packages safetensors and numpy, which are not installed; "
            "install relax-slurm[publishers] or use msgpack"
        )
    return Safetensors(kinds)


def dump(form: Format, batch: TrainingBatch) -> bytes:
    """A slice of a batch as a file."""
    return form.dump({name: pack_column(kind, batch.columns[name]) for name, kind in batch.kinds.items()})


def load(form: Format, data: bytes, kinds: Mapping[str, Kind], rows: int) -> dict[str, list[Any]]:
    """Columns of a file. ValueError when something is missing or does not fit."""
    columns = form.load(data)
    try:
        return {name: unpack_column(kind, columns[name], rows) for name, kind in kinds.items()}
    except (KeyError, TypeError) as error:
        raise ValueError(f"a column is missing or ill-typed: {error}") from None
