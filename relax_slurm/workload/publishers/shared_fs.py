"""Partitions on the shared file system: a folder each, there as a whole or not at all.

    <root>/train_7/manifest.json          what is in it: rows, columns, files with sizes and SHA-256
    <root>/train_7/part-00000.msgpack     up to ROWS_PER_FILE rows

A writer makes the folder under a hidden name and renames it last, so that a crash at any step leaves a reader nothing
to see. Taking one away is the reverse: renamed first, then removed. Everything is on disk before the name is.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Any

from relax_slurm.workload.failures import PartitionExists, PublishFailed
from relax_slurm.workload.publishers.formats import dump, format_of
from relax_slurm.workload.training_batch import TrainingBatch

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
ROWS_PER_FILE = 1024


class SharedFilesystem:
    """Writes partitions below `root`. `step` is told every step as it begins, for tests that crash there."""

    def __init__(
        self,
        root: Path,
        *,
        file_format: str = "msgpack",
        rows_per_file: int = ROWS_PER_FILE,
        step: Callable[[str], None] = lambda step: None,
    ) -> None:
        format_of(file_format, {})  # a format that is not there is told before a batch is made
        self.root = root
        self._format = file_format
        self._rows_per_file = rows_per_file
        self._step = step

    async def publish(self, partition: str, batch: TrainingBatch) -> None:
        """Part of Publisher. A partition of this name that is there already is refused."""
        await asyncio.to_thread(self.write, partition, batch)

    async def clear(self, partition: str) -> None:
        """Part of Publisher."""
        await asyncio.to_thread(self.remove, partition)

    def write(self, partition: str, batch: TrainingBatch) -> None:
        """`publish`, blocking."""
        try:
            self._write(partition, batch)
        except OSError as error:
            raise PublishFailed(
                f"{self.root / partition}: cannot be written ({error.strerror or error}); "
                "free space there or choose another folder with batch.publisher.root"
            ) from error
        except (TypeError, ValueError, OverflowError) as error:
            raise PublishFailed(f"{self.root / partition}: a column cannot be written ({error})") from error

    def remove(self, partition: str) -> None:
        """`clear`, blocking. What a crashed writer left of this partition goes too."""
        gone = self.root / f".{partition}.{token_hex(4)}.cleared"
        with contextlib.suppress(FileNotFoundError):
            (self.root / partition).rename(gone)
            _sync_folder(self.root)
        self._sweep(partition)

    def _write(self, partition: str, batch: TrainingBatch) -> None:
        final = self.root / partition
        self._step("folder")
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if final.exists():
            raise PartitionExists(f"{final}: is there already and stays; remove it if nobody needs it")
        self._sweep(partition)
        partial = self.root / f".{partition}.{token_hex(4)}.partial"
        partial.mkdir(mode=0o700)
        try:
            files = [self._part(partial, number, batch) for number in range(-(-batch.rows // self._rows_per_file))]
            self._step("manifest")
            _write_file(partial / MANIFEST, json.dumps(self._manifest(partition, batch, files), indent=1).encode())
            self._step("sync")
            _sync_folder(partial)
            self._step("rename")
            partial.rename(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):  # another producer was faster
                raise PartitionExists(f"{final}: was written by somebody else meanwhile") from None
            raise
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._step("named")
        _sync_folder(self.root)

    def _part(self, folder: Path, number: int, batch: TrainingBatch) -> dict[str, Any]:
        self._step(f"part {number}")
        rows = batch.slice(number * self._rows_per_file, (number + 1) * self._rows_per_file)
        form = format_of(self._format, batch.kinds)
        data = dump(form, rows)
        name = f"part-{number:05d}.{form.suffix}"
        _write_file(folder / name, data)
        return {"name": name, "rows": rows.rows, "bytes": len(data), "sha256": sha256(data).hexdigest()}

    def _manifest(self, partition: str, batch: TrainingBatch, files: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "version": MANIFEST_VERSION,
            "partition": partition,
            "batch": batch.number,
            "format": self._format,
            "rows": batch.rows,
            "columns": dict(batch.kinds),
            "files": files,
            "facts": dict(batch.facts),
        }

    def _sweep(self, partition: str) -> None:
        """Remove what is left of unfinished writes and removals of this partition; it has one producer."""
        for leftover in self.root.glob(f".{partition}.*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_file(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot; their rename is durable by itself
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
