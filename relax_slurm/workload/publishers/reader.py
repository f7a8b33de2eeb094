"""Reads partitions of the shared file system. Everything is checked against the manifest before a row is handed out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from relax_slurm.errors import RelaxError
from relax_slurm.workload.failures import PartitionDamaged, PartitionMissing
from relax_slurm.workload.publishers.base import PREFIX
from relax_slurm.workload.publishers.formats import format_of, load
from relax_slurm.workload.publishers.shared_fs import MANIFEST, MANIFEST_VERSION
from relax_slurm.workload.training_batch import Kind, TrainingBatch, joined


class _File(BaseModel):
    model_config = ConfigDict(frozen=True)
    name: str = Field(pattern=r"^part-\d{5}\.[a-z]+$")
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str


class Manifest(BaseModel):
    """What a partition says of itself."""

    model_config = ConfigDict(frozen=True)

    version: int
    partition: str
    batch: int
    format: str
    rows: int
    columns: dict[str, Kind]
    files: list[_File]
    facts: dict[str, Any] = Field(default_factory=dict)


def partitions(root: Path) -> list[str]:
    """Names of all whole partitions, in the order of their batches."""
    names = (path.name for path in root.glob(f"{PREFIX}*") if path.name.removeprefix(PREFIX).isdigit())
    return sorted(names, key=lambda name: int(name.removeprefix(PREFIX)))


def manifest_of(root: Path, partition: str) -> Manifest:
    """The manifest. PartitionMissing or PartitionDamaged."""
    path = root / partition / MANIFEST
    try:
        manifest = Manifest.model_validate(json.loads(_bytes(path)))
    except (ValidationError, ValueError, RecursionError) as error:
        raise PartitionDamaged(f"{path}: not a manifest ({str(error).splitlines()[0]}); make the batch again") from None
    if manifest.version != MANIFEST_VERSION or manifest.partition != partition:
        raise PartitionDamaged(
            f"{path}: is version {manifest.version} of {manifest.partition}, wanted version {MANIFEST_VERSION} of "
            f"{partition}; was the folder renamed?"
        )
    if sum(file.rows for file in manifest.files) != manifest.rows:
        raise PartitionDamaged(f"{path}: its files have other rows than {manifest.rows}; make the batch again")
    return manifest


def read_parts(root: Path, partition: str) -> Iterator[TrainingBatch]:
    """The partition file by file, each checked: for readers that do not want all of it in memory."""
    manifest = manifest_of(root, partition)
    try:
        form = format_of(manifest.format, manifest.columns)
    except RelaxError as error:
        raise PartitionDamaged(f"{root / partition}: format {manifest.format}: {error.message}") from None
    for file in manifest.files:
        path = root / partition / file.name
        data = _bytes(path)
        if len(data) != file.bytes or sha256(data).hexdigest() != file.sha256:
            raise PartitionDamaged(
                f"{path}: has {len(data)} bytes and another checksum than its manifest ({file.bytes} bytes); "
                "the file system changed it, make the batch again"
            )
        try:
            columns = load(form, data, manifest.columns, file.rows)
        except ValueError as error:
            raise PartitionDamaged(f"{path}: {error}; make the batch again") from None
        yield TrainingBatch(manifest.batch, manifest.columns, columns, manifest.facts)


def read_partition(root: Path, partition: str) -> TrainingBatch:
    """The whole batch. PartitionMissing or PartitionDamaged. Ask `wait_committed` first: that is the permission."""
    parts = list(read_parts(root, partition))
    if parts:
        return joined(parts)
    manifest = manifest_of(root, partition)
    return TrainingBatch(manifest.batch, manifest.columns, {name: [] for name in manifest.columns}, manifest.facts)


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise PartitionMissing(
            f"{path}: is not there; was the partition cleared, or is this another run's folder?"
        ) from None
    except OSError as error:
        raise PartitionDamaged(f"{path}: cannot be read ({error.strerror or error})") from None
