"""The rules of leases and batches, one by one."""

from __future__ import annotations

import pytest

from relax_slurm.config.load import load
from relax_slurm.core import lifecycle, placement
from relax_slurm.core.batch import BatchState
from relax_slurm.core.lease import LeaseState, sharing
from relax_slurm.core.lifecycle import Lifecycle, Move, Work
from relax_slurm.core.lifecycle_errors import (
    BatchFailed,
    BatchPending,
    MoveFailed,
    MoveTimedOut,
    NoSuchBatch,
    NoSuchHolder,
    NotRecovered,
    NotSleeping,
    OperationRetired,
    OperationReused,
    OperationUnderWay,
    OutOfOrder,
    ReleaseUnconfirmed,
)
from relax_slurm.core.operations import Ask, Method, Operation, Progress

M, S = Method, LeaseState
HELD = {"rollout": ("policy/replica-0",)}


class Stage:
    """A lifecycle whose works end well at once, unless a test wants them to stay under way."""

    def __init__(self, config: str = "defer") -> None:
        self.of = Lifecycle(sharing(placement.plan(load(f"configs/{config}.yaml"))))
        self.works: list[Work] = []
        self.now = 0.0
        self._ids = 0

    def ask(
        self,
        method: Method,
        batch: int | None = 1,
        holder: str | None = None,
        *,
        id: str | None = None,
        unproven: dict[str, tuple[str, ...]] | None = None,
        error: str = "",
    ) -> Operation:
        """Ask, and leave the work under way."""
        self._ids += 1
        operation, work = self.of.ask(
            Ask(id or f"op-{self._ids}", method, batch, holder, error), self.now, unproven or {}
        )
        if work is not None:
            self.works.append(work)
        return operation

    def done(self, method: Method, batch: int | None = 1, holder: str | None = None, **more: str) -> Operation:
        """Ask, and let the work end well."""
        operation = self.ask(method, batch, holder, **more)  # type: ignore[arg-type]
        if operation.progress is Progress.RUNNING:
            assert self.of.settle(operation.id)
        return operation

    def generated(self, batch: int = 1) -> Stage:
        """Rollout has generated and is off its GPUs."""
        self.done(M.BEGIN_BATCH, batch)
        self.done(M.OFFLOAD_ROLLOUT, batch)
        self.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED, batch)
        return self

    def committed(self, batch: int = 1) -> Stage:
        """A whole batch without scoring."""
        self.generated(batch).done(M.COMMIT_BATCH, batch)
        return self

    def states(self) -> dict[str, str]:
        return {name: str(lease.state) for name, lease in self.of.leases.items() if lease.state is not S.SLEEPING}


def test_a_batch_from_begin_to_commit() -> None:
    stage = Stage()
    assert stage.states() == {}
    stage.done(M.BEGIN_BATCH)
    assert stage.states() == {"rollout": "ACTIVE"}
    stage.done(M.OFFLOAD_ROLLOUT)
    assert stage.states() == {"rollout": "ACTIVE"}, "the lease stays until the release is acknowledged"
    stage.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    for role in ("genrm", "teacher"):
        stage.done(M.ACTIVATE, 1, role)
        assert stage.states() == {role: "ACTIVE"}
        stage.done(M.DEACTIVATE, 1, role)
    stage.done(M.BEGIN_STUDENT_SCORING)
    stage.done(M.ONLOAD_ROLLOUT)
    stage.done(M.OFFLOAD_ROLLOUT)
    stage.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    assert stage.of.verdict(1).state is BatchState.PENDING
    stage.done(M.COMMIT_BATCH)
    assert stage.of.verdict(1).state is BatchState.COMMITTED
    moves = [(work.holder, work.move) for work in stage.works]
    turn = [Move.ONLOAD, Move.OFFLOAD]
    assert moves == [(who, move) for who in ("rollout", "genrm", "teacher", "rollout") for move in turn]
    stage.done(M.ACTIVATE, 1, "training")
    assert stage.states() == {"training": "ACTIVE"}
    with pytest.raises(NotSleeping, match="training is ACTIVE"):
        stage.ask(M.BEGIN_BATCH, 2)
    stage.done(M.DEACTIVATE, 1, "training")
    stage.done(M.BEGIN_BATCH, 2)


def test_nobody_gets_gpus_that_somebody_uses() -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH)
    with pytest.raises(NotSleeping, match="activate genrm of batch 1 is refused: rollout is ACTIVE, wanted SLEEPING"):
        stage.ask(M.ACTIVATE, 1, "genrm")
    stage.generated()
    stage.ask(M.ACTIVATE, 1, "genrm")
    with pytest.raises(NotSleeping, match="genrm is ONLOADING"):
        stage.ask(M.ACTIVATE, 1, "teacher")
    with pytest.raises(NotSleeping, match="genrm is ONLOADING"):
        stage.ask(M.BEGIN_STUDENT_SCORING)
    with pytest.raises(NotSleeping, match="genrm is ONLOADING"):
        stage.ask(M.COMMIT_BATCH)


