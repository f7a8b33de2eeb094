"""The reader of the Clone pattern (docs/protocol.md, Discovery): events in, one action out, no socket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.core.plan import Role
from relax_slurm.core.snapshot import DiscoveryInvalid, RoleSnapshot
from relax_slurm.core.update import Update, apply


class Action(StrEnum):
    """What a subscriber has to do, or what became of a message."""

    APPLIED = "applied"
    """The view moved on."""
    DROPPED = "dropped"
    """Old, foreign or broken; nothing changed."""
    QUEUED = "queued"
    """Kept until the snapshot arrives."""
    RESYNC = "resync"
    """Ask for a snapshot now."""
    CURRENT = "current"
    """Nothing to do."""


@dataclass(slots=True)
class Counters:
    """What a subscriber has seen; only grows."""

    applied: int = 0
    dropped: int = 0
    queued: int = 0
    overflowed: int = 0
    resyncs: int = 0
    invalid: int = 0


class SubscriberState:
    """One role's view at a subscriber. Times are seconds of any monotonic clock.

    While a snapshot is awaited nothing counts as a sign of life: a view that cannot be brought up to date
    must become stale even though heartbeats still arrive.
    """

    def __init__(
        self,
        role: Role,
        *,
        staleness_seconds: float = 10.0,
        retry_seconds: float = 1.0,
        queue_limit: int = 1024,
    ) -> None:
        self.role = role
        self.counters = Counters()
        self.snapshot: RoleSnapshot | None = None
        self._staleness_seconds = staleness_seconds
        self._retry_seconds = retry_seconds
        self._queue_limit = queue_limit
        self._queue: list[Update] = []
        self._asked_at: float | None = None
        self._fresh_at = float("-inf")

    @property
    def awaiting(self) -> bool:
        """Whether a snapshot has been asked for and has not arrived."""
        return self._asked_at is not None

    def current(self, now: float) -> RoleSnapshot | None:
        """The view, None when there is none or it is older than the staleness bound."""
        return self.snapshot if now - self._fresh_at <= self._staleness_seconds else None

    def age(self, now: float) -> float:
        """Seconds since the view was last known to be right (inf before the first snapshot)."""
        return now - self._fresh_at

    def on_time(self, now: float) -> Action:
        """Call about every `retry_seconds`: first request, retries, and a look after silence."""
        if self._asked_at is not None:
            return self._ask(now) if now - self._asked_at >= self._retry_seconds else Action.CURRENT
        silent = now - self._fresh_at > self._staleness_seconds
        return self._ask(now) if self.snapshot is None or silent else Action.CURRENT

    def invalidate(self, now: float) -> Action:
        """The view is in doubt (a request timed out): ask again. It still serves within the bound."""
        return Action.CURRENT if self.awaiting else self._ask(now)

    def on_snapshot(self, snapshot: RoleSnapshot, now: float) -> Action:
        """A snapshot arrived; updates queued behind it are applied."""
        held = self.snapshot
        if snapshot.role is not self.role or (
            held is not None and (snapshot.epoch, snapshot.revision) < (held.epoch, held.revision)
        ):
            # A late answer, perhaps of an older coordinator: the retry will bring a better one.
            self.counters.dropped += 1
            return Action.DROPPED
        self.snapshot = snapshot
        self._asked_at = None
        self._fresh_at = now
        return self._drain(snapshot, now)

    def on_update(self, update: Update, now: float) -> Action:
        """An update arrived, in any order, any number of times."""
        held = self.snapshot
        if update.role is not self.role or (held is not None and _covers(held, update)):
            self.counters.dropped += 1
            return Action.DROPPED
        if held is not None and not self.awaiting and _follows(held, update):
            return self._apply(held, update, now)
        if held is None and update.base_revision == 0:
            # The role's first publication is a whole snapshot: nothing has to be waited for.
            self._asked_at = None
            applied = self._apply(None, update, now)
            return applied if self.snapshot is None else self._drain(self.snapshot, now)
        self._enqueue(update)
        return Action.QUEUED if self.awaiting else self._ask(now)

    def on_heartbeat(self, epoch: str, revisions: Mapping[str, int], now: float) -> Action:
        """The coordinator is alive and names the revision it has."""
        held = self.snapshot
        if held is not None and epoch < held.epoch:
            self.counters.dropped += 1
            return Action.DROPPED
        if self.awaiting:
            return Action.CURRENT
        if held is None or epoch != held.epoch or revisions.get(self.role.value, 0) > held.revision:
            return self._ask(now)
        self._fresh_at = now
        return Action.CURRENT

    def _ask(self, now: float) -> Action:
        self._asked_at = now
        self.counters.resyncs += 1
        return Action.RESYNC

    def _apply(self, held: RoleSnapshot | None, update: Update, now: float) -> Action:
        try:
            self.snapshot = apply(held, update)
        except DiscoveryInvalid:
            self.counters.invalid += 1
            return self._ask(now)
        self.counters.applied += 1
        self._fresh_at = now
        return Action.APPLIED

    def _enqueue(self, update: Update) -> None:
        self.counters.queued += 1
        self._queue.append(update)
        if len(self._queue) > self._queue_limit:
            self.counters.overflowed += 1
            del self._queue[0]

    def _drain(self, snapshot: RoleSnapshot, now: float) -> Action:
        waiting = sorted(self._queue, key=lambda update: (update.epoch, update.revision))
        self._queue = []
        for position, update in enumerate(waiting):
            held = self.snapshot or snapshot
            if _covers(held, update):
                self.counters.dropped += 1
            elif _follows(held, update):
                if self._apply(held, update, now) is Action.RESYNC:
                    return Action.RESYNC
            else:
                self._queue = waiting[position:]
                return self._ask(now)
        return Action.APPLIED


def _follows(held: RoleSnapshot, update: Update) -> bool:
    """Whether the update is the next one."""
    return update.epoch == held.epoch and update.base_revision == held.revision


def _covers(held: RoleSnapshot, update: Update) -> bool:
    """Whether the view already contains the update (or the update is of an older coordinator)."""
    return update.epoch < held.epoch or (update.epoch == held.epoch and update.revision <= held.revision)
