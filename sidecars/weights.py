"""Other weights for a running engine: closed, paused, empty, loaded, asked for its version, and going again.

What an engine says about its version is the only proof that counts. A checkpoint that could not be loaded leaves the
old weights in place, which the version shows; a transfer from a trainer that failed may have replaced some of them,
which it does not show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from relax_slurm.core.weights import OPERATIONS, Outcome, Transport
from relax_slurm.errors import DeadlineExceeded, EngineFailed, RelaxError, UpstreamFailed
from sidecars.engine import SGLangEngine
from sidecars.residency import Result, Tenancy

VERSION_SECONDS = 5.0
"""For the question after the version; it must be asked also when the update used up its time."""


class WeightChange:
    """One update of one engine. The head's call reaches the other workers of its replica inside the engine."""

    def __init__(self, engine: SGLangEngine, tenancy: Tenancy, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._tenancy, self._clock = engine, tenancy, clock

    async def run(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an `update_weights` command; its value. Refusals come before anything is closed."""
        transport, final = Transport(args["source"]), bool(args["final"])
        wanted = str(args["weight_version"])
        body = {**args["payload"], **({"weight_version": wanted} if final else {})}
        deadline = self._clock() + float(args["deadline_seconds"])
        self._engine.spec.check(OPERATIONS[transport])
        before = await self._version()
        if before is None:
            return self._value(Outcome.DOUBTFUL, None, "the engine did not say which weights it has; nothing was sent")
        quiet = await self._tenancy.quiet(deadline - self._clock(), float(args["drain_seconds"]))
        if not quiet.ok:
            # Nothing was sent. Whether it can still generate is not known, unless a rule refused before all else.
            kept = quiet.result is Result.REFUSED and not self._engine.paused
            return self._value(Outcome.KEPT if kept else Outcome.DOUBTFUL, before, quiet.message)
        outcome, version, reason = await self._load(transport, body, deadline, before, final, wanted)
        if outcome in (Outcome.UPDATED, Outcome.KEPT) and (final or outcome is Outcome.KEPT):
            awake = await self._tenancy.wake(max(deadline - self._clock(), VERSION_SECONDS))
            if not awake.ok:
                return self._value(Outcome.DOUBTFUL, version, f"{reason} {awake.message}".strip())
        return self._value(outcome, version, reason)

    async def _load(
        self, transport: Transport, body: dict[str, Any], deadline: float, before: str, final: bool, wanted: str
    ) -> tuple[Outcome, str | None, str]:
        try:
            await self._engine.change_weights(transport, body, deadline - self._clock())
        except EngineFailed as error:
            version = await self._version()
            kept = transport is Transport.DISK and version == before
            if kept:
                return Outcome.KEPT, version, error.message
            unsure = f"{error.message}; it may hold parts of the new weights"
            return Outcome.DOUBTFUL, version, unsure
        except (UpstreamFailed, DeadlineExceeded) as error:
            return Outcome.DOUBTFUL, await self._version(), f"the update had no clear outcome: {error.message}"
        if not final:
            return Outcome.TAKEN, before, ""
        version = await self._version()
        if version == wanted:
            return Outcome.UPDATED, version, ""
        said = "did not say its version" if version is None else f"says version {version!r}"
        return Outcome.DOUBTFUL, version, f"the engine took the update and {said}, wanted {wanted!r}"

    async def _version(self) -> str | None:
        try:
            return await self._engine.weight_version(VERSION_SECONDS)
        except RelaxError:
            return None

    def _value(self, outcome: Outcome, version: str | None, reason: str) -> dict[str, Any]:
        self._engine.weights_valid = outcome in (Outcome.UPDATED, Outcome.KEPT)
        return {"outcome": str(outcome), "weight_version": version, "reason": reason}
