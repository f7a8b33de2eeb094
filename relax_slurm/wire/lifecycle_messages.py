"""Requests about leases and batches (docs/protocol.md, Leases and batches)."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from relax_slurm.wire.message_base import Message, Name, OpId

Batch = Annotated[int, Field(ge=0, lt=2**63)]


class LifecycleAsk(Message):
    """A lease or a batch shall change; the kind is the method (core/operations.py). Answered when it is done."""

    kind: Literal[
        "begin_batch",
        "offload_rollout",
        "onload_rollout",
        "acknowledge_rollout_offloaded",
        "begin_student_scoring",
        "activate",
        "deactivate",
        "commit_batch",
        "fail_batch",
        "recover",
    ]
    id: OpId
    batch: Batch | None = None
    holder: Name | None = None
    """A role or `training`, for activate and deactivate."""
    error: Annotated[str, Field(max_length=4096)] = ""
    """Why a batch fails."""
    member: Name | None = None
    """Which process of a training job comes or goes; null speaks for all of them."""


class WaitCommitted(Message):
    """Wait until a batch is committed or failed, but no longer than `seconds`."""

    kind: Literal["wait_committed"]
    id: OpId
    batch: Batch
    seconds: Annotated[float, Field(ge=0.0, le=60.0)] = 30.0


LIFECYCLE: tuple[str, ...] = get_args(LifecycleAsk.model_fields["kind"].annotation)
"""Kinds that are methods of the lifecycle coordinator."""
