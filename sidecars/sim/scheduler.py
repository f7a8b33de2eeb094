"""What is in flight in a simulated engine: running, retracted, held at the door, paused, aborted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sidecars.sim import tokenizer
from sidecars.sim.memory import CardMemory
from sidecars.sim.model import Model, Run, Weights
from sidecars.sim.options import FaultKind, SimOptions
from sidecars.sim.protocol import Deadly, Invalid, Item

_TICK_SECONDS = 0.002


class Place(StrEnum):
    """Where a request is."""

    DOOR = "door"
    """Accepted over HTTP; the scheduler has not seen it, so nothing counts it."""
    RUNNING = "running"
    """In the batch."""
    WAITING = "waiting"
    """Retracted by a pause."""


class PauseMode(StrEnum):
    """Modes of /pause_generation."""

    ABORT = "abort"
    """Abort what runs."""
    RETRACT = "retract"
    """Put what runs back into the queue; its KV cache is given up."""
    IN_PLACE = "in_place"
    """Freeze what runs where it is."""


@dataclass(slots=True, eq=False)
class Flight:
    """One sequence under way."""

    item: Item
    started: float
    run: Run | None = None
    weights: Weights | None = None
    place: Place = Place.DOOR
    produced: int = 0
    aborted: bool = False
    stuck: bool = False
    """Hit by a fault; never moves again."""
    shown: bool = False
    """Whether any of it has been answered."""
    credit: float = 0.0
    """Seconds of work that no token was produced for yet."""
    working_since: float | None = None
    """When the work of now began; None while it does not move."""
    retractions: int = 0
    versions: list[tuple[str, int]] = field(default_factory=list)
    """(version, number of output tokens) at every change of weights in mid-flight."""
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.aborted or (self.run is not None and self.produced >= len(self.run.output))


class Scheduler:
    """The flights of one engine. `weights` may be replaced by the server at any time."""

    def __init__(
        self,
        options: SimOptions,
        model: Model,
        memory: CardMemory,
        weights: Weights,
        crash: Callable[[str], None],
    ) -> None:
        self.model = model
        self.weights = weights
        self.paused: PauseMode | None = None
        self.accepted = 0
        self.generated_tokens = 0
        self._options = options
        self._memory = memory
        self._crash = crash
        self._flights: dict[str, Flight] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- requests
    # ----------------------------------------------------------------------------------------------

    def admit(self, items: tuple[Item, ...]) -> list[Flight]:
        """Register sequences, all or none. `Invalid` for a request id that is in flight."""
        for item in items:
            if item.rid in self._flights:
                raise Invalid(f"Duplicate request ID detected: {item.rid}")
        now = time.monotonic()
        flights = [Flight(item, now) for item in items]
        self._flights.update((flight.item.rid, flight) for flight in flights)
        self.accepted += 1
        return flights

    def leave(self, flight: Flight) -> None:
        """Forget a sequence, finished or not."""
        if self._flights.get(flight.item.rid) is flight:
            del self._flights[flight.item.rid]
        if not self.in_scheduler():
            self._idle.set()

    async def play(self, flight: Flight, *, stepwise: bool) -> AsyncIterator[None]:
        """Run a sequence, yielding after every token when `stepwise`; the last yield is the finished
        state.
        """
        order = self.accepted
        await self._open.wait()
        if not flight.aborted:
            self._enter(flight, order)
            total = len(flight.run.output) if flight.run else 0
            await self._prefill(flight)
            while flight.produced < total and not flight.aborted:
                await self._decode(flight, flight.produced + 1 if stepwise else total)
                if stepwise and not flight.finished:
                    yield
            self.generated_tokens += flight.produced
        yield

    def _enter(self, flight: Flight, order: int) -> None:
        if not self._memory.usable:
            self._crash("CUDA error: an illegal memory access was encountered (memory is released)")
        dies = self._options.fault(FaultKind.DIE_AFTER_REQUESTS)
        if dies is not None and order >= dies.value:
            self._crash(f"injected fault {dies.kind} at request {order}")
        hangs = self._options.fault(FaultKind.HANG_GENERATE)
        flight.stuck = hangs is not None and order >= hangs.value
        flight.place = Place.RUNNING
        flight.weights = self.weights
        flight.run = self.model.run(flight.item.prompt, flight.item.sampling, self.weights)
        self._idle.clear()

    async def _prefill(self, flight: Flight) -> None:
        speed = self._options.prefill_tokens_per_second
        if speed > 0:
            await self._work(flight, len(flight.item.prompt) / speed)
            flight.credit = 0.0

    async def _decode(self, flight: Flight, target: int) -> None:
        """Produce tokens until there are `target` of them, or the flight is aborted."""
        speed = self._options.tokens_per_second
        while flight.produced < target and not flight.aborted:
            if speed == 0 and not self._frozen(flight):
                await asyncio.sleep(0)
                flight.produced = target
                continue
            await self._work(flight, (target - flight.produced) / speed if speed else 0.0)
            gained = min(int(flight.credit * speed + 1e-6), target - flight.produced)
            flight.produced += gained
            flight.credit -= gained / speed if speed else 0.0

    async def _work(self, flight: Flight, seconds: float) -> None:
        """Collect `seconds` of time that is not spent in a pause; an abort ends it early."""
        while not flight.aborted:
            frozen = self._frozen(flight)
            missing = seconds - flight.credit
            if missing <= 0 and not frozen:
                return
            flight.wake.clear()
            before = time.monotonic()
            flight.working_since = None if frozen else before
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if frozen else max(missing, _TICK_SECONDS)):
                    await flight.wake.wait()
            flight.working_since = None
            if not frozen:
                flight.credit += time.monotonic() - before

    def _frozen(self, flight: Flight) -> bool:
        return flight.stuck or self.paused in {PauseMode.RETRACT, PauseMode.IN_PLACE}

    def in_scheduler(self, *places: Place) -> list[Flight]:
        """Flights that the scheduler has; with `places`, only those there."""
        wanted = places or (Place.RUNNING, Place.WAITING)
        return [flight for flight in self._flights.values() if flight.place in wanted]

    def used_tokens(self) -> int:
        """Tokens in the cache: prompts, and what has been generated so far, also of an answer that comes whole."""
        now = time.monotonic()
        speed = max(self._options.tokens_per_second, 1.0)
        total = 0
        for flight in self.in_scheduler():
            worked = flight.credit + (0.0 if flight.working_since is None else now - flight.working_since)
            total += len(flight.item.prompt) + flight.produced + int(worked * speed)
        return total

    @property
    def busy(self) -> bool:
        """Whether a release would kill: something runs, or waits while the engine is not paused."""
        return bool(self.in_scheduler(Place.RUNNING)) or (
            self.paused is None and bool(self.in_scheduler(Place.WAITING))
        )

    # ---- control
    # -----------------------------------------------------------------------------------------------

    def abort(self, rid: str, *, everything: bool = False) -> None:
        """Abort by request id, or everything the scheduler has.

        As in SGLang, an id that is not in flight matches nothing, and one that is matches every id it begins.
        """
        if not everything and rid not in self._flights:
            return
        for flight in self.in_scheduler():
            if everything or flight.item.rid.startswith(rid):
                self.drop(flight)

    def drop(self, *flights: Flight) -> None:
        """Abort flights wherever they are; their client has gone or asked for it."""
        for flight in flights:
            flight.aborted = True
            flight.wake.set()

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating. In mode abort, return when nothing is left in the scheduler."""
        self.paused = mode
        self._open.clear()
        if mode is PauseMode.ABORT:
            self.abort("", everything=True)
            await self._idle.wait()
            return
        for flight in self.in_scheduler(Place.RUNNING):
            if mode is PauseMode.RETRACT:
                flight.place = Place.WAITING
                flight.retractions += 1
            flight.wake.set()

    def resume(self) -> None:
        """Generate again."""
        self.paused = None
        self._open.set()
        for flight in self.in_scheduler():
            flight.place = Place.RUNNING
            flight.wake.set()

    async def replace_weights(self, weights: Weights, *, abort_first: bool) -> int:
        """Load other weights; the number of requests that were paused in between.

        Unless the engine is paused, running requests are waited for (or aborted) and new ones wait at the
        door.
        """
        if not self._memory.has_weights:
            raise Deadly("CUDA error: an illegal memory access was encountered (weights are released)")
        if abort_first:
            self.abort("", everything=True)
        if self.paused is None:
            self._open.clear()
            await self._idle.wait()
        held = self.in_scheduler()
        for flight in held:
            if flight.produced:
                flight.versions.append((self.weights.version, flight.produced))
        self.weights = weights
        if self.paused is None:
            self._open.set()
        return len(held)

    # ---- answers
    # -----------------------------------------------------------------------------------------------

    def result(self, flight: Flight) -> dict[str, Any]:
        """The answer of /generate as far as it goes: cumulative text, ids and meta_info."""
        run, item = flight.run, flight.item
        output = run.output[: flight.produced] if run else ()
        text = ""
        if run is not None:
            shown = output[: min(run.visible, flight.produced)]
            text = tokenizer.decode(shown, skip_special=item.sampling.skip_special_tokens, final=flight.finished)
        meta: dict[str, Any] = {
            "id": item.rid,
            "finish_reason": self._finish(flight),
            "prompt_tokens": len(item.prompt),
            "weight_version": self.weights.version,
            "num_retractions": flight.retractions,
            "reasoning_tokens": 0,
            "completion_tokens": len(output),
            "cached_tokens": item.cached,
            "cached_tokens_details": {"device": item.cached, "host": 0} if item.cached else None,
            "dp_rank": None,
        }
        if item.logprobs is not None and run is not None and flight.weights is not None:
            meta.update(self.model.describe(run, flight.weights, item.logprobs, flight.produced))
        if flight.finished:
            meta["weight_versions"] = self._spans(flight)
            meta["e2e_latency"] = time.monotonic() - flight.started
        if not flight.shown:
            flight.shown = True
            meta["response_sent_to_client_ts"] = time.time()
        return {"text": text, "output_ids": list(output), "meta_info": meta}

    def _finish(self, flight: Flight) -> dict[str, Any] | None:
        if flight.aborted:
            return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
        return flight.run.finish if flight.run is not None and flight.finished else None

    def _spans(self, flight: Flight) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        start = 0
        for version, end in [*flight.versions, (self.weights.version, flight.produced)]:
            if end > start or not spans:
                spans.append({"version": version, "start": start, "end": end})
                start = end
        return spans
