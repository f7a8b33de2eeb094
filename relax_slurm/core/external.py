"""What is known of an engine that somebody else runs: the sum of looks at its head, nothing about processes. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relax_slurm.core.plan import ExternalPlan, ModelPlan, WeightSource
from relax_slurm.core.snapshot import EngineEntry, ModelEntry, ReplicaState, model_state

FAILURE_BUDGET = 3
"""Failed looks in a row after which it is FAILED; one is a network's bad moment."""
UNTOLD_VERSION = "default"
"""What SGLang itself says of weights that nobody gave a version."""


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the head."""

    healthy: bool
    weight_version: str | None = None
    reason: str = ""
    """Why it is not healthy."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The sum of all looks at one engine."""

    state: ReplicaState = ReplicaState.STARTING
    """STARTING before anything is known, then READY or FAILED."""
    failures: int = 0
    generation: int = 1
    weight_version: str | None = None
    reason: str = ""

    def after(self, look: Look) -> Sight:
        """What is known after one more look. An engine that comes back may be another one: a generation more."""
        if look.healthy:
            back = self.state is ReplicaState.FAILED
            version = look.weight_version or self.weight_version
            return Sight(ReplicaState.READY, 0, self.generation + back, version)
        failures = self.failures + 1
        # Before the first good look there is no service to keep up through a bad moment.
        lost = failures >= FAILURE_BUDGET or self.state is ReplicaState.STARTING
        state = ReplicaState.FAILED if lost else self.state
        return replace(self, state=state, failures=failures, reason=look.reason)

    def entry(self, engine: ExternalPlan) -> EngineEntry:
        """As discovery shows it."""
        ready = self.state is ReplicaState.READY
        return EngineEntry(engine.engine_id, engine.url, self.state, ready, self.generation, external=True)


def model_entry(model: ModelPlan, sights: dict[str, Sight]) -> ModelEntry:
    """The model as discovery shows it; `sights` by engine id."""
    engines = [sights[engine.engine_id].entry(engine) for engine in model.external]
    versions = [sights[engine.engine_id].weight_version for engine in model.external]
    told = next((version for version in versions if version), UNTOLD_VERSION)
    return ModelEntry(
        name=model.name,
        state=model_state(engine.state for engine in engines),
        route_mode=model.route_mode,
        router_url=None,
        weight_source=model.weight_source,
        weight_version=None if model.weight_source is WeightSource.STATIC else told,
        served_model_name=model.served_model_name,
        engines=tuple(sorted(engines, key=lambda engine: engine.engine_id)),
    )
