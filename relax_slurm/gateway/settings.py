"""What a gateway is told at its start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from relax_slurm.core.plan import Role
from relax_slurm.gateway.render_pool import RenderLimits
from relax_slurm.gateway.sources import RenderSource


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Settings of one gateway process. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 picks a free one."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that clients must send; None switches the check off, which only a test should do."""
    engine_key: str | None = field(default=None, repr=False)
    """Sent to admission guards as bearer token; the client's own Authorization never goes there."""
    external_keys: Mapping[tuple[Role, str], str] = field(default_factory=dict, repr=False)
    """Bearer tokens of engines that somebody else runs, by role and engine id. `engine_key` never goes there."""
    roles: tuple[Role, ...] = tuple(Role)
    """Roles of the run; routes of the others are 404."""
    max_body_bytes: int = 64 * 1024 * 1024
    deadline_seconds: float = 1800.0
    """From the request to the first byte of its answer (for a plain answer: to all of it)."""
    idle_seconds: float = 300.0
    """Between two pieces of a streamed answer."""
    doubt_seconds: float = 20.0
    """How long a request may stay at an engine that discovery shows as UNKNOWN, DEAD or not at all."""
    staleness_seconds: float = 10.0
    """How old a view of the registry may be; given to the snapshot source, told in `/health`."""
    invalidate_seconds: float = 1.0
    """Shortest time between two invalidations of a role's view."""
    judges: Mapping[str, RenderSource | str] = field(default_factory=dict)
    """What to render a genrm model's messages with, or why only its engine can (`sources.source_of`)."""
    rendering: RenderLimits = field(default_factory=RenderLimits)