def test_the_book_does_not_suffice_against_the_evidence() -> None:
    stage = Stage().generated()
    with pytest.raises(NotSleeping, match="no release is proven of policy/replica-0"):
        stage.ask(M.ACTIVATE, 1, "genrm", unproven=HELD)
    with pytest.raises(NotSleeping, match="no release is proven of judge/replica-0"):
        Stage().ask(M.BEGIN_BATCH, 1, unproven={"genrm": ("judge/replica-0",)})


def test_a_release_is_acknowledged_with_evidence_only() -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH)
    stage.ask(M.OFFLOAD_ROLLOUT)
    with pytest.raises(OperationUnderWay, match="rollout is being moved"):
        stage.ask(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    stage.of.settle(stage.works[-1].operation)
    with pytest.raises(ReleaseUnconfirmed, match="release unconfirmed of policy/replica-0"):
        stage.ask(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED, unproven=HELD)
    assert stage.states() == {"rollout": "ACTIVE"}
    stage.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    stage.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    assert stage.states() == {}


def test_repeats_are_no_ops() -> None:
    stage = Stage()
    begun = stage.ask(M.BEGIN_BATCH)
    assert stage.ask(M.BEGIN_BATCH) is begun, "the same work under another id"
    assert stage.ask(M.BEGIN_BATCH, id=begun.id) is begun
    stage.of.settle(begun.id)
    assert stage.ask(M.BEGIN_BATCH).progress is Progress.DONE
    assert len(stage.works) == 1
    stage.generated()
    woken = stage.ask(M.ACTIVATE, 1, "genrm")
    assert stage.ask(M.ACTIVATE, 1, "genrm") is woken
    stage.of.settle(woken.id)
    stage.done(M.ACTIVATE, 1, "genrm")
    stage.done(M.DEACTIVATE, 1, "genrm")
    stage.done(M.DEACTIVATE, 1, "genrm")
    stage.done(M.COMMIT_BATCH)
    stage.done(M.COMMIT_BATCH)
    stage.done(M.BEGIN_BATCH)
    stage.committed(2).done(M.COMMIT_BATCH, 1)
    assert stage.states() == {}


def test_ids_are_used_once() -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH, id="x")
    with pytest.raises(OperationReused, match="'x' was begin_batch of batch 1"):
        stage.ask(M.COMMIT_BATCH, id="x")
    stage.generated().done(M.COMMIT_BATCH)
    stage.done(M.BEGIN_BATCH, 2)
    with pytest.raises(OperationRetired, match="'x'"):
        stage.ask(M.BEGIN_BATCH, 2, id="x")


def test_a_refusal_leaves_the_id_free() -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH)
    with pytest.raises(NotSleeping):
        stage.ask(M.ACTIVATE, 1, "genrm", id="x")
    stage.generated()
    stage.done(M.ACTIVATE, 1, "genrm", id="x")
    assert stage.states() == {"genrm": "ACTIVE"}


@pytest.mark.parametrize(("method", "holder"), [(M.ACTIVATE, "genrm"), (M.DEACTIVATE, "genrm")])
@pytest.mark.parametrize("late", [False, True])
def test_doubt_blocks_and_a_late_answer_does_not_help(method: Method, holder: str, late: bool) -> None:
    stage = Stage().generated()
    if method is M.DEACTIVATE:
        stage.done(M.ACTIVATE, 1, holder)
    moved = stage.ask(method, 1, holder)
    if late:
        assert stage.of.next_deadline == lifecycle.OPERATION_SECONDS
        assert stage.of.tick(lifecycle.OPERATION_SECONDS - 1) == []
        assert stage.of.tick(lifecycle.OPERATION_SECONDS) == [moved]
        assert isinstance(moved.error, MoveTimedOut)
        assert not stage.of.settle(moved.id)
    else:
        stage.of.settle(moved.id, "judge/replica-0 is FAILED")
        assert isinstance(moved.error, MoveFailed)
    assert stage.states() == {"genrm": "BLOCKED"}
    assert stage.of.next_deadline is None
    assert stage.of.verdict(1).state is stage.of.verdict(7).state is BatchState.FAILED, "every waiter ends"
    assert moved.error.message in stage.of.verdict(7).error
    assert stage.ask(method, 1, holder, id=moved.id) is moved, "who asks again gets the same answer"
    for refused, whom in ((M.ACTIVATE, "teacher"), (M.ACTIVATE, "training")):
        with pytest.raises(BatchFailed):
            stage.ask(refused, 1, whom)
    with pytest.raises(NotSleeping, match="BLOCKED"):
        stage.ask(M.DEACTIVATE, 1, "genrm")
    with pytest.raises(BatchFailed, match="recover"):
        stage.ask(M.BEGIN_BATCH, 2)


