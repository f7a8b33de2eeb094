"""Run schedules by seed: `python -m tests.chaos.run --seed N [--schedules M] [--machines]`.

The same seed is the same schedule, on every machine. Without `--machines` it is the real coordinator, sidecar daemons,
clients and batches; with it the pure machines alone.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from relax_slurm.core.run import RunEvent
from tests.chaos import actors, loop, machine_actors
from tests.chaos.story import Broken
from tests.chaos.weather import drawn
from tests.chaos.world import World, _worlds, simulated

LIMIT_SECONDS = 1200.0
END_SECONDS = 60.0
"""How long after the end of the run anyone may still wait."""


@dataclass(slots=True)
class Outcome:
    """What became of one schedule."""

    seed: int
    broken: str = ""
    story: list[str] = field(default_factory=list)
    digest: str = ""
    seconds: float = 0.0
    """Virtual ones."""
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    layer: str = ""
    """What the command that shows it again needs beside the seed."""


def schedule(seed: int, *, keep: bool = False) -> Outcome:
    """One schedule; `keep` keeps the story of a good one too. Call inside `simulated()`."""
    outcome = Outcome(seed)
    worlds: list[World] = []

    async def main() -> None:
        world = World(seed)
        worlds.append(world)
        _worlds[world.loop] = world
        await _play(world)

    try:
        loop.run(main(), LIMIT_SECONDS)
    except (Broken, loop.Stuck, loop.OutOfTime) as error:
        outcome.broken = str(error)
    world = worlds[0]
    _worlds.pop(world.loop, None)
    if world.rules.broken is not None:
        outcome.broken = str(world.rules.broken)
    if outcome.broken or keep:
        outcome.story, outcome.digest = world.story.lines(), world.story.digest()
    outcome.seconds, outcome.steps = world.loop.time(), len(world.story)
    outcome.counts = Counter(
        schedules=1,
        committed=len(world.rules.committed),
        failed=len(world.rules.failed),
        recovered=world.rules.counts["recover"],
        blocked=world.rules.counts["BLOCKED"],
        kills=sum(node.lives - 1 for node in world.nodes.values()),
        stopped=world.rules.counts["stopped"],
    )
    return outcome


async def _play(world: World) -> None:
    weather = drawn(world.rng)
    await world.up()
    world.story.tell("weather", "%s, %s", world.shape, weather)
    world.storm(weather)
    work = actors.Workload(world, weather)
    working = asyncio.ensure_future(work.run())
    rng = world.rng
    waiters = [
        asyncio.ensure_future(actors.waits(world, f"waiter-{index}", rng.choice((0, 0, 1, 2)), patience))
        for index, patience in enumerate((rng.uniform(1.0, 60.0), 600.0))
    ]
    world.spawn(actors.bad_luck(world, weather))
    if weather.meddling:
        world.spawn(actors.meddles(world, weather.meddling))
    await _unbroken(world, {working}, rng.uniform(20.0, 90.0))
    if not working.done():
        world.story.tell("workload", "is interrupted")
        working.cancel()
    # The end: the network heals, and whoever still waits must hear of it.
    world.calm()
    if rng.random() < 0.15:
        world.story.tell("operator", "stops the run")
        world.rules.counts["stopped"] += 1
        world.coordinator.request_stop("asked for")
        assert world.walking is not None
        await _unbroken(world, {world.walking, working}, 400.0)
        ended = world.walking.done()
    else:
        world.story.tell("operator", "the run is over")
        world.coordinator.advance(RunEvent.FAIL, "the end of the schedule")
        world.coordinator.leases.end("the end of the schedule")
        ended = True
    late = {task for task in (*waiters, working) if not task.done()}
    await _unbroken(world, late, END_SECONDS)
    left = [task for task in late if not task.done()]
    if left or not ended:
        world.rules.breach("%d still wait %.0f s after the end of the run", len(left) + (not ended), END_SECONDS)
    for task in (*waiters, working):
        if task.done() and not task.cancelled() and (fault := task.exception()) is not None:
            world.rules.breach("an actor failed: %r", fault)


async def _unbroken(world: World, tasks: set[asyncio.Future[None]], seconds: float) -> None:
    """Wait for all of them, for so long, or for the first broken promise."""
    watching = asyncio.ensure_future(world.rules.breached.wait())
    deadline = world.loop.time() + seconds
    waiting: set[asyncio.Future[None]] = set(tasks)
    while waiting and not watching.done() and (left := deadline - world.loop.time()) > 0:
        await asyncio.wait({watching, *waiting}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        waiting = {task for task in waiting if not task.done()}
    watching.cancel()
    if world.rules.broken is not None:
        raise world.rules.broken


def machines(seed: int, *, keep: bool = False) -> Outcome:
    """One schedule of the pure machines."""
    of = machine_actors.play(seed, drawn(random.Random(f"{seed}/weather")))
    outcome = Outcome(seed, str(of.rules.broken or ""), seconds=of.clock.now, steps=len(of.story), layer=" --machines")
    if outcome.broken or keep:
        outcome.story, outcome.digest = of.story.lines(), of.story.digest()
    counts = of.rules.counts
    outcome.counts = Counter(
        schedules=1,
        committed=len(of.rules.committed),
        failed=len(of.rules.failed),
        recovered=counts["recover"],
        blocked=counts["BLOCKED"],
    )
    return outcome


# --- many of them ---------------------------------------------------------------------------------------------------


def several(one: Callable[[int], Outcome], seeds: range) -> tuple[list[Outcome], Counter[str]]:
    """Schedules one after the other, up to the third that is broken: the broken ones, and sums over all."""
    broken: list[Outcome] = []
    counts: Counter[str] = Counter()
    collects = gc.isenabled()
    gc.disable()  # a schedule leaves cycles behind; looking for them while it runs takes a tenth of the time
    try:
        with simulated():
            for done, seed in enumerate(seeds, start=1):
                outcome = one(seed)
                counts += outcome.counts
                counts["steps"] += outcome.steps
                if outcome.broken:
                    broken.append(outcome)
                    if len(broken) >= 3:
                        break
                if done % 50 == 0:
                    gc.collect()
    finally:
        if collects:
            gc.enable()
    return broken, counts


def report(outcome: Outcome) -> str:
    """The story of a schedule, how it ended, and how to see it again."""
    end = f"broke a promise: {outcome.broken}" if outcome.broken else f"broke no promise ({outcome.digest})"
    again = f"see it again: python -m tests.chaos.run --seed {outcome.seed}{outcome.layer}"
    return "\n".join([*outcome.story, f"seed {outcome.seed} {end}", again])


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--schedules", type=int, default=1, help="how many, each with the next seed")
    parser.add_argument("--machines", action="store_true", help="the pure machines alone")
    parser.add_argument("--story", action="store_true", help="tell the story of --seed, broken or not")
    options = parser.parse_args(arguments)
    one = machines if options.machines else schedule
    began = time.perf_counter()
    if options.story:
        with simulated():
            outcome = one(options.seed, keep=True)
        print(report(outcome))
        return 1 if outcome.broken else 0
    broken, counts = several(one, range(options.seed, options.seed + options.schedules))
    for outcome in broken:
        print(report(outcome))
    sums = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{sums}; {time.perf_counter() - began:.1f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
