"""The TransferQueue adapter against the package itself, in a Python that has it. No engine is needed.

RELAX_TEST_TRANSFERQUEUE_PYTHON names that Python; it needs TransferQueue 0.1.11 with torch and Ray, and what
relax-slurm itself depends on. A local Ray is started for the test and ended with it.
"""

from __future__ import annotations

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "RELAX_TEST_TRANSFERQUEUE_PYTHON"
PROGRAM = """
    import ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
    import transfer_queue

    from relax_slurm.workload.failures import PartitionMissing, PublishFailed
    from relax_slurm.workload.publishers.transfer_queue import FLAGS, TransferQueuePublisher
    from relax_slurm.workload.samples import Sample, SampleStatus
    from relax_slurm.workload.training_batch import TrainingBatch, convert

    def sample(group, index, length, removed=False):
        made = Sample(group, index, prompt="p", tokens=list(range(3 + length)), response="x", response_length=length)
        made.status, made.label, made.reward, made.remove_sample = SampleStatus.COMPLETED, "42", 0.5, removed
        made.rollout_log_probs = [-0.1] * length
        kept = 0 if removed else length
        made.teacher_log_probs = [-0.5] * kept
        made.teacher_topk_token_ids, made.teacher_topk_log_probs = [[1, 2]] * kept, [[-0.1, -0.2]] * kept
        return made

    def refused(kind, call, *arguments):
        try:
            call(*arguments)
        except kind:
            return
        raise AssertionError(f"{kind.__name__} was due")

    batch = convert(3, [[sample(0, 0, 4), sample(0, 1, 0)], [sample(1, 2, 2, True), sample(1, 3, 1)]], {"run": "r"})
    publisher = TransferQueuePublisher()
    try:
        refused(PartitionMissing, publisher.read, "train_3")
        publisher.put("train_3", batch)
        read = publisher.read("train_3")
        assert (read.number, read.facts, dict(read.kinds)) == (3, batch.facts, dict(batch.kinds))
        for name, values in batch.columns.items():
            assert list(read.columns[name]) == list(values), name
        refused(PublishFailed, publisher.put, "train_3", batch)

        # Rows without the flag are no partition: what a writer leaves that died before it.
        transfer_queue.kv_clear(keys=["train_3"], partition_id=FLAGS)
        refused(PartitionMissing, publisher.read, "train_3")

        publisher.remove("train_3")
        publisher.remove("train_3")
        assert "train_3" not in transfer_queue.get_client().get_partition_list()
        publisher.put("train_3", batch.slice(0, 2))
        assert publisher.read("train_3").columns["sample_index"] == [0, 1]
        publisher.put("train_4", TrainingBatch(4, batch.kinds, {name: [] for name in batch.kinds}, {}))
        assert publisher.read("train_4").rows == 0
    finally:
        transfer_queue.close()
        ray.shutdown()
    print("all of it")
"""


@pytest.fixture(autouse=True)
def _engine() -> None:
    """Unlike its neighbours this one needs no SGLang."""


@pytest.mark.timeout(300)
def test_the_adapter_and_the_package(tmp_path: Path) -> None:
    python = os.environ.get(VARIABLE)
    if python is None:
        pytest.skip(f"{VARIABLE} names no Python with TransferQueue; tools/real/transfer_queue.sh makes one")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"HOME": str(tmp_path), "RAY_DEDUP_LOGS": "0"}
    command = [python, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "all of it" in done.stdout
