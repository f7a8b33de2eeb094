"""One batch against a coordinator that refuses illegal orders: the usual way, and every failure of the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_slurm.core.plan import Role
from relax_slurm.errors import EngineFailed, RecoveryRequired, RelaxError, Unavailable
from relax_slurm.workload.deferred import DeferredBatch, Scoring
from relax_slurm.workload.failures import (
    BatchNotMade,
    IllegalStage,
    NotReleased,
    PartitionExists,
    PublishFailed,
    ScoreInvalid,
    StagingRefused,
    VersionUnknown,
)
from relax_slurm.workload.samples import samples_of
from relax_slurm.workload.stages import Stage
from relax_slurm.workload.validate import Expected
from tests.unit.workload.stage import FakeLifecycle, FixedReward, FixedTeacher, MemoryPublisher, groups, sample

EXPECTED = Expected(fields=frozenset({"teacher_log_probs"}))
TO_SCORING = ["begin", "offload", "acknowledge"]
JUDGE = ["activate genrm", "deactivate genrm"]
TEACHER = ["activate teacher", "deactivate teacher"]
STUDENT = ["begin student", "onload", "offload", "acknowledge"]


class Nothing:
    """A stage that writes nothing."""

    async def score(self, samples: Any) -> None:
        """Everything is fine."""


class Failing:
    """A stage that fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    async def score(self, samples: Any) -> None:
        raise self.error


def scoring(**changes: Any) -> Scoring:
    parts: dict[str, Any] = {
        "reward": FixedReward(),
        "reward_role": Role.GENRM,
        "teacher": FixedTeacher(),
        "student": Nothing(),
        "expected": EXPECTED,
    }
    return Scoring(**{**parts, **changes})


def make(lifecycle: FakeLifecycle, publisher: MemoryPublisher | None = None, **changes: Any) -> DeferredBatch:
    parts = {name: changes.pop(name) for name in ("reward", "reward_role", "teacher", "student") if name in changes}
    return DeferredBatch(3, lifecycle, scoring(**parts), publisher or MemoryPublisher(), **changes)


async def through(batch: DeferredBatch, made: Any = None) -> Any:
    await batch.begin()
    return await batch.complete(groups() if made is None else made)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def failed(lifecycle: FakeLifecycle, batch: DeferredBatch, kind: type[BaseException], match: str, **rest: Any) -> Any:
    with pytest.raises(kind, match=match) as caught:
        run(through(batch, **rest))
    assert batch.stage is Stage.FAILED
    return caught.value


def test_the_usual_way() -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher()
    made = groups()
    order: list[str] = []
    batch = make(lifecycle, publisher, finalizer=lambda result, groups: order.extend(lifecycle.calls))
    result = run(through(batch, made))
    assert lifecycle.calls == [*TO_SCORING, *JUDGE, *TEACHER, *STUDENT, "commit"]
    assert order == lifecycle.calls[:-1]
    assert batch.stage is Stage.COMMITTED
    assert lifecycle.state == {3: "COMMITTED"}
    assert not lifecycle.awake
    assert publisher.partitions == {"train_3": result}
    assert result.rows == 4
    assert [one.reward for one in samples_of(made)] == [1.0] * 4
    assert [len(one.teacher_log_probs or []) for one in samples_of(made)] == [1, 2, 2, 3]
    assert set(batch.timing.seconds) >= {"begin", "offload", "genrm_on", "genrm", "teacher", "student_off", "commit"}


def test_stages_that_are_not_wanted_take_no_turn() -> None:
    lifecycle = FakeLifecycle()
    batch = DeferredBatch(3, lifecycle, Scoring(reward=FixedReward()), MemoryPublisher())
    run(through(batch))
    assert lifecycle.calls == [*TO_SCORING, "commit"]


def test_groups_are_ordered_and_scored_as_copies() -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher()
    reward = FixedReward(lambda one: float(one.index))
    made = groups(3)
    originals = samples_of(made)
    result = run(through(make(lifecycle, publisher, reward=reward), list(reversed(made))))
    assert result.columns["sample_index"] == list(range(6))
    assert result.columns["reward"] == [float(index) for index in range(6)]
    assert not {id(one) for one in reward.seen} & {id(one) for one in originals}


def test_one_object_makes_one_batch() -> None:
    lifecycle = FakeLifecycle()
    batch = make(lifecycle)
    run(through(batch))
    with pytest.raises(IllegalStage, match="COMMITTED and cannot score"):
        run(batch.complete(groups()))
    assert lifecycle.state == {3: "COMMITTED"}


def test_a_sample_twice_is_refused_and_rollout_is_released() -> None:
    lifecycle = FakeLifecycle()
    one = sample()
    failed(lifecycle, make(lifecycle), StagingRefused, "each once", made=[[one], [one]])
    assert lifecycle.calls == [*TO_SCORING, "fail"]
    failed(second := FakeLifecycle(), make(second, max_samples=3), StagingRefused, "up to 3")
    assert not second.awake


