"""The route table: every method and path that the gateway answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from relax_slurm.core.plan import Role
from relax_slurm.errors import MethodNotAllowed, NotFound


class Kind(StrEnum):
    """What a route does."""

    GENERATE = "generate"
    """SGLang's own generation payload, for GenRM also `messages`."""
    CHAT = "chat"
    """OpenAI chat completions."""
    MODELS = "models"
    """Logical model ids in OpenAI's form."""
    ENGINES = "engines"
    """The discovery snapshot."""
    ROLE_HEALTH = "role_health"
    """Readiness of one role."""
    ROLE_METRICS = "role_metrics"
    """Prometheus text of one role."""
    SCALE = "scale"
    """Scale-out and scale-in."""
    HEALTH = "health"
    """Liveness, open to everybody."""
    METRICS = "metrics"
    """Prometheus text."""
    INDEX = "index"
    """A page of links."""


@dataclass(frozen=True, slots=True)
class Route:
    """One row of the table."""

    method: str
    path: str
    kind: Kind
    role: Role | None = None


def _generation(role: Role) -> tuple[Route, ...]:
    return (
        Route("POST", f"/{role}/generate", Kind.GENERATE, role),
        Route("POST", f"/{role}/chat/completions", Kind.CHAT, role),
        Route("POST", f"/{role}/v1/chat/completions", Kind.CHAT, role),
        Route("GET", f"/{role}/v1/models", Kind.MODELS, role),
        Route("GET", f"/{role}/engines", Kind.ENGINES, role),
        Route("GET", f"/{role}/health", Kind.ROLE_HEALTH, role),
    )


ROUTES: tuple[Route, ...] = (
    *_generation(Role.ROLLOUT),
    *_generation(Role.GENRM),
    *_generation(Role.TEACHER),
    Route("POST", "/rollout/scale_out", Kind.SCALE, Role.ROLLOUT),
    Route("GET", "/rollout/scale_out", Kind.SCALE, Role.ROLLOUT),
    Route("GET", "/rollout/scale_out/{id}", Kind.SCALE, Role.ROLLOUT),
    Route("POST", "/rollout/scale_out/{id}/cancel", Kind.SCALE, Role.ROLLOUT),
    Route("POST", "/rollout/scale_in", Kind.SCALE, Role.ROLLOUT),
    Route("GET", "/rollout/scale_in", Kind.SCALE, Role.ROLLOUT),
    Route("GET", "/rollout/scale_in/{id}", Kind.SCALE, Role.ROLLOUT),
    Route("GET", "/genrm/metrics", Kind.ROLE_METRICS, Role.GENRM),
    Route("GET", "/health", Kind.HEALTH),
    Route("GET", "/metrics", Kind.METRICS),
    Route("GET", "/", Kind.INDEX),
)

_EXACT: dict[str, dict[str, Route]] = {}
_PATTERNS: list[tuple[re.Pattern[str], dict[str, Route]]] = []
for _route in ROUTES:
    if "{" in _route.path:
        _PATTERNS.append((re.compile(re.sub(r"\{\w+\}", "[^/]+", _route.path)), {_route.method: _route}))
    else:
        _EXACT.setdefault(_route.path, {})[_route.method] = _route


def find(method: str, path: str) -> Route:
    """The row for a request. NotFound when the path has none, MethodNotAllowed when it has another method."""
    rows = _EXACT.get(path)
    if rows is None:
        rows = next((rows for pattern, rows in _PATTERNS if pattern.fullmatch(path)), None)
        if rows is None:
            raise NotFound(f"no route {path[:200]}; GET / lists what there is")
    route = rows.get("GET" if method == "HEAD" else method)
    if route is None:
        raise MethodNotAllowed(f"{method} {path[:200]} is not possible; use {' or '.join(rows)}")
    return route
