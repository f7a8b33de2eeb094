"""Partitions on disk: whole or absent, whatever happens while they are written, and checked when they are read."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.errors import ConfigError
from relax_slurm.workload.failures import PartitionDamaged, PartitionMissing, PublishFailed
from relax_slurm.workload.publishers import formats
from relax_slurm.workload.publishers.reader import manifest_of, partitions, read_partition, read_parts
from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
from relax_slurm.workload.training_batch import Kind, TrainingBatch

NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
WHOLE = st.integers(-(2**63), 2**63 - 1)
CELLS: dict[Kind, Any] = {
    Kind.INT: WHOLE,
    Kind.FLOAT: NUMBERS,
    Kind.INTS: st.lists(WHOLE, max_size=4),
    Kind.FLOATS: st.lists(NUMBERS, max_size=4),
    Kind.INT_ROWS: st.lists(st.tuples(WHOLE, WHOLE).map(list), max_size=3),
    Kind.FLOAT_ROWS: st.lists(st.tuples(NUMBERS).map(list), max_size=3),
    Kind.JSON: st.recursive(st.none() | st.booleans() | WHOLE | st.text(max_size=5), lambda x: st.lists(x, max_size=3)),
}


@st.composite
def batches(draw: Any, max_rows: int = 7) -> TrainingBatch:
    rows = draw(st.integers(0, max_rows))
    kinds = {str(kind): kind for kind in Kind}
    columns = {name: draw(st.lists(CELLS[kind], min_size=rows, max_size=rows)) for name, kind in kinds.items()}
    return TrainingBatch(draw(st.integers(0, 99)), kinds, columns, {"run": "r"})


def small(rows: int = 5) -> TrainingBatch:
    columns = {"tokens": [[row] * row for row in range(rows)], "reward": [row / 3 for row in range(rows)]}
    return TrainingBatch(4, {"tokens": Kind.INTS, "reward": Kind.FLOAT}, columns, {"run": "r"})


@pytest.mark.parametrize("form", ["msgpack", "safetensors"])
@given(batch=batches(), per_file=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_what_is_written_is_read(form: str, batch: TrainingBatch, per_file: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        publisher = SharedFilesystem(Path(name) / "deep" / "root", file_format=form, rows_per_file=per_file)
        publisher.write("train_4", batch)
        read = read_partition(publisher.root, "train_4")
        assert read == batch
        assert [part.rows for part in read_parts(publisher.root, "train_4")] == [
            min(per_file, batch.rows - start) for start in range(0, batch.rows, per_file)
        ]


class Crash(BaseException):
    """The writer is gone."""


STEPS = ["folder", "part 0", "part 1", "part 2", "manifest", "sync", "rename", "named"]


@given(step=st.sampled_from(STEPS))
@settings(max_examples=24, deadline=None)
def test_a_crash_at_any_step_leaves_all_or_nothing(step: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)

        def crash(seen: str) -> None:
            if seen == step:
                raise Crash

        with pytest.raises(Crash):
            SharedFilesystem(root, rows_per_file=2, step=crash).write("train_4", small())
        assert partitions(root) == (["train_4"] if step == "named" else [])
        if step == "named":
            assert read_partition(root, "train_4") == small()
            return
        with pytest.raises(PartitionMissing):
            read_partition(root, "train_4")
        SharedFilesystem(root).write("train_4", small())
        assert read_partition(root, "train_4") == small()


@pytest.mark.parametrize("step", STEPS)
def test_a_killed_writer_leaves_all_or_nothing(tmp_path: Path, step: str) -> None:
    program = f"""
        import os, signal
        from pathlib import Path
        from relax_slurm.workload.publishers.shared_fs import SharedFilesystem
        from tests.unit.workload.publishers.test_shared_fs import small
        def step(seen):
            if seen == {step!r}:
                os.kill(os.getpid(), signal.SIGKILL)
        SharedFilesystem(Path({str(tmp_path)!r}), rows_per_file=2, step=step).write("train_4", small())
    """
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=root, check=False, timeout=60)
    assert done.returncode == -9
    assert partitions(tmp_path) == (["train_4"] if step == "named" else [])
    SharedFilesystem(tmp_path).remove("train_4")
    assert list(tmp_path.iterdir()) == []
    SharedFilesystem(tmp_path).write("train_4", small())
    assert [path.name for path in tmp_path.iterdir()] == ["train_4"]


def test_it_is_private_and_written_once(tmp_path: Path) -> None:
    publisher = SharedFilesystem(tmp_path / "p")
    asyncio.run(publisher.publish("train_4", small()))
    assert (tmp_path / "p").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "p" / "train_4" / "manifest.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(PublishFailed, match="is there already"):
        publisher.write("train_4", small())
    asyncio.run(publisher.clear("train_4"))
    asyncio.run(publisher.clear("train_4"))
    assert partitions(tmp_path / "p") == []


def test_partitions_are_in_the_order_of_batches(tmp_path: Path) -> None:
    for name in ("train_10", "train_9", "train_0"):
        SharedFilesystem(tmp_path).write(name, small(0))
    (tmp_path / "train_x").mkdir()
    (tmp_path / ".train_3.ab.partial").mkdir()
    assert partitions(tmp_path) == ["train_0", "train_9", "train_10"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishFailed, match=r"batch\.publisher\.root"):
        SharedFilesystem(tmp_path / "file" / "root").write("train_1", small())
    bad = TrainingBatch(1, {"x": Kind.INT}, {"x": ["one"]})
    with pytest.raises(PublishFailed, match="cannot be written"):
        SharedFilesystem(tmp_path).write("train_1", bad)
    uneven = TrainingBatch(1, {"x": Kind.INT_ROWS}, {"x": [[[1, 2], [1]]]})
    with pytest.raises(PublishFailed, match="different numbers"):
        SharedFilesystem(tmp_path).write("train_1", uneven)
    assert partitions(tmp_path) == []


@pytest.mark.parametrize("form", ["msgpack", "safetensors"])
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_changed_byte_is_seen(form: str, data: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        SharedFilesystem(root, file_format=form, rows_per_file=3).write("train_4", small())
        path = data.draw(st.sampled_from(sorted((root / "train_4").glob("part-*"))))
        raw = bytearray(path.read_bytes())
        place = data.draw(st.integers(0, len(raw) - 1))
        raw[place] ^= data.draw(st.integers(1, 255))
        path.write_bytes(raw)
        with pytest.raises(PartitionDamaged, match="checksum"):
            read_partition(root, "train_4")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "{",
        lambda text: "[]",
        lambda text: text.replace('"version": 1', '"version": 2'),
        lambda text: text.replace('"partition": "train_4"', '"partition": "train_5"'),
        lambda text: text.replace('"rows": 5', '"rows": 6', 1),
        lambda text: text.replace("part-00000.msgpack", "../../secret.msgpack"),
        lambda text: text.replace('"format": "msgpack"', '"format": "pickle"'),
        lambda text: text.replace('"tokens": "ints"', '"tokens": "int_rows"'),
        lambda text: text.replace('"tokens": "ints"', '"tokens": "arrays"'),
    ],
)
def test_a_wrong_manifest_is_seen(tmp_path: Path, change: Any) -> None:
    SharedFilesystem(tmp_path).write("train_4", small())
    path = tmp_path / "train_4" / "manifest.json"
    text = path.read_text()
    assert change(text) != text
    path.write_text(change(text))
    with pytest.raises(PartitionDamaged, match="train_4"):
        read_partition(tmp_path, "train_4")


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    SharedFilesystem(tmp_path).write("train_4", small())
    manifest = manifest_of(tmp_path, "train_4")
    assert (manifest.rows, manifest.batch, manifest.facts) == (5, 4, {"run": "r"})
    os.unlink(tmp_path / "train_4" / manifest.files[0].name)
    with pytest.raises(PartitionMissing, match="was the partition cleared"):
        read_partition(tmp_path, "train_4")


def test_a_file_that_holds_something_else() -> None:
    kinds = {"x": Kind.INT}
    for form in (formats.format_of("msgpack", kinds), formats.format_of("safetensors", kinds)):
        for data in (b"\x01", form.dump({}), form.dump({"x": {"data": b"\0" * 8}})):
            with pytest.raises(ValueError, match=r".+"):
                formats.load(form, data, kinds, 2)


def test_formats_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="wanted msgpack or safetensors"):
        SharedFilesystem(Path("/x"), file_format="pickle")
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"relax-slurm\[publishers\]"):
        SharedFilesystem(Path("/x"), file_format="safetensors")


def test_safetensors_are_arrays_for_any_reader(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    SharedFilesystem(tmp_path, file_format="safetensors").write("train_4", small())
    tensors = load_file(tmp_path / "train_4" / "part-00000.safetensors")
    assert tensors["reward"].tolist() == [row / 3 for row in range(5)]
    assert tensors["tokens.lengths"].tolist() == list(range(5))
    assert tensors["tokens"].tolist() == [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]
    assert json.loads((tmp_path / "train_4" / "manifest.json").read_text())["format"] == "safetensors"
