"""Answers that the gateway gives by itself: models, engines, health, the page of links."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relax_slurm.core.discovery import RoleSnapshot, model_resolvable, to_json, to_schema1
from relax_slurm.core.plan import Role
from relax_slurm.errors import BadRequest
from relax_slurm.gateway.routes import ROUTES


def models(snapshot: RoleSnapshot) -> dict[str, Any]:
    """Logical ids in OpenAI's list form."""
    owner = snapshot.role.value
    entries = [{"id": name, "object": "model", "created": 0, "owned_by": owner} for name in snapshot.models]
    return {"object": "list", "data": entries}


def engines(snapshot: RoleSnapshot, schema: str) -> dict[str, Any]:
    """The snapshot as schema 2, or as schema 1 for rollout. BadRequest for another schema."""
    if schema == "2":
        return to_json(snapshot)
    if schema == "1" and snapshot.role is Role.ROLLOUT:
        return to_schema1(snapshot)
    possible = "1 or 2" if snapshot.role is Role.ROLLOUT else "2"
    raise BadRequest(f"/{snapshot.role}/engines: schema {schema[:40]!r} is not known; use schema={possible}")


def role_health(role: Role, snapshot: RoleSnapshot | None, schema: str | None) -> tuple[int, dict[str, Any]]:
    """Status and body for a role's readiness. GenRM's default is the older schema 1, which speaks by its status.

    In schema 2 the answer is 200 and `ready` tells; `models` is empty while the registry is unavailable.
    """
    if schema is None:
        schema = "1" if role is Role.GENRM else "2"
    if schema == "1" and role is Role.GENRM:
        ready = snapshot is not None and snapshot.ready
        return (200 if ready else 503), {"status": "healthy" if ready else "unhealthy", "service": role.value}
    if schema != "2":
        raise BadRequest(f"/{role}/health: schema {schema[:40]!r} is not known; use schema=2")
    entries = {} if snapshot is None else snapshot.models
    return 200, {
        "schema_version": 2,
        "role": role.value,
        "gateway_alive": True,
        "registry_available": snapshot is not None,
        "ready": snapshot is not None and snapshot.ready,
        "models": {
            name: {"state": model.state.value, "ready": model_resolvable(model)} for name, model in entries.items()
        },
    }


def health(snapshots: Mapping[Role, RoleSnapshot | None], staleness_seconds: float) -> dict[str, Any]:
    """Liveness with a word on readiness; for everybody, so no names of models or nodes."""
    roles = {
        role.value: {"registry_available": snapshot is not None, "ready": snapshot is not None and snapshot.ready}
        for role, snapshot in snapshots.items()
    }
    ready = all(entry["ready"] for entry in roles.values())
    return {
        "status": "ok",
        "gateway_alive": True,
        "ready": ready,
        "staleness_seconds": staleness_seconds,
        "roles": roles,
    }


def index(roles: tuple[Role, ...]) -> bytes:
    """The routes of this run as a page."""
    rows = [
        f"<li>{route.method} " + (f'<a href="{route.path}">{route.path}</a>' if link else f"<code>{route.path}</code>")
        for route in ROUTES
        if route.role is None or route.role in roles
        for link in [route.method == "GET" and "{" not in route.path]
    ]
    page = f"<!doctype html><title>relax-slurm</title><h1>relax-slurm gateway</h1><ul>{''.join(rows)}</ul>"
    return page.encode()