def test_recovery_needs_evidence_of_every_gpu() -> None:
    stage = Stage().generated()
    stage.of.settle(stage.ask(M.ACTIVATE, 1, "genrm").id, "no answer")
    with pytest.raises(NotRecovered, match="genrm is BLOCKED, no release is proven of judge/replica-0"):
        stage.ask(M.RECOVER, None, unproven={"genrm": ("judge/replica-0",)})
    assert stage.states() == {"genrm": "BLOCKED"}
    stage.done(M.RECOVER, None)
    assert stage.states() == {}
    assert stage.of.verdict(1).state is BatchState.PENDING
    stage.committed(1).committed(2)


def test_recovery_waits_for_what_moves_and_for_training() -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH)
    with pytest.raises(OutOfOrder, match="batch 1 is pending"):
        stage.ask(M.RECOVER, None)
    stage.done(M.FAIL_BATCH, error="the data ended")
    stage.ask(M.OFFLOAD_ROLLOUT)
    with pytest.raises(NotRecovered, match="rollout is being moved"):
        stage.ask(M.RECOVER, None)
    stage.of.settle(stage.works[-1].operation)
    stage.done(M.RECOVER, None)
    assert stage.states() == {}, "a holder that never acknowledged is recovered by the same evidence"
    stage.committed(2).done(M.ACTIVATE, 2, "training")
    with pytest.raises(NotRecovered, match="training has its lease"):
        stage.ask(M.RECOVER, None)


def test_a_failed_batch_can_still_be_left() -> None:
    stage = Stage().generated()
    stage.done(M.ACTIVATE, 1, "teacher")
    stage.done(M.FAIL_BATCH, error="a score is not finite")
    assert stage.of.verdict(1).error == "batch 1 failed: a score is not finite"
    stage.done(M.FAIL_BATCH, error="said again")
    for method, holder in ((M.ACTIVATE, "genrm"), (M.BEGIN_STUDENT_SCORING, None), (M.COMMIT_BATCH, None)):
        with pytest.raises(BatchFailed, match="not finite"):
            stage.ask(method, 1, holder)
    stage.done(M.DEACTIVATE, 1, "teacher")
    assert stage.states() == {}
    with pytest.raises(BatchFailed, match="batch 2 cannot begin: batch 1 failed"):
        stage.ask(M.BEGIN_BATCH, 2)


def test_who_names_the_batch_is_not_repeated() -> None:
    stage = Stage().generated()
    stage.done(M.FAIL_BATCH, error="batch 1 failed at genrm: no answer")
    assert stage.of.verdict(1).error == "batch 1 failed at genrm: no answer"
    with pytest.raises(BatchFailed, match="refused: batch 1 failed at genrm: no answer; "):
        stage.ask(M.ACTIVATE, 1, "genrm")


def test_rollout_that_did_not_come_fails_the_batch_and_keeps_its_lease() -> None:
    stage = Stage()
    begun = stage.ask(M.BEGIN_BATCH)
    stage.of.settle(begun.id, "policy/replica-1 is FAILED")
    assert stage.of.verdict(1).state is BatchState.FAILED
    assert stage.states() == {"rollout": "ACTIVE"}
    stage.done(M.OFFLOAD_ROLLOUT)
    stage.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    assert stage.states() == {}


def test_the_order_of_student_scoring() -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH)
    with pytest.raises(OutOfOrder, match="comes after rollout's release"):
        stage.ask(M.BEGIN_STUDENT_SCORING)
    with pytest.raises(OutOfOrder, match="after begin_student_scoring"):
        stage.ask(M.ONLOAD_ROLLOUT)
    stage.generated()
    stage.done(M.BEGIN_STUDENT_SCORING)
    stage.done(M.BEGIN_STUDENT_SCORING)
    stage.done(M.ONLOAD_ROLLOUT)
    with pytest.raises(NotSleeping, match="rollout is ACTIVE"):
        stage.ask(M.COMMIT_BATCH)
    stage.done(M.OFFLOAD_ROLLOUT)
    stage.done(M.ACKNOWLEDGE_ROLLOUT_OFFLOADED)
    with pytest.raises(OutOfOrder, match="done already"):
        stage.ask(M.BEGIN_STUDENT_SCORING)


@pytest.mark.parametrize("number", [0, 2, None, -1])
def test_other_batches_are_refused(number: int | None) -> None:
    stage = Stage()
    stage.done(M.BEGIN_BATCH)
    for method in (M.OFFLOAD_ROLLOUT, M.ACKNOWLEDGE_ROLLOUT_OFFLOADED, M.COMMIT_BATCH, M.FAIL_BATCH):
        with pytest.raises(NoSuchBatch):
            stage.ask(method, number)
    with pytest.raises(NoSuchBatch):
        stage.ask(M.ACTIVATE, number, "genrm")
    with pytest.raises((BatchPending, NoSuchBatch)):
        stage.ask(M.BEGIN_BATCH, number)


