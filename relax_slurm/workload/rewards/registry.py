"""Reward adapters by name. What a caller may do with one depends on what it declares, never on how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from relax_slurm.config.hints import nearest
from relax_slurm.core.plan import Role
from relax_slurm.errors import ConfigError
from relax_slurm.workload.samples import Sample


@dataclass(frozen=True, slots=True)
class RewardContext:
    """What an adapter is made from."""

    deferred: bool
    """Whether scoring happens in a stage of its own. A failure then fails the batch; otherwise an adapter may say 0."""
    gateway_url: str = ""
    token: str | None = field(default=None, repr=False)
    concurrency: int = 64
    options: Mapping[str, Any] = field(default_factory=dict)
    """`batch.reward` of the run file without `adapter`."""


class RewardAdapter(Protocol):
    """Scores samples by writing `reward` and `reward_detail`. Samples that are removed get none."""

    async def score(self, samples: Sequence[Sample]) -> None:
        """Score all of them."""

    async def close(self) -> None:
        """Close what it has open."""


@dataclass(frozen=True, slots=True)
class Registration:
    """An adapter and what it can do."""

    name: str
    make: Callable[[RewardContext], RewardAdapter]
    supports_deferred: bool
    """Whether it can score a whole batch in its own stage, with its role's lease, and fails loudly."""
    role: Role | None = None
    """Role whose engines it asks."""


class RewardRegistry:
    """All adapters that there are."""

    def __init__(self, registrations: Sequence[Registration] = ()) -> None:
        self._known: dict[str, Registration] = {}
        for each in registrations:
            self.add(each)

    def add(self, registration: Registration) -> None:
        """One more. ConfigError when the name is taken."""
        if registration.name in self._known:
            raise ConfigError(f"reward adapter {registration.name!r} is registered twice; choose another name")
        self._known[registration.name] = registration

    def __getitem__(self, name: str) -> Registration:
        """The adapter of this name, or the `Registration` that `module:NAME` is. ConfigError names the nearest one."""
        found = self._known.get(name)
        if found is None and ":" in name:
            return _imported(name)
        if found is None:
            near = nearest(name, self._known)
            hint = f"; did you mean {near!r}?" if near else ""
            names = ", ".join(self._known)
            raise ConfigError(f"batch.reward.adapter: {name!r} is not known, wanted one of {names}{hint}")
        return found

    def deferrable(self) -> tuple[str, ...]:
        """Names of those that can score in a stage of their own."""
        return tuple(name for name, each in self._known.items() if each.supports_deferred)


def _imported(name: str) -> Registration:
    module, _, attribute = name.partition(":")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"batch.reward.adapter: {name!r} cannot be imported ({error}); wanted module:NAME of a Registration that "
            "Python finds, for instance by PYTHONPATH"
        ) from None
    if not isinstance(found, Registration):
        raise ConfigError(f"batch.reward.adapter: {name!r} is {type(found).__name__}, wanted a Registration")
    return found
