"""Who asks the pure machines for something: a workload that knows the order, and a meddler that does not."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from relax_slurm.core.lease import Sharing, sharing
from relax_slurm.core.operations import Method
from tests.chaos.machines import Client, Machines
from tests.chaos.weather import Weather
from tests.unit.control.stage import defer_config, plan_of

M = Method
BEFORE = [
    (M.BEGIN_BATCH, None),
    (M.OFFLOAD_ROLLOUT, None),
    (M.ACKNOWLEDGE_ROLLOUT_OFFLOADED, None),
    (M.ACTIVATE, "genrm"),
    (M.DEACTIVATE, "genrm"),
    (M.ACTIVATE, "teacher"),
    (M.DEACTIVATE, "teacher"),
]
STUDENT = [
    (M.BEGIN_STUDENT_SCORING, None),
    (M.ONLOAD_ROLLOUT, None),
    (M.OFFLOAD_ROLLOUT, None),
    (M.ACKNOWLEDGE_ROLLOUT_OFFLOADED, None),
]
AFTER = [(M.COMMIT_BATCH, None), (M.ACTIVATE, "training"), (M.DEACTIVATE, "training")]
CLEAN_UP = [
    (M.OFFLOAD_ROLLOUT, None),
    (M.ACKNOWLEDGE_ROLLOUT_OFFLOADED, None),
    (M.DEACTIVATE, "genrm"),
    (M.DEACTIVATE, "teacher"),
    (M.FAIL_BATCH, None),
]
MEDDLING = [
    *((method, None) for method in (*dict.fromkeys(method for method, _ in (*BEFORE, *STUDENT)), M.FAIL_BATCH)),
    *((method, role) for method in (M.ACTIVATE, M.DEACTIVATE) for role in ("rollout", "genrm", "teacher")),
    (M.RECOVER, None),
]


@cache
def shared() -> Sharing:
    """Three roles and training on the same cards."""
    return sharing(plan_of(defer_config()))


class Workload:
    """One batch after the other, in the order of the contract."""

    def __init__(self, of: Machines) -> None:
        self.of, self.client = of, Client(of, "workload", of.rng.choice((8.0, 40.0)))
        self.number, self.left = 0, of.weather.batches
        self.tries = 0
        self.steps: list[tuple[Method, str | None]] = []
        self.cleaning = False
        self.done = False

    def next_batch(self) -> None:
        """Begin another, or end."""
        if self.left == 0:
            self.done = True
            return
        self.left -= 1
        student = STUDENT if self.of.rng.random() < 0.3 else []
        self.steps, self.cleaning = [*BEFORE, *student, *AFTER], False
        self._go_on()

    def _go_on(self) -> None:
        if not self.steps:
            if self.cleaning:
                self._recover()
            else:
                self.number += 1
                self.next_batch()
            return
        method, holder = self.steps[0]
        rules = self.of.rules
        if method is M.COMMIT_BATCH:
            rules.written.add(self.number)
            rules.published.add(self.number)
        if (method, holder) == (M.DEACTIVATE, "training"):
            self.of.cards.train("")
        self.client.ask(method, self.number, holder, self._heard)

    def _heard(self, outcome: Any) -> None:
        method, holder = self.steps.pop(0)
        if self.cleaning:
            self._go_on()
        elif outcome is not None or (method is not M.COMMIT_BATCH and self._unlucky(method)):
            self.steps, self.cleaning = list(CLEAN_UP), True
            if holder == "training":
                self.steps = [(M.DEACTIVATE, "training"), *self.steps]
            self._go_on()
        elif (method, holder) == (M.ACTIVATE, "training"):
            self.of.cards.train(f"batch {self.number}")
            self.of.clock.after(1.0, self._go_on)
        else:
            self.of.clock.after(0.3, self._go_on)

    def _unlucky(self, method: Method) -> bool:
        return method in (M.BEGIN_BATCH, M.ACTIVATE) and self.of.rng.random() < self.of.weather.scoring / 2

    def _recover(self) -> None:
        self.tries += 1
        if self.tries > 4:
            self.done = True
            return
        self.of.clock.after(self.of.rng.uniform(0.5, 12.0), lambda: self.client.ask(M.RECOVER, None, None, self._after))

    def _after(self, outcome: Any) -> None:
        if outcome is not None:
            self._recover()
            return
        self.number += 1
        self.next_batch()


def play(seed: int, weather: Weather) -> Machines:
    """One schedule to its end, or to the first broken promise."""
    of = Machines(seed, weather, shared())
    rng = of.rng
    work = Workload(of)
    of.clock.after(0.0, work.next_batch)
    meddler = Client(of, "meddler", 10.0)
    at = 0.0
    for _ in range(weather.meddling):
        at += rng.uniform(0.05, 3.0)
        method, holder = rng.choice(MEDDLING)
        batch = None if method is M.RECOVER else rng.choice((0, 0, 1, 2))
        name = f"meddler-again-{rng.randrange(4)}" if rng.random() < 0.3 else ""
        of.clock.after(at, partial(meddler.ask, method, batch, holder, lambda outcome: None, name))
    for _ in range(weather.exits + weather.crashes):
        of.clock.after(rng.uniform(0.1, 20.0), partial(of.exits, rng.choice(sorted(of.workers))))
    steps = 0
    while of.rules.broken is None and of.clock.step():
        steps += 1
        if steps > 20_000 or of.clock.now > 600.0:
            of.rules.breach("the schedule does not come to an end")
    if of.rules.broken is None and not work.done:
        of.rules.breach("the workload waits for ever")
    if of.rules.broken is None and of.moves:
        of.rules.breach("a move never ended: %s", ", ".join(of.moves))
    return of
