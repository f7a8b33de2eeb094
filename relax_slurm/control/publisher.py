"""What leaves on the discovery socket: snapshots as updates, and heartbeats (docs/protocol.md, Discovery)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from relax_slurm.control.refusals import UnknownRole
from relax_slurm.core.discovery import to_json
from relax_slurm.core.plan import Role, RolePlan
from relax_slurm.core.registry import Registry
from relax_slurm.core.snapshot import EngineEntry, ModelEntry, Policy, ReplicaState, RoutingSpec
from relax_slurm.core.update import Update, joined
from relax_slurm.wire.server import ControlServer

BEAT_TOPIC = "beat"
MAX_WAITING = 65_536


class Publisher:
    """The registry and the queue in front of the socket. A lost update is a gap, and a gap is a resync."""

    def __init__(self, epoch: str, server: ControlServer, *, max_waiting: int = MAX_WAITING) -> None:
        self.registry = Registry(epoch)
        self._epoch, self._server = epoch, server
        self._outbox: asyncio.Queue[Update] = asyncio.Queue(maxsize=max_waiting)
        self._beats = 0

    def publish_role(self, role: RolePlan, models: Iterable[ModelEntry]) -> None:
        """Publish a role as a whole."""
        routing = RoutingSpec(
            role.default_model, role.route_key_map, role.aliases, Policy(role.policy), policy_revision=0
        )
        self._queue(self.registry.publish(role.role, routing, models))

    def publish_engine(self, role: Role, model: str, engine: EngineEntry, state: ReplicaState | None = None) -> None:
        """Publish one replica of a role that was published before; `state` is the model's, where the rule for it
        does not apply."""
        self._queue(self.registry.publish_engine(role, model, engine, state))

    def publish_head(self, role: Role, model: str, *, router_url: str | None, state: ReplicaState) -> None:
        """Publish a routed model's URL and state."""
        self._queue(self.registry.publish_head(role, model, router_url=router_url, state=state))

    def snapshot(self, role_name: str) -> dict[str, Any]:
        """The role's schema 2 document; `UnknownRole` when it is not published (yet)."""
        roles: Mapping[str, Role] = {str(role): role for role in Role}
        snapshot = self.registry.snapshot(roles[role_name]) if role_name in roles else None
        if snapshot is None:
            served = ", ".join(self.registry.revisions()) or "none yet"
            raise UnknownRole(f"role {role_name[:64]!r} is not published here; published: {served}")
        return to_json(snapshot)

    async def run(self) -> None:
        """Send what is queued, until cancelled. What has gathered meanwhile goes in one message where it can."""
        following: Update | None = None
        while True:
            update, following = following or await self._outbox.get(), None
            while following is None and not self._outbox.empty():
                following = self._outbox.get_nowait()
                if (both := joined(update, following)) is not None:
                    update, following = both, None
            await self._server.publish(f"snap.{update.role}", {"kind": "update", **update.to_json()})

    async def heartbeat(self, state: str) -> None:
        """Say that discovery is alive and which revisions there are."""
        self._beats += 1
        beat = {"kind": "heartbeat", "epoch": self._epoch, "seq": self._beats, "state": state}
        await self._server.publish(BEAT_TOPIC, {**beat, "revisions": self.registry.revisions()})

    def _queue(self, update: Update | None) -> None:
        if update is not None and not self._outbox.full():
            self._outbox.put_nowait(update)