def test_a_committed_batch_stays_as_it_is() -> None:
    stage = Stage().committed()
    for method in (M.FAIL_BATCH, M.OFFLOAD_ROLLOUT, M.BEGIN_STUDENT_SCORING):
        with pytest.raises(OutOfOrder, match="is committed"):
            stage.ask(method)
    assert stage.of.verdict(1).state is BatchState.COMMITTED


def test_training_waits_for_its_batch() -> None:
    stage = Stage()
    with pytest.raises(NoSuchBatch, match="not committed"):
        stage.ask(M.ACTIVATE, 1, "training")
    stage.committed().done(M.ACTIVATE, 1, "training")
    stage.done(M.ACTIVATE, 1, "training")
    assert stage.states() == {"training": "ACTIVE"}


def test_roles_of_their_own_stand_until_training_wants_their_gpus() -> None:
    stage = Stage("split")
    standing = dict.fromkeys(("rollout", "genrm", "teacher"), "ACTIVE")
    assert stage.states() == standing
    stage.generated()
    stage.done(M.ACTIVATE, 1, "genrm")
    stage.done(M.DEACTIVATE, 1, "genrm")
    assert (stage.states(), stage.works) == (standing, [])
    stage.done(M.COMMIT_BATCH)
    with pytest.raises(NotSleeping, match="rollout is ACTIVE, genrm is ACTIVE, teacher is ACTIVE"):
        stage.ask(M.ACTIVATE, 1, "training")
    for role in standing:
        stage.done(M.DEACTIVATE, 1, role)
    stage.done(M.ACTIVATE, 1, "training")
    with pytest.raises(NotSleeping, match="training is ACTIVE"):
        stage.ask(M.ACTIVATE, 1, "rollout")
    stage.done(M.DEACTIVATE, 1, "training")
    for role in standing:
        stage.done(M.ACTIVATE, 1, role)
    assert stage.states() == standing
    stage.committed(2)


def test_pools_of_their_own_never_move() -> None:
    stage = Stage("decoupled")
    stage.generated().done(M.COMMIT_BATCH)
    for role in ("rollout", "genrm", "teacher"):
        stage.done(M.DEACTIVATE, 1, role)
    assert set(stage.states().values()) == {"ACTIVE"}
    assert stage.works == []


def test_who_is_not_there_is_named() -> None:
    with pytest.raises(NoSuchHolder, match=r"no holder 'critic'.*rollout, genrm, teacher, training"):
        Stage().ask(M.ACTIVATE, 1, "critic")
    with pytest.raises(NoSuchHolder):
        Stage().ask(M.DEACTIVATE, 1, None)


def test_engines_may_run_while_they_have_the_lease() -> None:
    stage = Stage().generated()
    assert not stage.of.may_run("genrm")
    stage.ask(M.ACTIVATE, 1, "genrm")
    assert stage.of.may_run("genrm")
    assert stage.of.moving == {"genrm"}
    stage.of.settle(stage.works[-1].operation)
    stage.ask(M.DEACTIVATE, 1, "genrm")
    assert not stage.of.may_run("genrm")


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "MAX_COMMITTED", 3)
    stage = Stage("decoupled")
    for number in range(5):
        stage.done(M.BEGIN_BATCH, number)
        stage.done(M.COMMIT_BATCH, number)
    found = [stage.of.verdict(number).state for number in range(5)]
    assert found == [BatchState.PENDING] * 2 + [BatchState.COMMITTED] * 3


def test_a_batch_has_one_producer() -> None:
    stage = Stage("decoupled")
    stage.of.ask(Ask("a", M.BEGIN_BATCH, 0, member="first"), 0.0)
    stage.of.ask(Ask("b", M.BEGIN_BATCH, 0, member="first"), 0.0)
    with pytest.raises(BatchPending, match="made by somebody else"):
        stage.of.ask(Ask("c", M.BEGIN_BATCH, 0, member="second"), 0.0)
    stage.done(M.COMMIT_BATCH, 0)
    stage.of.ask(Ask("d", M.BEGIN_BATCH, 1, member="second"), 0.0)


def test_a_recovered_run_remembers_the_number_of_its_last_batch() -> None:
    stage = Stage()
    stage.committed(4).done(M.BEGIN_BATCH, 5)
    stage.done(M.FAIL_BATCH, 5)
    stage.done(M.RECOVER, None)
    assert stage.of.current is not None
    assert stage.of.current.number == 5
    with pytest.raises(BatchFailed):
        stage.ask(M.ACTIVATE, 5, "genrm")
    stage.committed(5)
