"""The walk of a run: wait for reports, bind, start phase by phase, serve, end (docs/architecture.md, The walk)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.manager import InferenceManager
from relax_slurm.control.node_reports import bind_nodes
from relax_slurm.core.plan import Mode, RolePlan
from relax_slurm.core.replica import Replica
from relax_slurm.core.replica_events import Evidence
from relax_slurm.core.run import RunEvent, RunState
from relax_slurm.errors import EngineFailed, RecoveryRequired, RelaxError
from relax_slurm.wire.messages import Method

log = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 45.0
"""A sidecar may need twenty seconds for an engine that does not listen to TERM."""
FAREWELL_SECONDS = 5.0
"""The same once every end on the node is proven: a sidecar that was told to end by others may be gone by then."""


async def walk(coordinator: Coordinator) -> dict[str, Any]:
    """Run to the end and answer the outcome (the content of outcome.json). Never raises `RelaxError`."""
    error: RelaxError | None = None
    try:
        await _until_stopped(coordinator, _bring_up(coordinator))
        if not coordinator.stop_wanted.is_set():
            coordinator.advance(RunEvent.ALL_READY)
            await _until_stopped(coordinator, _serve(coordinator))
    except Exception as caught:  # also a fault of ours must end the engines and leave an outcome
        error = caught if isinstance(caught, RelaxError) else _fault(caught)
        coordinator.advance(RunEvent.FAIL, error.message)
    if error is None:
        coordinator.advance(RunEvent.STOP, coordinator.stop_reason or "")
    left = await _end(coordinator)
    if left and error is None:
        error = _unproven(left)
        coordinator.advance(RunEvent.FAIL, error.message)
    elif error is None:
        coordinator.advance(RunEvent.ENDED)
    return _outcome(coordinator, error, left)


def _fault(caught: Exception) -> RelaxError:
    log.error("the coordinator failed", exc_info=caught)
    return EngineFailed(f"the coordinator failed ({type(caught).__name__}: {caught}); this is a fault of relax-slurm")


async def _until_stopped(coordinator: Coordinator, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` until it is done, a stop is wanted or a task of the coordinator failed."""
    doing = asyncio.create_task(work)
    stop = asyncio.create_task(coordinator.stop_wanted.wait())
    first: set[asyncio.Future[Any]] = {doing, stop, coordinator.fatal}
    try:
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if coordinator.fatal.done():
            coordinator.fatal.result()
        if doing.done():
            await doing
    finally:
        for task in (doing, stop):
            task.cancel()
        await asyncio.gather(doing, stop, return_exceptions=True)


async def _bring_up(coordinator: Coordinator) -> None:
    await _reports(coordinator)
    coordinator.advance(RunEvent.ALL_REPORTED)
    _bind(coordinator)
    coordinator.advance(RunEvent.BOUND)
    coordinator.start_routers()
    await coordinator.externals.start()
    coordinator.publish_all()
    for phase in sorted({role.phase for role in coordinator.plan.roles}):
        roles = [role for role in coordinator.plan.roles if role.phase == phase]
        managers = [manager for role in roles for manager in _managers(coordinator, role)]
        await _all(manager.start() for manager in managers)
        # The next phase uses the same cards: they must be proven free first.
        sharing = coordinator.leases.book.sharing
        # A role whose engines are all somebody else's has no GPUs, and so no lease.
        sleeping = [role for role in roles if role.pool and sharing[str(role.role)].deferred]
        await _all(manager.offload() for role in sleeping for manager in _managers(coordinator, role))
    seconds = coordinator.config.engine.startup_seconds
    # Sleeping engines are registered when their lease wakes them.
    await coordinator.routers.settle(seconds, engines=coordinator.plan.mode is not Mode.DEFER)
    for manager in coordinator.managers.values():
        manager.serve(rebuild=True)


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await several managers; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as group:
        # One sentence for the user; a fault of ours among them matters more.
        raise next(
            (each for each in group.exceptions if not isinstance(each, RelaxError)), group.exceptions[0]
        ) from None


async def _reports(coordinator: Coordinator) -> None:
    """Wait until every node has reported, can no longer report, or the time for it is over."""
    links = coordinator.links.nodes.values()
    try:
        async with asyncio.timeout(coordinator.config.control.bind_seconds):
            while not all(link.report is not None or link.lost for link in links):
                coordinator.nodes_changed.clear()
                await coordinator.nodes_changed.wait()
    except TimeoutError:
        missing = [link.name for link in links if link.report is None]
        coordinator.record("reports_missing", nodes=missing)


