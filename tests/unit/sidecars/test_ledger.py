"""The ledger behaves like cards: it never holds more than fits, and forgets the dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from relax_slurm.errors import RecoveryRequired
from sidecars import proc
from sidecars.ledger import GIB, NodeLedger, OutOfMemory

TAKER = """
import sys
from pathlib import Path
from sidecars.ledger import NodeLedger, OutOfMemory
ledger = NodeLedger(Path(sys.argv[1]), "node", 100)
for round in range(int(sys.argv[3])):
    try:
        ledger.take(sys.argv[2], [0, 1], 30, f"tag-{round}")
    except OutOfMemory:
        print("full", flush=True)
    else:
        print("taken", flush=True)
        if sys.argv[4] == "give":
            ledger.give(sys.argv[2], [f"tag-{round}"])
print("done", flush=True)
sys.stdin.read()
"""


def taker(folder: Path, owner: str, rounds: int, then: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", TAKER, str(folder), owner, str(rounds), then]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def test_take_and_give(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path / "deep" / "folder", "nodeA")
    assert ledger.capacity == 80 * GIB
    ledger.take("a", [0, 3], 50 * GIB, "weights")
    assert ledger.used_by_gpu([0, 1, 3]) == {0: 50 * GIB, 1: 0, 3: 50 * GIB}
    with pytest.raises(OutOfMemory) as caught:
        ledger.take("b", [1, 3], 40 * GIB)
    assert "GPU 3" in caught.value.message
    assert "a holds 50.00 GiB" in caught.value.message
    assert ledger.used(1) == 0, "all or nothing"
    assert ledger.give("a", ["other tag"]) == 0
    assert ledger.give("b") == 0
    assert ledger.give("a", ["weights"]) == 100 * GIB
    assert ledger.entries() == []


def test_nodes_do_not_share_cards(tmp_path: Path) -> None:
    NodeLedger(tmp_path, "n1", 10).take("a", [0], 10)
    NodeLedger(tmp_path, "n2", 10).take("a", [0], 10)
    assert NodeLedger(tmp_path, "n1").used(0) == 10


@pytest.mark.parametrize("node", ["", "a/b"])
def test_a_node_needs_a_file_name(tmp_path: Path, node: str) -> None:
    with pytest.raises(ValueError, match="ledger file"):
        NodeLedger(tmp_path, node)


def test_only_live_processes_hold_memory(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, "node", 100)
    for pid in (0, -1, 2**22 + 1):
        with pytest.raises(ValueError, match="not a live process"):
            ledger.take("a", [0], 1, pid=pid)
    with pytest.raises(ValueError, match="size"):
        ledger.take("a", [0], -1)


def test_the_dead_hold_nothing(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, "node", 100)
    process = taker(tmp_path, "victim", 3, "keep")
    assert process.stdout is not None
    assert [process.stdout.readline().strip() for _ in range(3)] == ["taken"] * 3
    assert ledger.used(0) == 90
    with pytest.raises(OutOfMemory):
        ledger.take("heir", [0], 60)
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert ledger.used(0) == 0
    ledger.take("heir", [0], 60)
    finish(process)


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, "node", 100)
    ledger.take("a", [0], 7)
    document = json.loads(ledger.path.read_text())
    document["entries"][0]["start_ticks"] += 1
    ledger.path.write_text(json.dumps(document))
    assert ledger.entries() == []


def test_what_is_no_ledger_is_said_so(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, "node", 100)
    ledger.path.write_text('{"entries": [{"gpu"')
    with pytest.raises(RecoveryRequired, match="not a memory ledger"):
        ledger.entries()


def test_concurrent_processes_never_overfill(tmp_path: Path) -> None:
    ledger = NodeLedger(tmp_path, "node", 100)
    takers = [taker(tmp_path, f"owner-{index}", 40, "give") for index in range(5)]

    def read(process: subprocess.Popen[str]) -> list[str]:
        assert process.stdout is not None
        return list(iter(process.stdout.readline, "done\n"))

    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(read, takers))
    assert [len(lines) for lines in outputs] == [40] * 5
    assert sum(lines.count("taken\n") for lines in outputs) > 0
    assert ledger.entries() == []
    for process in takers:
        finish(process)


@settings(max_examples=8)
@given(st.floats(0.0, 0.08))
def test_a_kill_at_any_moment_leaves_a_readable_ledger(delay: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        process = taker(Path(folder), "victim", 100_000, "give")
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay + 0.001)
        process.kill()
        process.wait(30)
        ledger = NodeLedger(Path(folder), "node", 100)
        assert ledger.entries() == []
        ledger.take("heir", [0, 1], 100)
        finish(process)


class LedgerMachine(RuleBasedStateMachine):
    """A ledger against a dictionary."""

    owners = Bundle("owners")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.ledger = NodeLedger(Path(self.folder.name), "node", 100)
        self.model: dict[tuple[str, str, int], int] = {}

    @rule(target=owners, name=st.sampled_from("abc"))
    def owner(self, name: str) -> str:
        return name

    @rule(owner=owners, tag=st.sampled_from("wk"), gpus=st.sets(st.integers(0, 2)), size=st.integers(0, 60))
    def take(self, owner: str, tag: str, gpus: set[int], size: int) -> None:
        fits = all(self.total(gpu) + size <= 100 for gpu in gpus)
        try:
            self.ledger.take(owner, sorted(gpus), size, tag)
        except OutOfMemory:
            assert not fits
        else:
            assert fits
            for gpu in gpus:
                key = (owner, tag, gpu)
                self.model[key] = self.model.get(key, 0) + size

    @rule(owner=owners, tags=st.none() | st.sets(st.sampled_from("wk")))
    def give(self, owner: str, tags: set[str] | None) -> None:
        gone = [key for key in self.model if key[0] == owner and (tags is None or key[1] in tags)]
        assert self.ledger.give(owner, tags) == sum(self.model.pop(key) for key in gone)

    def total(self, gpu: int) -> int:
        return sum(size for key, size in self.model.items() if key[2] == gpu)

    @invariant()
    def agrees(self) -> None:
        totals = self.ledger.used_by_gpu(range(3))
        assert totals == {gpu: self.total(gpu) for gpu in range(3)}
        assert all(used <= 100 for used in totals.values())

    def teardown(self) -> None:
        self.folder.cleanup()


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=25, stateful_step_count=15)


def test_alive_knows_itself_and_no_nonsense() -> None:
    me = proc.info(os.getpid())
    assert me is not None
    assert proc.alive(me.pid, me.start_ticks)
    assert not proc.alive(me.pid, me.start_ticks + 1)
    assert not proc.alive(0, 0)
    assert not proc.alive(-1, 0)
