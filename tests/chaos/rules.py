"""The promises, looked at after every step: against the truth of the cards, and by rules written down a second time.

Nothing here asks the product whether it kept a promise. What it says of itself (records, published engines) is one
side, the cards are the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from relax_slurm.core.replica_events import ALL_TAGS
from relax_slurm.core.snapshot import EngineEntry, ReplicaState
from tests.chaos.engines import Cards
from tests.chaos.story import Broken, Story

if TYPE_CHECKING:
    from relax_slurm.core.lease import Sharing

ROLES = ("rollout", "genrm", "teacher")
MAY_HOLD = frozenset({"ONLOADING", "ACTIVE", "DRAINING", "BLOCKED"})
TOLD = frozenset({"lease", "batch", "operation", "moved", "gave_up", "replica", "run", "silent", "lost", "heard"})
TOLD |= {"hello", "step_ended", "ignored", "given_up", "move"}


class Rules:
    """Watches one schedule. The first broken promise is kept, and everything after it is of no interest."""

    def __init__(self, story: Story, cards: Cards) -> None:
        self.story, self.cards = story, cards
        self.broken: Broken | None = None
        self.breached = asyncio.Event()
        self.sharing: Sharing | None = None
        self.serving = False
        """From READY on leases say who may be on a card; before that the start does, one role after the other."""
        self.leases: dict[str, str] = {}
        self.batch = "none"
        self.written: set[int] = set()
        """Batches whose originals have all scores."""
        self.published: set[int] = set()
        """Batches whose partition is complete."""
        self.committed: list[int] = []
        self.failed: set[int] = set()
        self._operations: set[str] = set()
        self._moving: dict[str, str] = {}
        self._shown: dict[str, EngineEntry] = {}
        self.counts: Counter[str] = Counter()
        cards.changed = self.memory_changed

    def breach(self, what: str, *values: object) -> None:
        """A promise is broken. The story ends here."""
        if self.broken is None:
            self.story.tell("BROKEN", what, *values)
            self.story.over = True
            self.broken = Broken(what % values)
            self.breached.set()

    # --- the cards ------------------------------------------------------------------------------------------

    def memory_changed(self, role: str) -> None:
        """Somebody's memory came or went."""
        if overlap := self.cards.overlap():
            self.breach("two on one card: %s", overlap)
        if self.serving and self.leases.get(role, "ACTIVE") not in MAY_HOLD and (held := self.cards.holding(role)):
            self.breach("%s has memory and its lease is %s", held[0], self.leases[role])
        for shown in self._shown.values():
            self._ready_is_true(shown)

    def publishes(self, entry: EngineEntry) -> None:
        """What discovery shows of a replica from now on."""
        self._shown[entry.engine_id] = entry
        if entry.direct_eligible and entry.state is not ReplicaState.READY:
            self.breach("%s is eligible for requests and %s", entry.engine_id, entry.state)
        self._ready_is_true(entry)

    def _ready_is_true(self, entry: EngineEntry) -> None:
        """READY means all memory and valid weights, unless the engine died and nobody could tell yet."""
        if entry.state is not ReplicaState.READY:
            return
        for engine in self.cards.engines:
            same = engine.worker_id.partition("#")[0] == entry.engine_id and engine.generation == entry.generation
            if same and not engine.dying and (engine.tags != ALL_TAGS or not engine.weights_valid):
                what = "without valid weights" if engine.tags == ALL_TAGS else f"with {sorted(engine.tags)} only"
                self.breach("%s g%d is shown READY, and is %s", entry.engine_id, entry.generation, what)

    # --- what the coordinator writes down -------------------------------------------------------------------

    def recorded(self, event: str, fields: Mapping[str, Any]) -> None:
        """One line of events.jsonl."""
        if event in TOLD:
            self.story.tell("coordinator", "%s %s", event, _Fields(fields))
        if event == "run":
            self.serving = fields["after"] in ("READY", "DEGRADED")
        elif event == "operation":
            self._began(fields["id"], fields["holder"], fields["method"])
        elif event in ("moved", "gave_up"):
            if self._moving.get(fields["holder"]) == fields["id"]:
                del self._moving[fields["holder"]]
        elif event == "batch":
            self._batch_changed(fields["before"], fields["after"])
        elif event == "lease":
            self._lease_changed(fields["holder"], fields["before"], fields["after"], fields["cause"])

    def _began(self, operation: str, holder: str, method: str) -> None:
        if operation in self._operations:
            self.breach("operation %s began a second time", operation)
        if holder in self._moving:
            self.breach("%s moves %s while %s still does", operation, holder, self._moving[holder])
        self._operations.add(operation)
        self._moving[holder] = operation
        if method in ("activate", "onload_rollout", "begin_batch") and self.batch.endswith("FAILED"):
            self.breach("%s of %s begins in batch %s", method, holder, self.batch)

    def _batch_changed(self, before: str, after: str) -> None:
        self.batch = after
        number, _, state = after.partition(" ")
        if state == "FAILED":
            self.failed.add(int(number))
        if before.endswith("COMMITTED") and state == "FAILED":
            self.breach("batch %s failed after it was committed", number)
        if state != "COMMITTED":
            return
        if not before.endswith("PENDING") or int(number) in self.committed:
            self.breach("batch %s is committed and was %s", number, before)
        self.committed.append(int(number))
        if int(number) not in self.written:
            self.breach("batch %s is committed before its scores were written back", number)
        if int(number) not in self.published:
            self.breach("batch %s is committed before it was published", number)
        for role in self._deferred():
            if held := self.cards.holding(role):
                self.breach("batch %s is committed while %s has memory", number, held[0])
            if self.leases.get(role, "SLEEPING") != "SLEEPING":
                self.breach("batch %s is committed while the lease of %s is %s", number, role, self.leases[role])

    def _lease_changed(self, holder: str, before: str, after: str, cause: str) -> None:
        self.leases[holder] = after
        self.counts[after] += 1
        self.counts[cause] += 1
        if before == "BLOCKED" and (after != "SLEEPING" or cause != "recover"):
            self.breach("the lease of %s leaves BLOCKED for %s because of %s", holder, after, cause)
        if before == "SLEEPING":
            self._given(holder, cause)
        if after == "SLEEPING" and (held := self.cards.holding(holder)):
            self.breach("the lease of %s ends (%s) while %s has memory", holder, cause, held[0])

    def _given(self, holder: str, cause: str) -> None:
        assert self.sharing is not None
        if self.batch.endswith("FAILED"):
            self.breach("%s gets its lease (%s) in batch %s", holder, cause, self.batch)
        for rival in self.sharing.rivals(holder):
            if held := self.cards.holding(rival):
                self.breach("%s gets its lease (%s) while %s has memory", holder, cause, held[0])
            if self.leases.get(rival, "SLEEPING") != "SLEEPING":
                self.breach("%s gets its lease (%s) while that of %s is %s", holder, cause, rival, self.leases[rival])

    def _deferred(self) -> list[str]:
        assert self.sharing is not None
        return [holder.name for holder in self.sharing.holders if holder.deferred]

    # --- those who wait -------------------------------------------------------------------------------------

    def waited(self, who: str, number: int, outcome: str) -> None:
        """Somebody who waited for a batch heard how it ended."""
        if outcome == "committed" and number not in self.committed:
            self.breach("%s was told that batch %d is committed, and it is not", who, number)
        if outcome == "failed" and number in self.committed:
            self.breach("%s was told that batch %d will not be committed, and it was", who, number)


class _Fields:
    """Fields of a record as words, found when somebody reads."""

    __slots__ = ("_fields",)

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._fields.items() if value not in ("", None, False))
