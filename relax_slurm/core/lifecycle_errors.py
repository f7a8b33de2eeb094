"""What the lifecycle coordinator refuses, and how an operation of its can end badly. Each class has its own code."""

from __future__ import annotations

from relax_slurm.errors import RecoveryRequired, RelaxError


class LifecycleRefused(RelaxError):
    """A lifecycle request that does not fit the state; nothing was changed."""

    exit_code, http_status, code = 7, 409, "lifecycle_refused"


class OutOfOrder(LifecycleRefused):
    """The method has no place at this point of the batch."""

    code = "out_of_order"


class NotSleeping(LifecycleRefused):
    """Somebody who must sleep does not: the GPUs are not free."""

    code = "not_sleeping"


class OperationUnderWay(LifecycleRefused):
    """The holder's engines are being moved by another operation."""

    code = "operation_under_way"


class NoSuchBatch(LifecycleRefused):
    """The batch is neither pending nor known as committed."""

    code = "no_such_batch"


class NoSuchHolder(LifecycleRefused):
    """The run has no such role."""

    code = "no_such_holder"


class BatchPending(LifecycleRefused):
    """Another batch is not through yet."""

    code = "batch_pending"


class BatchFailed(LifecycleRefused):
    """The batch, or one before it, failed: nothing of it becomes training data."""

    code = "batch_failed"


class OperationReused(LifecycleRefused):
    """The id of an operation came again for something else."""

    code = "operation_reused"


class OperationRetired(LifecycleRefused):
    """The id belongs to an operation of an earlier batch."""

    code = "operation_retired"


class ReleaseUnconfirmed(RecoveryRequired):
    """Rollout says it has left, and the evidence does not."""

    code = "release_unconfirmed"


class MoveFailed(RecoveryRequired):
    """An onload or offload failed: what the GPUs hold is in doubt."""

    code = "move_failed"


class MoveTimedOut(RecoveryRequired):
    """An onload or offload did not end in time: what the GPUs hold is in doubt."""

    code = "move_timed_out"


class NotRecovered(RecoveryRequired):
    """There is no evidence yet that every GPU is free."""

    code = "not_recovered"
