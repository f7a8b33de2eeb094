"""Who does things in a schedule: the workload, the trainer, those who wait, a meddler, and bad luck."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

from relax_slurm.client.lifecycle import LifecycleClient
from relax_slurm.core.lifecycle_errors import BatchFailed
from relax_slurm.core.plan import Role
from relax_slurm.errors import DeadlineExceeded, RelaxError, Unavailable
from relax_slurm.workload.deferred import DeferredBatch, Scoring
from relax_slurm.workload.samples import Sample, samples_of
from relax_slurm.workload.validate import Expected
from tests.chaos.weather import Weather
from tests.chaos.world import World
from tests.unit.workload.stage import groups

TRAIN_SECONDS = 60.0


class StageFailed(RelaxError):
    """A stage of the workload that was bound to fail."""

    code = "stage_failed"


class Stage:
    """A scorer: takes a while, fails at times, and looks whether its role serves while it scores."""

    def __init__(self, work: Workload, role: str) -> None:
        self.work, self.role = work, role

    async def score(self, samples: Sequence[Sample]) -> None:
        """Put scores on copies."""
        await self.work.takes(f"scores with {self.role}")
        for each in samples:
            if self.role == "genrm":
                each.reward = 1.0
            elif self.role == "teacher":
                each.teacher_log_probs = [-0.25] * each.response_length
        self.work.world.story.tell("workload", "has scores of %s", self.role)


class Partitions:
    """A publisher whose partitions the rules know of."""

    def __init__(self, work: Workload) -> None:
        self.work = work

    async def publish(self, partition: str, batch: Any) -> None:
        """Write all of it, or fail in the middle."""
        number = batch.number
        if all(each.reward == 1.0 and each.teacher_log_probs is not None for each in self.work.originals):
            self.work.world.rules.written.add(number)
        await self.work.takes(f"publishes {partition}")
        self.work.world.rules.published.add(number)
        self.work.world.story.tell("workload", "has published %s", partition)

    async def clear(self, partition: str) -> None:
        """Take it away."""
        self.work.world.rules.published.discard(int(partition.rpartition("_")[2]))


class Workload:
    """Makes batches one after the other with the real `DeferredBatch`, and a trainer takes them."""

    def __init__(self, world: World, weather: Weather) -> None:
        self.world, self.weather = world, weather
        self.rng = random.Random(f"{world.seed}/workload")
        self.originals: list[Sample] = []
        impatient = self.rng.random() < weather.impatient
        answer = self.rng.uniform(0.5, 8.0) if impatient else 40.0
        control = world.client("workload", attempt_seconds=self.rng.choice((1.0, 3.0, 8.0)))
        self.lifecycle = LifecycleClient(control, answer_seconds=answer)
        self.trainer = LifecycleClient(world.client("trainer", attempt_seconds=25.0), answer_seconds=answer)

    async def run(self) -> None:
        """All batches; after a failure one try to recover."""
        for number in range(self.weather.batches):
            training = asyncio.ensure_future(self.train(number))
            made = await self.make(number)
            if made:
                await asyncio.wait({training})
            else:
                training.cancel()
                await asyncio.wait({training})
                if not await self.recovered():
                    return

    async def make(self, number: int) -> bool:
        """One batch; whether training got it."""
        story = self.world.story
        student = Stage(self, "student") if self.rng.random() < 0.3 else None
        scoring = Scoring(
            reward=Stage(self, "genrm"),
            reward_role=Role.GENRM,
            teacher=Stage(self, "teacher"),
            student=student,
            expected=Expected(fields=frozenset({"teacher_log_probs"})),
        )
        batch = DeferredBatch(number, self.lifecycle, scoring, Partitions(self), timeout_seconds=120.0)
        story.tell("workload", "begins batch %d%s", number, " with student scoring" if student else "")
        try:
            await batch.begin()
            made = groups(1, 2)
            self.originals = samples_of(made)
            try:
                await self.takes("generates")
            except StageFailed as error:
                await batch.abandon(error, "generate")
            await batch.complete(made)
        except RelaxError as error:
            story.tell("workload", "batch %d was not made: %s", number, error.message)
            return False
        story.tell("workload", "batch %d is committed", number)
        return True

    async def recovered(self) -> bool:
        """Ask to recover a few times."""
        for _ in range(3):
            await asyncio.sleep(self.rng.uniform(0.5, 12.0))
            try:
                await self.lifecycle.recover()
            except RelaxError as error:
                self.world.story.tell("workload", "not recovered: %s", error.message)
            else:
                self.world.story.tell("workload", "recovered")
                return True
        return False

    async def train(self, number: int) -> None:
        """Wait for the batch and train on it, on every card."""
        story = self.world.story
        try:
            await self.trainer.wait_committed(number, 200.0)
            self.world.rules.waited("the trainer", number, "committed")
            async with self.trainer.training(number):
                self.world.cards.train(f"batch {number}")
                try:
                    await asyncio.sleep(self.rng.uniform(0.1, 3.0))
                finally:
                    self.world.cards.train("")
        except RelaxError as error:
            story.tell("trainer", "gives up on batch %d: %s", number, error.message)

    async def takes(self, what: str) -> None:
        """Something of the workload's own, which may fail."""
        self.world.story.tell("workload", what)
        await asyncio.sleep(self.rng.uniform(0.05, 1.5))
        if self.rng.random() < self.weather.scoring:
            raise StageFailed(f"it {what} and fails")


