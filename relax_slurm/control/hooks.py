"""What a manager needs from the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relax_slurm.core.replica import Replica

if TYPE_CHECKING:
    from relax_slurm.control.manager import InferenceManager


@dataclass(frozen=True, slots=True)
class Hooks:
    """The coordinator as a manager knows it."""

    publish: Callable[[InferenceManager, Replica], None]
    record: Callable[..., None]
    """Append to events.jsonl."""
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    """Run as a task that the coordinator keeps and whose failure ends the run."""
    clock: Callable[[], float]
    new_id: Callable[[], str]
    may_run: Callable[[str], bool] = lambda role: True
    """Whether the role has its GPUs: nothing is built where somebody else may be."""
