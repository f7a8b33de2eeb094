"""The plan as JSON text (plan.json of a run) and back, without loss."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from relax_slurm.core.plan import PLAN_VERSION, InferencePlacementPlan
from relax_slurm.errors import ConfigError


@cache
def _adapter() -> TypeAdapter[InferencePlacementPlan]:
    return TypeAdapter(InferencePlacementPlan)


def to_json(plan: InferencePlacementPlan) -> str:
    """The plan as indented JSON with a final newline; equal plans give equal text."""
    return _adapter().dump_json(plan, indent=2).decode() + "\n"


def to_value(plan: InferencePlacementPlan) -> dict[str, Any]:
    """The plan as plain dicts and lists, for a larger JSON document."""
    value: dict[str, Any] = _adapter().dump_python(plan, mode="json")
    return value


def from_json(text: str, label: str = "plan.json") -> InferencePlacementPlan:
    """The plan that `to_json` wrote. ConfigError for another version, damage or missing fields."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{label}: not JSON ({str(error)[:100]}); plan again") from None
    version = value.get("version") if isinstance(value, dict) else None
    if version != PLAN_VERSION or isinstance(version, bool):
        raise ConfigError(
            f"{label}: plan version is {str(version)[:40]}, this program reads version {PLAN_VERSION}; plan again"
        )
    try:
        return _adapter().validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{label}:{place}: {first['msg']}; the file is damaged, plan again") from None
