"""The walk of a run: wait for reports, bind, start phase by phase, serve, end (docs/architecture.md, The walk)."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from relax_slurm.control.coordinator import Coordinator
from relax_slurm.control.manager import InferenceManager
from relax_slurm.core.binding import bind
from relax_slurm.core.plan import Mode, RolePlan
from relax_slurm.core.replica import Replica
from relax_slurm.core.report import NodeReport
from relax_slurm.core.run import RunEvent, RunState
from relax_slurm.errors import EngineFailed, ProtocolError, RecoveryRequired, RelaxError
from relax_slurm.wire.messages import Method

log = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 20.0


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


async def _until_stopped(coordinator: Coordinator, work: Any) -> None:
    """Do `work` until it is done, a stop is wanted or a task of the coordinator failed."""
    doing = asyncio.ensure_future(work)
    stop = asyncio.ensure_future(coordinator.stop_wanted.wait())
    try:
        await asyncio.wait({doing, stop, coordinator.fatal}, return_when=asyncio.FIRST_COMPLETED)
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
    coordinator.publish_all()
    for phase in sorted({role.phase for role in coordinator.plan.roles}):
        roles = [role for role in coordinator.plan.roles if role.phase == phase]
        managers = [manager for role in roles for manager in _managers(coordinator, role)]
        await _all(manager.start() for manager in managers)
        if coordinator.plan.mode is Mode.DEFER:
            # The next phase uses the same cards: they must be proven free first.
            await _all(manager.offload() for manager in managers)


async def _all(work: Any) -> None:
    """Await several managers; the first error cancels the others."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except* RelaxError as errors:
        raise errors.exceptions[0] from None


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
    reports: dict[str, NodeReport] = {}
    for link in coordinator.links.nodes.values():
        if link.report is not None and not link.lost:
            try:
                reports[link.name] = NodeReport.from_wire(link.report)
            except ProtocolError as error:
                coordinator.record("bad_report", node=link.name, reason=error.message)
    bound = bind(
        coordinator.plan,
        coordinator.allocation.facts(),
        reports,
        allow_unverified=coordinator.config.control.allow_unverified,
    )
    coordinator.bound = bound
    coordinator.run_dir.write_json("bound.json", bound.to_json())
    for role in coordinator.plan.roles:
        for model in role.models:
            coordinator.managers[role.role, model.name] = InferenceManager(
                model,
                bound,
                coordinator.config,
                coordinator.links,
                coordinator.hooks,
                run_tag=coordinator.run_dir.tag,
                memory_saver=role.offload,
            )


def _managers(coordinator: Coordinator, role: RolePlan) -> list[InferenceManager]:
    return [coordinator.managers[role.role, model.name] for model in role.models]


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
    stopping = [manager.stop(reason) for manager in coordinator.managers.values()]
    left = [replica for replicas in await asyncio.gather(*stopping) for replica in replicas]
    nodes = [link.name for link in coordinator.links.nodes.values() if link.incarnation and not link.lost]
    farewells = [_shutdown_node(coordinator, node) for node in nodes]
    await asyncio.gather(*farewells)
    return left


async def _shutdown_node(coordinator: Coordinator, node: str) -> None:
    try:
        await coordinator.links.command(
            node,
            Method.SHUTDOWN,
            {},
            operation_id=coordinator.hooks.new_id(),
            timeout_seconds=SHUTDOWN_SECONDS,
        )
    except RelaxError as error:
        coordinator.record("shutdown_unanswered", node=node, reason=error.message)


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
