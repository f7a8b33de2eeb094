"""The adapter without the package: what it says then. With the package: tests/real/test_transfer_queue.py."""

from __future__ import annotations

import pytest

from relax_slurm.errors import ConfigError
from relax_slurm.workload.publishers import transfer_queue
from relax_slurm.workload.publishers.transfer_queue import TransferQueuePublisher


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_queue, "find_spec", lambda name: None if name == "tensordict" else object())
    with pytest.raises(ConfigError, match=r"needs tensordict, .*relax-slurm\[transferqueue\]"):
        TransferQueuePublisher()
