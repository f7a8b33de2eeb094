"""One sglang-router per routed model: started, looked at, told about engines, restarted and ended here (row E7).

`ModelRouter` has two lists: the engines that the router shall have (`want`, `unwant`; said by the coordinator when a
replica becomes READY or leaves READY) and those that it has, by the worker ids it gave. A pass over both asks for what
is missing and removes what must not be there. Its URL is published while the router is ready and has an engine; with
prefill and decode, one of each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from relax_slurm.children import end_child
from relax_slurm.control.restarts import Restarts
from relax_slurm.control.router_api import Presence, RouterApi, RouterWorker
from relax_slurm.control.router_program import RouterProgram, url_of
from relax_slurm.control.router_starter import NOT_INSTALLED
from relax_slurm.core.plan import Role, WorkerType
from relax_slurm.errors import EngineFailed, RelaxError, StartupFailed
from relax_slurm.forward import Upstream

log = logging.getLogger(__name__)
ROUTER_RESTARTS = 5
UP_SECONDS = 30.0
"""From the start of the process to its first answer: one second, and Python on a slow file system."""
UP_POLL_SECONDS = 0.1
LOOK_SECONDS = 2.0
"""Time between two looks at a router that has all it shall have."""
PASS_SECONDS = 0.1
"""The same while an engine is being added or removed."""
SILENT_LOOKS = 3
"""Looks in a row without an answer after which a living process counts as hanging."""
AGAIN_SECONDS = 2.0
"""Pause before an engine that the router refused is offered again."""
AT_ONCE = 32
"""Calls to one router at the same time."""


class RouterHangs(EngineFailed):
    """The process lives and does not answer."""

    code = "router_hangs"


@dataclass(slots=True)
class _Known:
    """What the router was told about one URL."""

    worker: RouterWorker
    worker_id: str
    present: bool = False
    leaving: bool = False


class ModelRouter:
    """The router of one model. Belongs to the coordinator's loop."""

    def __init__(
        self,
        role: Role,
        program: RouterProgram,
        upstream: Upstream,
        *,
        record: Callable[..., None],
        changed: Callable[[ModelRouter], None],
        ports_taken: set[int],
    ) -> None:
        self.role, self.model = role, program.model
        self.url: str | None = None
        """Base URL while it may be published."""
        self.pid: int | None = None
        self.answers = False
        """Whether the present process has answered."""
        self._program, self._upstream = program, upstream
        self._record, self._tell, self._taken = record, changed, ports_taken
        self._wanted: dict[str, RouterWorker] = {}
        self._known: dict[str, _Known] = {}
        self._not_before: dict[str, float] = {}
        self._work = asyncio.Event()
        self._settled = asyncio.Event()
        self._before: tuple[int, int] | None = None
        self._spoilt: set[int] = set()
        """Ports with which a process ended before it answered: somebody else may have been quicker."""
        self._ready = False
        self._base_url = ""

    # --- what the coordinator says and reads ----------------------------------------------------------------

    def want(self, worker: RouterWorker) -> None:
        """The engine is READY: register it. Again with another URL or generation: register that one instead."""
        if self._wanted.get(worker.replica_id) != worker:
            self._wanted[worker.replica_id] = worker
            self._not_before.pop(worker.url, None)
            self._stir()

    def unwant(self, replica_id: str) -> None:
        """The engine is not READY: remove it."""
        if self._wanted.pop(replica_id, None) is not None:
            self._stir()

    @property
    def registered(self) -> dict[str, str]:
        """Replica id to the router's worker id, of all that are registered and shall be."""
        return {known.worker.replica_id: known.worker_id for known in self._known.values() if self._serves(known)}

    @property
    def complete(self) -> bool:
        """Whether it has every engine that it shall have, and would take requests if there are any."""
        if not self.answers or len(self.registered) < len(self._wanted):
            return False
        return self.url is not None or not self._wanted

    async def wait_answers(self, seconds: float) -> None:
        """Until it answers; `StartupFailed` after `seconds`."""
        await self._wait(lambda: self.answers, seconds, "does not answer")

    async def wait_complete(self, seconds: float) -> None:
        """Until `complete`; `StartupFailed` names the engines that are missing after `seconds`."""
        await self._wait(lambda: self.complete, seconds, "is not ready with all its engines")

    async def _wait(self, reached: Callable[[], bool], seconds: float, fault: str) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not reached():
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError:
            missing = sorted(self._wanted.keys() - self.registered.keys())
            raise StartupFailed(
                f"the router of {self.role} model {self.model} {fault} after {seconds:g} s "
                f"(missing: {', '.join(missing[:8]) or 'none'}); see {self._program.log}"
            ) from None

    def _stir(self) -> None:
        self._work.set()
        self._publish()

    def _serves(self, known: _Known) -> bool:
        return known.present and not known.leaving and self._wanted.get(known.worker.replica_id) == known.worker

    # --- the process ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep the router up until cancelled. `StartupFailed` or `EngineFailed` when it cannot be kept."""
        restarts = Restarts(ROUTER_RESTARTS)
        while True:
            ports = self._choose_ports()
            process = await self._program.start(*ports)
            self.pid = process.pid
            self._record("router_started", role=self.role, model=self.model, pid=process.pid, port=ports[0])
            reason = ""
            try:
                reason = await self._life(process, url_of(self._program.host, ports[0]))
            finally:
                answered = self.answers
                self._down()
                await end_child(process)
            if not answered:
                self._spoilt.update(ports)
            code = process.returncode
            self._record("router_ended", role=self.role, model=self.model, code=code, reason=reason)
            log.warning("router of %s ended with code %s: %s", self.model, code, reason or "by itself")
            if code == NOT_INSTALLED:
                raise self._program.missing("it has no sglang_router")
            if restarts.last:
                raise EngineFailed(
                    f"the router of {self.role} model {self.model} ended {1 + ROUTER_RESTARTS} times, last with code "
                    f"{code}; see {self._program.log}"
                )
            await restarts.again()

    def _choose_ports(self) -> tuple[int, int]:
        """Those of the process before, if they are still free: a client that kept the URL finds it again."""
        earlier, self._before = self._before, None
        self._taken.difference_update(earlier or ())
        try:
            self._before = self._program.choose_ports(self._taken | self._spoilt)
        except StartupFailed:
            self._before = self._program.choose_ports(self._taken)
        self._taken.update(self._before)
        return self._before

    async def _life(self, process: asyncio.subprocess.Process, base_url: str) -> str:
        """One process, until it ends or hangs; why we end it, empty when it ended by itself."""
        api = RouterApi(base_url, self._program.key, self._upstream)
        ended = asyncio.create_task(process.wait())
        tending = asyncio.create_task(self._tend(api))
        try:
            await asyncio.wait({ended, tending}, return_when=asyncio.FIRST_COMPLETED)
            if not tending.done():
                return ""
            await tending
        except RouterHangs as error:
            return error.message
        finally:
            for task in (ended, tending):
                task.cancel()
            await asyncio.gather(ended, tending, return_exceptions=True)
        return ""

    def _down(self) -> None:
        """A new process knows nothing: whatever was registered is to be registered again."""
        self.answers, self.pid = False, None
        self._known.clear()
        self._not_before.clear()
        self._set_url(None)

    # --- looking after it -----------------------------------------------------------------------------------

    async def _tend(self, api: RouterApi) -> None:
        await self._come_up(api)
        failures = 0
        while True:
            self._work.clear()
            try:
                await self._pass(api)
                self._ready = await self._is_ready(api)
                failures = 0
            except RelaxError as error:
                failures += 1
                log.warning("router of %s: %s", self.model, error)
                if failures >= SILENT_LOOKS:
                    raise RouterHangs(
                        f"the router of {self.role} model {self.model} failed {failures} looks in a row "
                        f"({error.message}); see {self._program.log}"
                    ) from None
            self._base_url = api.base_url
            self._publish()
            self._settled.set()
            busy = self.registered.keys() != self._wanted.keys() or len(self._known) > len(self._wanted)
            try:
                async with asyncio.timeout(
                    PASS_SECONDS if busy or (self._wanted and not self._ready) else LOOK_SECONDS
                ):
                    await self._work.wait()
            except TimeoutError:
                continue

    async def _is_ready(self, api: RouterApi) -> bool:
        if self.registered:
            return await api.ready()
        await api.alive()  # it would answer 503 and write an error into its log, look by look
        return False

    async def _come_up(self, api: RouterApi) -> None:
        self._ready = False
        deadline = asyncio.get_running_loop().time() + UP_SECONDS
        while not self.answers:
            try:
                await api.alive()
                self.answers = True
            except RelaxError as error:
                if asyncio.get_running_loop().time() >= deadline:
                    raise RouterHangs(f"no answer within {UP_SECONDS:g} s of its start: {error.message}") from None
                await asyncio.sleep(UP_POLL_SECONDS)

    async def _pass(self, api: RouterApi) -> None:
        """Ask for what is missing, remove what must not be there, look at what is under way."""
        for known in self._known.values():
            known.leaving = known.leaving or self._wanted.get(known.worker.replica_id) != known.worker
        await _some_at_once(self._look_at(api, url, known) for url, known in list(self._known.items()))
        now = asyncio.get_running_loop().time()
        missing = [
            worker
            for worker in self._wanted.values()
            if worker.url not in self._known and self._not_before.get(worker.url, 0.0) <= now
        ]
        await _some_at_once(self._add(api, worker) for worker in missing)

    async def _add(self, api: RouterApi, worker: RouterWorker) -> None:
        self._known[worker.url] = _Known(worker, await api.add(worker))

    async def _look_at(self, api: RouterApi, url: str, known: _Known) -> None:
        if known.present and not known.leaving:
            return
        if known.present:
            await api.remove(known.worker_id)
            known.present = False
        sight = await api.look(known.worker_id)
        registered = sight.presence in (Presence.PRESENT, Presence.UNHEALTHY)
        if known.leaving:
            if registered:
                known.present = True  # an addition that was under way has ended, or the removal has not: ask again
            elif sight.presence is not Presence.PENDING:
                del self._known[url]
                self._note("router_removed", known)
        elif sight.presence is Presence.PRESENT:
            known.present = True
            self._note("router_registered", known)
        elif sight.presence in (Presence.REFUSED, Presence.ABSENT):
            del self._known[url]
            self._not_before[url] = asyncio.get_running_loop().time() + AGAIN_SECONDS
            self._note("router_refused", known, sight.detail)

    def _note(self, event: str, known: _Known, reason: str = "") -> None:
        worker = known.worker
        self._record(
            event,
            role=self.role,
            replica=worker.replica_id,
            generation=worker.generation,
            worker_id=known.worker_id,
            reason=reason,
        )

    # --- publishing -----------------------------------------------------------------------------------------

    def _publish(self) -> None:
        types = {known.worker.worker_type for known in self._known.values() if self._serves(known)}
        needed = {WorkerType.PREFILL, WorkerType.DECODE} if self._program.disaggregated else {WorkerType.REGULAR}
        self._set_url(self._base_url if self.answers and self._ready and needed <= types else None)

    def _set_url(self, url: str | None) -> None:
        if url != self.url:
            self.url = url
            self._record("router_url", role=self.role, model=self.model, url=url)
            self._tell(self)