# --- what fails, and what stays ------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [EngineFailed("the judge is gone"), ValueError("a fault of ours")])
def test_scoring_fails(error: Exception) -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher()
    made = groups()
    caught = failed(lifecycle, make(lifecycle, publisher, reward=Failing(error)), BatchNotMade, "at genrm: ", made=made)
    assert caught.exit_code == 7
    assert caught.__cause__ is error
    assert lifecycle.calls == [*TO_SCORING, *JUDGE, "fail"]
    assert lifecycle.errors[3] == caught.message
    assert not lifecycle.awake
    assert not publisher.partitions
    assert all(one.reward is None for one in samples_of(made))


def test_a_teacher_of_a_wrong_shape() -> None:
    lifecycle = FakeLifecycle()
    made = groups()
    wrong = FixedTeacher(lambda one: setattr(one, "teacher_log_probs", [-0.1] * (one.response_length + 1)))
    failed(
        lifecycle, make(lifecycle, teacher=wrong), ScoreInvalid, "teacher_log_probs has 2 entries, wanted 1", made=made
    )
    assert lifecycle.calls == [*TO_SCORING, *JUDGE, *TEACHER, *STUDENT, "fail"]
    assert all(one.reward is None and one.teacher_log_probs is None for one in samples_of(made))


def test_a_partition_of_somebody_else_stays() -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher(PartitionExists("train_3: is there already"))
    failed(lifecycle, make(lifecycle, publisher), PublishFailed, "at publish: .*there already")
    assert publisher.cleared == []


def test_publishing_fails() -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher(OSError("disk full"))
    failed(lifecycle, make(lifecycle, publisher), PublishFailed, "at publish: OSError: disk full")
    assert "commit" not in lifecycle.calls
    assert publisher.cleared == ["train_3"]
    assert lifecycle.state == {3: "FAILED"}


def test_the_finalizer_fails() -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher()

    def finalizer(batch: Any, groups: Any) -> None:
        assert "train_3" in publisher.partitions
        raise RuntimeError("no room for the debug copy")

    failed(lifecycle, make(lifecycle, publisher, finalizer=finalizer), BatchNotMade, "at finalize: RuntimeError")
    assert "commit" not in lifecycle.calls
    assert publisher.partitions == {}


def test_the_commit_is_refused() -> None:
    lifecycle, publisher = FakeLifecycle(), MemoryPublisher()
    lifecycle.broken["commit"] = Unavailable("nobody answers")
    failed(lifecycle, make(lifecycle, publisher), BatchNotMade, "at commit: nobody answers")
    # Whether it was committed is not known, so nobody may take the partition away.
    assert "train_3" in publisher.partitions


def test_rollout_does_not_leave() -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken["offload"] = RecoveryRequired("replica policy/replica-0 did not release its memory")
    caught = failed(lifecycle, make(lifecycle), NotReleased, "did not release its memory; release unconfirmed")
    assert caught.exit_code == 9
    assert lifecycle.calls == ["begin", "offload", "fail"]
    assert lifecycle.awake == {"rollout"}


@pytest.mark.parametrize("role", ["genrm", "teacher"])
def test_a_role_does_not_come(role: str) -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken[f"activate {role}"] = RecoveryRequired(f"{role} timed out")
    caught = failed(lifecycle, make(lifecycle), NotReleased, f"at {role}_on: {role} timed out; {role} is not released")
    assert "release unconfirmed" in caught.message
    assert lifecycle.blocked == {role}
    assert lifecycle.calls[-1] == "fail"


@pytest.mark.parametrize("role", ["genrm", "teacher"])
def test_a_role_does_not_leave(role: str) -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken[f"deactivate {role}"] = RecoveryRequired("180 s passed")
    failed(lifecycle, make(lifecycle), NotReleased, f"at {role}_off: 180 s passed; release unconfirmed")
    assert lifecycle.calls[-2:] == [f"deactivate {role}", "fail"]


@pytest.mark.parametrize("call", ["begin student", "onload"])
def test_the_student_does_not_come_back(call: str) -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken[call] = EngineFailed("weights were not restored")
    failed(lifecycle, make(lifecycle), BatchNotMade, "at student_on: weights were not restored$")
    assert lifecycle.calls[-3:] == ["offload", "acknowledge", "fail"]
    assert not lifecycle.awake


def test_a_student_that_failed_in_doubt_is_no_doubt_once_its_release_is_confirmed() -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken["onload"] = RecoveryRequired("an engine ended")
    error = failed(lifecycle, make(lifecycle), BatchNotMade, "at student_on: an engine ended$")
    assert error.exit_code == 7
    assert not lifecycle.awake


def test_the_student_has_other_weights() -> None:
    lifecycle = FakeLifecycle()
    failed(
        lifecycle,
        make(lifecycle, student=Failing(VersionUnknown("version 8"))),
        VersionUnknown,
        "at student: version 8",
    )
    assert lifecycle.calls[-3:] == ["offload", "acknowledge", "fail"]


