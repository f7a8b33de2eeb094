"""Leases and batches against a naive model: whatever is asked, fails, ends late or is repeated, GPUs have one user."""

from __future__ import annotations

import copy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from relax_slurm.config.load import load
from relax_slurm.core import placement
from relax_slurm.core.batch import BatchState
from relax_slurm.core.lease import TRAINING, LeaseState, sharing
from relax_slurm.core.lifecycle import OPERATION_SECONDS, ROLLOUT, Lifecycle, Move, Work
from relax_slurm.core.lifecycle_errors import LifecycleRefused
from relax_slurm.core.operations import Ask, Method, Operation, Progress
from relax_slurm.errors import RecoveryRequired

SHARED = {mode: sharing(placement.plan(load(f"configs/{mode}.yaml"))) for mode in ("defer", "split")}
HOLDERS = (ROLLOUT, "genrm", "teacher", TRAINING)
WITH_HOLDER = (Method.ACTIVATE, Method.DEACTIVATE)
BATCHES = st.integers(0, 2)


class Book(RuleBasedStateMachine):
    """The naive model knows two things: whose memory may be on the GPUs, and which batches were committed."""

    mode = "defer"
    asks = Bundle("asks")
    works = Bundle("works")

    def __init__(self) -> None:
        super().__init__()
        self.of = Lifecycle(SHARED[self.mode])
        self.now = 0.0
        self.ids = 0
        standing = {ROLLOUT, "genrm", "teacher"} if self.mode == "split" else set()
        self.holding = {name: name in standing for name in HOLDERS}
        self.committed: set[int] = set()
        self.failed = False
        self.results: dict[str, Operation] = {}

    # --- what can happen ------------------------------------------------------------------------------------

    @rule(target=asks, method=st.sampled_from(Method), batch=BATCHES, holder=st.sampled_from(HOLDERS))
    def new(self, method: Method, batch: int, holder: str) -> Ask:
        self.ids += 1
        return Ask(f"op-{self.ids}", method, batch, holder if method in WITH_HOLDER else None)

    @rule(target=works, choice=st.integers(0, 2**16))
    def put_what_is_taken(self, choice: int) -> Work | None:
        """One of the requests that are accepted now: so that runs get somewhere."""
        self.ids += 1
        asks = self._all_asks(f"op-{self.ids}")
        start = choice % len(asks)
        taken = next((ask for ask in (*asks[start:], *asks[:start]) if self._accepted(ask)), None)
        return None if taken is None else self.put(taken)

    def _all_asks(self, operation: str) -> list[Ask]:
        current = self.of.current
        numbers = [0] if current is None else [current.number, current.number + 1]
        methods = [method for method in Method if method not in (Method.FAIL_BATCH, Method.RECOVER)]
        pairs = [(method, holder) for method in methods for holder in (HOLDERS if method in WITH_HOLDER else (None,))]
        return [Ask(operation, method, number, holder) for number in numbers for method, holder in pairs]

    def _accepted(self, ask: Ask) -> bool:
        """Whether it would change something and is not refused."""
        trial = copy.deepcopy(self.of)
        before = {name: lease.state for name, lease in trial.leases.items()}, trial.current, trial.failure
        try:
            _, work = trial.ask(ask, self.now, self._evidence())
        except (LifecycleRefused, RecoveryRequired):
            return False
        after = {name: lease.state for name, lease in trial.leases.items()}, trial.current, trial.failure
        return work is not None or after != before or self.of.current != trial.current

    def _evidence(self) -> dict[str, tuple[str, ...]]:
        return {name: (f"{name}/replica-0",) for name, held in self.holding.items() if held and name != TRAINING}

    @rule(target=works, ask=asks)
    def put_anything(self, ask: Ask) -> Work | None:
        """Ask for it, for the first or the tenth time."""
        return self.put(ask)

    def put(self, ask: Ask) -> Work | None:
        before = dict(self.holding)
        try:
            operation, work = self.of.ask(ask, self.now, self._evidence())
        except (LifecycleRefused, RecoveryRequired):
            assert self.holding == before
            return None
        first = self.results.setdefault(ask.operation, operation)
        assert first is operation, "one id has one operation"
        self._book(ask, operation, work)
        return work

    def _book(self, ask: Ask, operation: Operation, work: Work | None) -> None:
        """What the naive model makes of an accepted request."""
        if work is not None and work.move is Move.ONLOAD:
            assert not self.failed, "nothing comes back after a failure"
            self.holding[work.holder] = True
        if operation.progress is not Progress.DONE:
            return
        if ask.method is Method.COMMIT_BATCH:
            number = ask.batch or 0
            if number not in self.committed:
                deferred = [holder.name for holder in self.of.sharing.holders if holder.deferred]
                assert not [name for name in deferred if self.holding[name]], "committed before everyone left"
            self.committed.add(number)
        elif ask.method is Method.ACTIVATE and ask.holder == TRAINING and self._awake(TRAINING):
            self.holding[TRAINING] = True
        elif ask.method is Method.DEACTIVATE and ask.holder == TRAINING:
            self.holding[TRAINING] = False
        elif ask.method is Method.FAIL_BATCH:
            self.failed = True
        elif ask.method is Method.RECOVER:
            self.failed = bool(self.of.failure)

    def _awake(self, holder: str) -> bool:
        return self.of.leases[holder].state is not LeaseState.SLEEPING

    @rule(work=works, luck=st.integers(0, 5))
    def end(self, work: Work | None, luck: int) -> None:
        """The engines have been moved, or have not; perhaps long after anyone waited for it."""
        if work is None:
            return
        well = luck > 0
        if well and work.move is Move.OFFLOAD and work.holder in self.of.moving:
            self.holding[work.holder] = False  # a late one frees memory too, but nobody may rely on it
        if self.of.settle(work.operation, "" if well else "no") and not well:
            self.failed = True

    @rule(holder=st.sampled_from((ROLLOUT, "genrm", "teacher")))
    def somebody_ends_the_engines(self, holder: str) -> None:
        """Evidence of release appears from outside, as when the processes are killed."""
        if holder not in self.of.moving and not self.of.may_run(holder):
            self.holding[holder] = False

    @rule(seconds=st.sampled_from((1.0, OPERATION_SECONDS)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if self.of.tick(self.now):
            self.failed = True

    @precondition(lambda self: self.failed and not self.of.moving)
    @rule()
    def all_engines_end(self) -> None:
        """The operator's way out: end them, deactivate training, recover."""
        self.holding = {name: held and not SHARED[self.mode][name].deferred for name, held in self.holding.items()}

    # --- what must hold -------------------------------------------------------------------------------------

    @invariant()
    def gpus_have_one_user(self) -> None:
        for name, held in self.holding.items():
            if held:
                rivals = [rival for rival in self.of.sharing.rivals(name) if self.holding[rival]]
                assert not rivals, f"{name} and {rivals} are on the same GPUs"

    @invariant()
    def leases_have_one_holder(self) -> None:
        for name in HOLDERS:
            if self._awake(name):
                assert not [rival for rival in self.of.sharing.rivals(name) if self._awake(rival)]

    @invariant()
    def who_may_be_there_has_a_lease(self) -> None:
        for name, held in self.holding.items():
            if held and name in self.of.moving:
                assert self._awake(name)

    @invariant()
    def committed_is_committed_and_every_waiter_ends(self) -> None:
        for number in range(4):
            state = self.of.verdict(number).state
            assert (state is BatchState.COMMITTED) == (number in self.committed)
            assert self.failed == bool(self.of.failure)
            if self.failed and number not in self.committed:
                assert state is BatchState.FAILED
                assert self.of.verdict(number).error


class SplitBook(Book):
    """The same where roles stand on slices of their own and training wants all of them."""

    mode = "split"


class TestDefer(Book.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


class TestSplit(SplitBook.TestCase):  # type: ignore[misc]
    settings = settings(max_examples=30, stateful_step_count=60, deadline=None)