async def waits(world: World, name: str, number: int, seconds: float) -> None:
    """Wait for a batch until it is committed, will never be, or the time is over."""
    client = LifecycleClient(world.client(name, attempt_seconds=25.0))
    loop = asyncio.get_running_loop()
    began = loop.time()
    outcome = "committed"
    try:
        await client.wait_committed(number, seconds)
    except BatchFailed:
        outcome = "failed"
    except (DeadlineExceeded, Unavailable):
        outcome = "out of time"
    except RelaxError as error:
        outcome = error.code
    world.story.tell(name, "waited for batch %d: %s", number, outcome)
    world.rules.waited(name, number, outcome)
    if (spent := loop.time() - began) > seconds + 35.0:
        world.rules.breach("%s waited %.0f s for batch %d, its own limit is %.0f s", name, spent, number, seconds)


METHODS = (
    "begin_batch",
    "offload_rollout",
    "onload_rollout",
    "acknowledge_rollout_offloaded",
    "begin_student_scoring",
    "activate",
    "deactivate",
    "fail_batch",
    "recover",
    "move_role",
)


async def meddles(world: World, times: int) -> None:
    """A client that knows no order and reuses its ids. It does not lie: it neither commits nor speaks for training."""
    rng = random.Random(f"{world.seed}/meddler")
    control = world.client("meddler", attempt_seconds=2.0)

    async def one(number: int) -> None:
        method = rng.choice(METHODS)
        fields: dict[str, Any] = {"batch": rng.choice((0, 0, 1, 2))}
        if method in ("activate", "deactivate"):
            fields["holder"] = rng.choice(("rollout", "genrm", "teacher"))
        elif method == "fail_batch":
            fields["error"] = "said the meddler"
        elif method == "recover":
            fields = {}
        elif method == "move_role":
            fields = {"role": rng.choice(("rollout", "genrm", "teacher")), "method": rng.choice(("offload", "onload"))}
        operation = f"meddler-{rng.randrange(times)}" if rng.random() < 0.3 else f"meddler-n{number}"
        try:
            await control.request(method, timeout_seconds=rng.uniform(1.0, 20.0), operation_id=operation, **fields)
            world.story.tell("meddler", "%s %s is taken", method, fields)
        except RelaxError as error:
            world.story.tell("meddler", "%s %s: %s", method, fields, error.message)

    for number in range(times):
        await asyncio.sleep(rng.uniform(0.05, 3.0))
        world.spawn(one(number))


async def bad_luck(world: World, weather: Weather) -> None:
    """Sidecars are killed, connections break, engines end or hang."""
    rng = random.Random(f"{world.seed}/luck")
    deeds = ["kill"] * weather.crashes + ["exit"] * weather.exits + ["doubt"] * weather.doubts
    deeds += ["cut"] * weather.cuts
    deeds += ["reconnect"] * rng.choice((0, 0, 1, 2))
    rng.shuffle(deeds)
    for deed in deeds:
        await asyncio.sleep(rng.uniform(0.1, 12.0))
        node = world.nodes[rng.choice(sorted(world.nodes))]
        hosted = [worker for _, worker in sorted(node.daemon.workers.items())]
        choice: Any = rng.choice(hosted) if hosted else None
        if deed == "kill":
            node.kill()
        elif deed == "reconnect":
            world.story.tell(node.name, "its connection breaks")
            node.link.reconnect()
        elif deed == "cut":
            seconds = rng.choice((2.0, 6.0, 15.0))
            world.story.tell(node.name, "is cut off for %g s", seconds)
            node.link.cut = True
            asyncio.get_running_loop().call_later(seconds, setattr, node.link, "cut", False)
        elif choice is None or not node.up:
            continue
        elif deed == "exit":
            choice.leader_ends()
        else:
            choice.doubt(True)
            asyncio.get_running_loop().call_later(rng.uniform(0.5, 8.0), choice.doubt, False)
