"""What leases do to engines: bring a whole role onto its GPUs, take it off them, and say what is not proven free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from relax_slurm.control.manager import InferenceManager
from relax_slurm.control.managers import Managers
from relax_slurm.control.routers import Routers
from relax_slurm.core.lifecycle import Move, Unproven
from relax_slurm.core.plan import Role
from relax_slurm.errors import EngineFailed, RelaxError


class RoleMover:
    """Moves the engines of holders that are roles; training moves itself."""

    def __init__(self, managers: Managers, routers: Routers, *, seconds: float) -> None:
        self._managers, self._routers, self._seconds = managers, routers, seconds

    async def move(self, holder: str, move: Move) -> None:
        """See `leases.Mover`. All models of the role at once; the first error, once all have ended."""
        managers = self._of(holder)
        works = [self._onload(manager) if move is Move.ONLOAD else manager.offload() for manager in managers]
        results = await asyncio.gather(*works, return_exceptions=True)
        failed = [result for result in results if isinstance(result, BaseException)]
        for error in failed:
            if not isinstance(error, RelaxError):
                raise error
        if failed:
            raise failed[0]

    async def _onload(self, manager: InferenceManager) -> None:
        pending = await manager.onload()
        model = manager.model
        if pending:
            raise EngineFailed(
                f"{model.role} model {model.name}: {', '.join(pending[:8])} came back without weights, which are on no"
                " disk; send them with an update, or start the engines with enable_weights_cpu_backup"
            )
        router = self._routers.of(model.role, model.name)
        if router is not None:
            await router.wait_complete(self._seconds)

    def abandon(self, holder: str, reason: str) -> None:
        """See `leases.Mover`."""
        for manager in self._of(holder):
            manager.abandon(reason)

    def unproven(self) -> Unproven:
        """See `leases.Mover`."""
        found: dict[str, list[str]] = {}
        for (role, _), manager in self._managers.items():
            held = [replica.engine_id for replica in manager.replicas if not replica.release_proven]
            found.setdefault(str(role), []).extend(held)
        return found

    def _of(self, holder: str) -> Sequence[InferenceManager]:
        return [manager for (role, _), manager in self._managers.items() if role == Role(holder)]
