"""Leases, batches and the commit gate, asked of a run's coordinator.

    async with await LifecycleClient.of(run_dir) as lifecycle:
        await lifecycle.wait_committed(7)
        async with lifecycle.training(7):
            ...  # the GPUs are training's

Every call has an operation id of its own and is repeated under it until it is answered, so a lost answer changes
nothing twice. An error is the coordinator's own, by class.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from relax_slurm.core import lifecycle_errors
from relax_slurm.core.batch import BatchState
from relax_slurm.core.lease import TRAINING, LeaseState
from relax_slurm.core.lifecycle_errors import BatchFailed
from relax_slurm.core.operations import Method
from relax_slurm.core.plan import Role
from relax_slurm.errors import DeadlineExceeded, RelaxError, StartupFailed
from relax_slurm.wire.client import ControlClient, RemoteError
from relax_slurm.wire.keys import credentials
from relax_slurm.wire.messages import PeerKind

ANSWER_SECONDS = 240.0
"""How long to ask for one answer: the coordinator itself gives up an operation after 180 s."""
POLL_SECONDS = 20.0
"""How long one question of `wait_committed` stays open."""

_MEMBERS = itertools.count(1)

_BY_CODE: dict[str, type[RelaxError]] = {
    found.code: found
    for found in vars(lifecycle_errors).values()
    if isinstance(found, type) and issubclass(found, RelaxError) and found.__module__ == lifecycle_errors.__name__
}


class LifecycleClient:
    """Belongs to the event loop it is used in. Close it, or use it as a context manager."""

    def __init__(self, control: ControlClient, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        self._control = control
        self._answer_seconds = answer_seconds
        self._name = _name()

    @classmethod
    async def of(cls, run_dir: Path | str, **options: Any) -> LifecycleClient:
        """The client of a run by its folder (`launch --json` calls it run_dir). `StartupFailed` when it is not up."""
        path = Path(run_dir)
        if (outcome := await asyncio.to_thread(_outcome, path)) is not None:
            raise StartupFailed(f"the run in {path} is {outcome}; launch it again")
        try:
            endpoint = json.loads(await asyncio.to_thread((path / "endpoint.json").read_text))
        except (OSError, ValueError, RecursionError) as error:
            raise StartupFailed(
                f"{path} has no readable endpoint.json ({error}); is it the folder of a run that is up?"
            ) from None
        keys = credentials(path / "keys", PeerKind.CLIENT)
        return cls(ControlClient(endpoint["control"], keys, attempt_seconds=POLL_SECONDS + 5.0), **options)

    async def __aenter__(self) -> LifecycleClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        self._control.close()

    # --- batches --------------------------------------------------------------------------------------------

    async def begin_batch(self, batch: int) -> None:
        """Open a batch; returns when rollout serves. `BatchPending` when another client makes one."""
        await self._ask(Method.BEGIN_BATCH, batch, member=self._name)

    async def commit_batch(self, batch: int) -> None:
        """Let training have it. Only after it was published."""
        await self._ask(Method.COMMIT_BATCH, batch)

    async def fail_batch(self, batch: int, error: str) -> None:
        """Say that it will never be complete; every waiter gets the error."""
        await self._ask(Method.FAIL_BATCH, batch, error=error[:4096])

    async def wait_committed(self, batch: int, timeout_seconds: float = 86_400.0) -> None:
        """Return once it is committed. `BatchFailed` when it never will be, `DeadlineExceeded` at the timeout."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(f"batch {batch} is not committed after {timeout_seconds:g} s; it may be later")
            seconds = min(left, POLL_SECONDS)
            answer = await self._request("wait_committed", seconds + 10.0, batch=batch, seconds=seconds)
            if answer["state"] == "COMMITTED":
                return

    async def recover(self) -> None:
        """After a failure: let the run go on where the evidence suffices; `NotRecovered` says what is missing."""
        await self._ask(Method.RECOVER, None)

    async def give_up(self) -> int | None:
        """Fail the pending batch, whose producer is gone, and take its roles off their GPUs; answers its number.

        For an operator: a producer that lives is told that its batch failed.
        """
        state = await self.get_state()
        number, sharing = state["batch"]["id"], state["sharing"]
        pending = state["batch"]["state"] == BatchState.PENDING
        if pending:
            await self.fail_batch(number, "given up: its producer is gone")
        active = [name for name, lease in state["leases"].items() if lease == LeaseState.ACTIVE and name != TRAINING]
        for role in active if number is not None else ():
            if not set(sharing[role]) - {TRAINING}:
                continue  # it stands on GPUs that no other role uses
            if role == Role.ROLLOUT:
                await self.offload_rollout(number)
                await self.acknowledge_rollout_offloaded(number)
            else:
                await self.deactivate(role, number)
        return number if pending else None

    # --- leases ---------------------------------------------------------------------------------------------

    async def activate(self, role: str, batch: int) -> None:
        """Give a judge, a teacher or training its GPUs; returns when its engines serve."""
        await self._ask(Method.ACTIVATE, batch, holder=str(role))

    async def deactivate(self, role: str, batch: int) -> None:
        """Take them back; returns when every release is confirmed."""
        await self._ask(Method.DEACTIVATE, batch, holder=str(role))

    async def offload_rollout(self, batch: int) -> None:
        """Take rollout's engines off their GPUs; its lease stays until the release is acknowledged."""
        await self._ask(Method.OFFLOAD_ROLLOUT, batch)

    async def acknowledge_rollout_offloaded(self, batch: int) -> None:
        """Give rollout's lease back; `ReleaseUnconfirmed` when the evidence says otherwise."""
        await self._ask(Method.ACKNOWLEDGE_ROLLOUT_OFFLOADED, batch)

    async def begin_student_scoring(self, batch: int) -> None:
        """Give rollout its GPUs a second time; `onload_rollout` brings its engines back."""
        await self._ask(Method.BEGIN_STUDENT_SCORING, batch)

    async def onload_rollout(self, batch: int) -> None:
        """Bring rollout's engines back for student scoring."""
        await self._ask(Method.ONLOAD_ROLLOUT, batch)

    @asynccontextmanager
    async def training(self, batch: int) -> AsyncIterator[None]:
        """Training's lease for a committed batch. Roles that stand on its GPUs leave before and come back after,
        also when the block raises.

        Several processes that train together each enter it: the lease ends when the last of them has left. One that
        was killed inside stays in it, which `get_state` shows under `trainers`; `deactivate("training", batch)` is the
        word that all have left.
        """
        state = await self.get_state()
        rivals = state["sharing"].get(TRAINING)
        if rivals is None:  # training's GPUs are not the run's
            yield
            return
        member = _name()
        standing = [role for role in rivals if state["sharing"][role] == [TRAINING]]
        try:
            for role in standing:
                if state["leases"][role] != LeaseState.SLEEPING:  # one that a sibling sends away is waited for
                    await self.deactivate(role, batch)
            await self._taken(batch, member)
            try:
                yield
            finally:
                await self._ask(Method.DEACTIVATE, batch, holder=TRAINING, member=member)
        except BaseException:
            with suppress(RelaxError):  # unless their GPUs are in doubt
                await self._stand_again(standing, batch)
            raise
        await self._stand_again(standing, batch)

    async def _stand_again(self, roles: Sequence[str], batch: int) -> None:
        """Bring back those that only training keeps away, when nobody trains any more: the last one who leaves does."""
        for role in roles:
            state = await self.get_state()
            if state["leases"][TRAINING] != LeaseState.SLEEPING:
                return
            if state["leases"][role] == LeaseState.ACTIVE:
                continue
            try:
                await self.activate(role, batch)
            except lifecycle_errors.NotSleeping:
                if (await self.get_state())["leases"][TRAINING] == LeaseState.SLEEPING:
                    raise

    async def _taken(self, batch: int, member: str) -> None:
        try:
            await self._ask(Method.ACTIVATE, batch, holder=TRAINING, member=member)
        except asyncio.CancelledError:  # it may have been given all the same
            await self._ask(Method.DEACTIVATE, batch, holder=TRAINING, member=member)
            raise

    async def get_state(self) -> dict[str, Any]:
        """The state document of `status --json`."""
        return await self._request("get_state", 30.0)

    # --- asking ---------------------------------------------------------------------------------------------

    async def _ask(self, method: Method, batch: int | None, **fields: Any) -> None:
        await self._request(str(method), self._answer_seconds, batch=batch, **fields)

    async def _request(self, kind: str, timeout_seconds: float, /, **fields: Any) -> dict[str, Any]:
        try:
            return await self._control.request(kind, timeout_seconds=timeout_seconds, **fields)
        except RemoteError as error:
            raise _BY_CODE.get(error.remote_code, type(error))(*_arguments(error)) from None


def _name() -> str:
    """A name that nobody else has: of a producer, or of one who trains."""
    return f"{socket.gethostname()[:64]}:{os.getpid()}:{next(_MEMBERS)}:{secrets.token_hex(4)}"


def _outcome(path: Path) -> str | None:
    """How the run in this folder ended; None while it has not."""
    try:
        return str(json.loads((path / "outcome.json").read_text())["state"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _arguments(error: RemoteError) -> tuple[str, ...]:
    return (error.message,) if error.remote_code in _BY_CODE else (error.message, error.remote_code)


__all__ = ["BatchFailed", "LifecycleClient"]
