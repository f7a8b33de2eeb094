"""Why the coordinator does not accept a message: the codes of `refused` and of error replies (docs/protocol.md)."""

from __future__ import annotations

from relax_slurm.errors import ProtocolError


class UnknownNode(ProtocolError):
    """A node that the allocation does not have."""

    code = "unknown_node"


class UnknownRole(ProtocolError):
    """A role that this run does not publish."""

    code = "unknown_role"


class StaleAttempt(ProtocolError):
    """A sidecar of an earlier attempt."""

    code = "stale_attempt"


class StaleEpoch(ProtocolError):
    """A message of another coordinator's epoch."""

    code = "stale_epoch"


class StaleIncarnation(ProtocolError):
    """A sidecar that has been replaced, or whose step is over."""

    code = "stale_incarnation"


class NotAsBound(ProtocolError):
    """A sidecar that was started again and reports something the plan cannot be bound to."""

    code = "not_as_bound"


class UnknownModel(ProtocolError):
    """A role or model that this run does not manage."""

    code = "unknown_model"


class UnknownOperation(ProtocolError):
    """No operation on weights of that id is remembered."""

    code = "unknown_operation"


class NotUpdatable(ProtocolError):
    """The model's replicas are in no state to take weights now."""

    http_status, code = 409, "not_updatable"


class WeightsBusy(ProtocolError):
    """The model's weights are being updated; one thing at a time."""

    http_status, code = 409, "weights_busy"


class Fault(ProtocolError):
    """A fault of relax-slurm while it handled a well-formed message; the log has the traceback."""

    code = "internal"


class TooManyWaiting(ProtocolError):
    """More clients wait for an answer than are kept."""

    code = "too_many_waiting"