def _bind(coordinator: Coordinator) -> None:
    links = coordinator.links.nodes
    reports = {name: None if link.lost else link.report for name, link in links.items()}
    bound = bind_nodes(coordinator.plan, coordinator.allocation, coordinator.config, reports, coordinator.record)
    coordinator.bound = bound
    coordinator.run_dir.write_json("bound.json", bound.to_json())
    for role in coordinator.plan.roles:
        for model in role.models:
            if model.external:
                continue
            manager = InferenceManager(
                model,
                bound,
                coordinator.config,
                coordinator.links,
                coordinator.hooks,
                run_tag=coordinator.run_dir.tag,
                memory_saver=role.offload,
            )
            coordinator.managers.add(manager)


def _managers(coordinator: Coordinator, role: RolePlan) -> list[InferenceManager]:
    return [coordinator.managers[role.role, model.name] for model in role.models if not model.external]


async def _serve(coordinator: Coordinator) -> None:
    """Follow the replicas until a role has nothing left to serve with."""
    while True:
        await asyncio.sleep(coordinator.config.control.beat_seconds)
        coordinator.follow_replicas()
        for (role, model), manager in coordinator.managers.items():
            if manager.exhausted:
                raise EngineFailed(
                    f"{role} model {model} has no replica left and its restarts are used up: "
                    f"{manager.exhausted}; the engines' logs are in {coordinator.run_dir.logs}"
                )


async def _end(coordinator: Coordinator) -> list[Replica]:
    """Stop replicas, then sidecars. Answers the replicas whose end is not proven."""
    reason = coordinator.stop_reason or coordinator.run.reason or "the run ends"
    coordinator.leases.end(f"the run ends: {reason}")
    await asyncio.gather(*(manager.stop(reason) for manager in coordinator.managers.values()))
    await coordinator.routers.stop()
    await coordinator.externals.stop()
    nodes = [link.name for link in coordinator.links.nodes.values() if link.report is not None and not link.lost]
    await asyncio.gather(*(_shutdown_node(coordinator, node) for node in nodes))
    return [replica for manager in coordinator.managers.values() for replica in manager.unproven()]


async def _shutdown_node(coordinator: Coordinator, node: str) -> None:
    """Send the node's sidecar home. What it says on leaving is another proof, for stops that were not confirmed."""
    goodbye = asyncio.ensure_future(
        coordinator.links.command(
            node,
            Method.SHUTDOWN,
            {},
            operation_id=coordinator.hooks.new_id(),
            timeout_seconds=SHUTDOWN_SECONDS,
        )
    )
    while not (await asyncio.wait({goodbye}, timeout=FAREWELL_SECONDS))[0]:
        if not _in_doubt(coordinator, node):
            goodbye.cancel()
    if goodbye.cancelled():
        coordinator.record("shutdown_unanswered", node=node, reason="the sidecar is gone, and so are its engines")
        return
    try:
        value = goodbye.result()
    except RelaxError as error:
        coordinator.record("shutdown_unanswered", node=node, reason=error.message)
        return
    still = frozenset(str(worker) for worker in value.get("unconfirmed") or ())
    for manager in coordinator.managers.on_node(node):
        reason = f"the sidecar of {node} ended every engine"
        manager.on_node_emptied(node, Evidence.CONFIRMED_EXIT, reason, still)


def _in_doubt(coordinator: Coordinator, node: str) -> bool:
    """Whether the end of a replica that has a worker on the node is not proven."""
    managers = coordinator.managers.on_node(node)
    return any(node in manager.nodes_of(replica.engine_id) for manager in managers for replica in manager.unproven())


def _unproven(left: list[Replica]) -> RecoveryRequired:
    names = ", ".join(f"{replica.engine_id} ({replica.reason or replica.state})" for replica in left[:8])
    return RecoveryRequired(
        f"the end of {len(left)} replica(s) is not proven: {names}; their GPUs may still hold memory, "
        f"look at the nodes before they are given to somebody else"
    )


def _outcome(coordinator: Coordinator, error: RelaxError | None, left: list[Replica]) -> dict[str, Any]:
    state = coordinator.run.state
    outcome: dict[str, Any] = {
        "run": coordinator.run_dir.run,
        "attempt": coordinator.run_dir.attempt,
        "epoch": coordinator.epoch,
        "state": str(state if state in (RunState.STOPPED, RunState.FAILED) else RunState.FAILED),
        "exit_code": error.exit_code if error is not None else 0,
        "reason": coordinator.stop_reason or "",
        "unproven": [replica.engine_id for replica in left],
    }
    if error is not None:
        outcome["error"] = error.as_json()
    return outcome