async def _some_at_once(calls: Iterable[Awaitable[None]]) -> None:
    """All of them, a bounded number at the same time; the first error comes after all have ended."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(call: Awaitable[None]) -> None:
        async with gate:
            await call

    results = await asyncio.gather(*(one(call) for call in calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result


class Routers:
    """All routers of a run."""

    def __init__(self) -> None:
        self._by_model: dict[tuple[Role, str], ModelRouter] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._upstream: Upstream | None = None

    def start(
        self,
        programs: Mapping[tuple[Role, str], RouterProgram],
        *,
        record: Callable[..., None],
        changed: Callable[[ModelRouter], None],
        spawn: Callable[[Any], asyncio.Task[None]],
    ) -> None:
        """Start one router per program. A fault of one goes where faults of `spawn`'s tasks go."""
        self._upstream = Upstream()
        taken: set[int] = set()
        for (role, name), program in programs.items():
            router = ModelRouter(role, program, self._upstream, record=record, changed=changed, ports_taken=taken)
            self._by_model[role, name] = router
            self._tasks.append(spawn(router.run()))

    def of(self, role: Role, model: str) -> ModelRouter | None:
        """The model's router, None when requests go straight to its engines."""
        return self._by_model.get((role, model))

    @property
    def all(self) -> list[ModelRouter]:
        """Every router."""
        return list(self._by_model.values())

    @property
    def complete(self) -> bool:
        """Whether every router has every engine that it shall have."""
        return all(router.complete for router in self._by_model.values())

    async def settle(self, seconds: float, *, engines: bool) -> None:
        """Until every router answers and, with `engines`, has all of them. `StartupFailed` after `seconds`."""
        for router in self._by_model.values():
            await (router.wait_complete(seconds) if engines else router.wait_answers(seconds))

    async def stop(self) -> None:
        """End every router; again no-op."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._upstream is not None:
            await self._upstream.close()