def test_it_takes_too_long() -> None:
    lifecycle = FakeLifecycle()

    class Endless:
        async def score(self, samples: Any) -> None:
            await asyncio.Event().wait()

    failed(lifecycle, make(lifecycle, teacher=Endless(), timeout_seconds=0.2), BatchNotMade, "took longer than 0.2 s")
    assert lifecycle.calls[-2:] == ["deactivate teacher", "fail"]
    assert not lifecycle.awake


def test_the_coordinator_is_gone() -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken["fail"] = Unavailable("no answer")
    caught = failed(
        lifecycle, make(lifecycle, reward=Failing(EngineFailed("x"))), BatchNotMade, "the coordinator does not"
    )
    assert caught.exit_code == 7


# --- generation -----------------------------------------------------------------------------------------------------


async def abandoned(batch: DeferredBatch, error: Exception) -> None:
    await batch.begin()
    await batch.abandon(error, "generate")


def test_generation_fails() -> None:
    lifecycle = FakeLifecycle()
    with pytest.raises(BatchNotMade, match=r"at generate: engine gone$"):
        run(abandoned(make(lifecycle), EngineFailed("engine gone")))
    assert lifecycle.calls == ["begin", "offload", "acknowledge", "fail"]
    assert lifecycle.state == {3: "FAILED"}


def test_generation_fails_and_rollout_stays() -> None:
    lifecycle = FakeLifecycle()
    lifecycle.broken["offload"] = RecoveryRequired("no word from node 2")
    with pytest.raises(NotReleased, match=r"engine gone; rollout is not released: no word.*; release unconfirmed"):
        run(abandoned(make(lifecycle), EngineFailed("engine gone")))
    assert lifecycle.calls == ["begin", "offload", "fail"]


def test_a_batch_that_may_not_begin_touches_nothing() -> None:
    lifecycle = FakeLifecycle()
    lifecycle.state[2] = "PENDING"
    with pytest.raises(RelaxError, match="begin 3"):
        run(make(lifecycle).begin())
    assert lifecycle.calls == ["begin"]


def test_rollout_that_is_never_seen_is_released() -> None:
    lifecycle = FakeLifecycle()

    async def never(role: Role) -> None:
        raise Unavailable(f"{role} is not READY")

    with pytest.raises(BatchNotMade, match="at begin: rollout is not READY"):
        run(make(lifecycle, ready=never).begin())
    assert lifecycle.calls == ["begin", "offload", "acknowledge", "fail"]


# --- cancelled anywhere ---------------------------------------------------------------------------------------------

CALLS = [*TO_SCORING, *JUDGE, *TEACHER, "begin student", "onload", "commit"]


@given(call=st.sampled_from(CALLS), after=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_cancelled_batch_leaves_no_role_awake(call: str, after: bool) -> None:
    async def body() -> None:
        lifecycle = FakeLifecycle()
        batch = make(lifecycle)
        task: asyncio.Task[Any] = asyncio.ensure_future(through(batch))

        def before(seen: str) -> Any:
            if seen == call and not task.cancelling():
                task.cancel()
                return asyncio.sleep(0) if after else None
            return None

        lifecycle.before = before
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not lifecycle.awake
        committed = lifecycle.state == {3: "COMMITTED"}
        assert committed == (call == "commit")
        assert committed or lifecycle.state in ({3: "FAILED"}, {})
        assert batch.stage is (Stage.COMMITTED if committed else Stage.FAILED)

    asyncio.run(asyncio.wait_for(body(), 60))


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_whatever_fails_nothing_is_committed_and_every_waiter_ends(data: Any) -> None:
    calls = [*TO_SCORING, *JUDGE, *TEACHER, *STUDENT, "commit", "fail"]
    broken = data.draw(st.sets(st.sampled_from(calls), min_size=1, max_size=3))

    async def body() -> None:
        lifecycle, publisher = FakeLifecycle(), MemoryPublisher()
        lifecycle.broken = {call: EngineFailed(f"{call} broke") for call in broken}
        made = groups()
        waiter = asyncio.ensure_future(lifecycle.wait_committed(3, 0.1))
        error: BaseException | None = None
        try:
            await through(make(lifecycle, publisher), made)
        except RelaxError as caught:
            error = caught
        if broken == {"fail"}:
            assert error is None
            await waiter
            return
        assert error is not None
        assert lifecycle.state.get(3) != "COMMITTED"
        with pytest.raises(RelaxError):
            await waiter
        fenced = lifecycle.awake | lifecycle.blocked
        if fenced and "begin" in lifecycle.calls and lifecycle.state:
            assert isinstance(error, NotReleased), (fenced, error)
        if "commit" not in lifecycle.calls:
            assert not publisher.partitions

    asyncio.run(asyncio.wait_for(body(), 60))
