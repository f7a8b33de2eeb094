"""Every message of the control protocol as a pydantic model (docs/protocol.md).

Unknown fields are ignored so that a newer peer can talk to an older one; missing and ill-typed ones are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, ValidationError

from relax_slurm.errors import ProtocolError
from relax_slurm.wire.lifecycle_messages import LIFECYCLE, LifecycleAsk, WaitCommitted
from relax_slurm.wire.message_base import AnyEpoch, Epoch, Name, OpId
from relax_slurm.wire.message_base import Message as _Message
from relax_slurm.wire.weight_messages import GetWeights, UpdateWeights, WeightsGroup


class PeerKind(StrEnum):
    """Who a peer is, as proven by its CURVE key."""

    COORDINATOR = "coordinator"
    """The one writer; binds, never connects."""
    SIDECAR = "sidecar"
    """A node daemon."""
    CLIENT = "client"
    """Gateway, trainer, supervisor, monitor or command line of the run's owner."""


class WorkerState(StrEnum):
    """What a sidecar knows of one engine process."""

    STARTING = "starting"
    """The process runs and is not yet healthy."""
    UP = "up"
    """Healthy and resident; admission may be open or closed."""
    ASLEEP = "asleep"
    """Released its memory, confirmed by measurement."""
    FAILED = "failed"
    """Alive but not usable: an operation did not finish or health is gone; memory unknown."""
    EXITED = "exited"
    """Process and all its descendants confirmed gone."""
    UNCONFIRMED = "unconfirmed"
    """Should be gone, but its end could not be confirmed."""


class Method(StrEnum):
    """What a coordinator may ask of a sidecar."""

    START_WORKER = "start_worker"
    """Start an engine process and answer when it is healthy (or not)."""
    STOP_WORKER = "stop_worker"
    """End an engine process and answer when its exit is confirmed."""
    OPEN_ADMISSION = "open_admission"
    """Let requests through the guard."""
    CLOSE_ADMISSION = "close_admission"
    """Stop admitting, drain, cancel what is left."""
    OFFLOAD = "offload"
    """Safe offload order; answers after memory was measured."""
    ONLOAD = "onload"
    """Bring released tags back; admission stays closed until `open_admission`."""
    UPDATE_WEIGHTS = "update_weights"
    """Close, load other weights, ask for the version; admission stays closed until `open_admission`."""
    WEIGHTS_GROUP = "weights_group"
    """Join or leave a group for distributed updates."""
    SHUTDOWN = "shutdown"
    """Stop every engine and leave."""


class WorkerStatus(_Message):
    """One worker as its sidecar sees it, in every beat."""

    worker_id: Name
    state: str
    generation: int | None = None
    """Generation of the replica that the worker was started for; what is said of another one is too late."""
    admission_open: bool = False
    in_flight: int = 0
    pid: int | None = None
    resident_tags: list[str] = Field(default_factory=list)
    memory_bytes: int | None = None
    suspect: bool = False
    """It lives and has stopped moving: nothing new is given to it."""
    detail: str = ""


class Hello(_Message):
    """First message of a sidecar; again whenever the epoch changes."""

    kind: Literal["hello"]
    node: Name
    incarnation: Name
    attempt: int
    report: dict[str, Any]
    workers: list[WorkerStatus] = Field(default_factory=list, max_length=256)


class Beat(_Message):
    """Liveness and worker states, once per `beat_seconds`."""

    kind: Literal["beat"]
    node: Name
    incarnation: Name
    epoch: Epoch
    seq: int
    workers: list[WorkerStatus] = Field(default_factory=list, max_length=256)


class Event(_Message):
    """A worker changed between beats."""

    kind: Literal["event"]
    node: Name
    incarnation: Name
    epoch: Epoch
    worker: WorkerStatus
    event: Name
    detail: str = ""


class Result(_Message):
    """The outcome of one command."""

    kind: Literal["result"]
    id: OpId
    node: Name
    incarnation: Name
    epoch: AnyEpoch
    ok: bool
    value: dict[str, Any] = Field(default_factory=dict)
    error: dict[str, Any] | None = None


class GetSnapshot(_Message):
    """Full schema 2 snapshot of one role."""

    kind: Literal["get_snapshot"]
    id: OpId
    role: Name


class GetState(_Message):
    """The state document."""

    kind: Literal["get_state"]
    id: OpId


class StepEnded(_Message):
    """The node's step is over, says whoever started it."""

    kind: Literal["step_ended"]
    id: OpId
    node: Name
    returncode: int
    proof: Name
    final: bool = False
    """It will not be started again, whatever the answer."""


class Stop(_Message):
    """End the run in good order."""

    kind: Literal["stop"]
    id: OpId
    reason: str = ""
    failed: bool = False
    """Something that the run needs cannot be had: it ends as FAILED instead of STOPPED."""


class MoveRole(_Message):
    """Take a role off its GPUs, or put it back; the state document tells how it ends."""

    kind: Literal["move_role"]
    id: OpId
    role: Name
    method: Literal["offload", "onload"]


class GatewayUp(_Message):
    """A gateway listens; the coordinator writes its URL to `endpoint.json`."""

    kind: Literal["gateway_up"]
    id: OpId
    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+$", max_length=300)]


class Ping(_Message):
    """Are you there, and which epoch is it?"""

    kind: Literal["ping"]
    id: OpId


FromSidecar = Hello | Beat | Event | Result
Request = (
    GetSnapshot
    | GetState
    | StepEnded
    | Stop
    | MoveRole
    | GatewayUp
    | LifecycleAsk
    | WaitCommitted
    | UpdateWeights
    | WeightsGroup
    | GetWeights
    | Ping
)


class Welcome(_Message):
    """Answer to hello."""

    kind: Literal["welcome"]
    epoch: Epoch
    beat_seconds: float
    silence_seconds: float


class BeatAck(_Message):
    """The head node is alive."""

    kind: Literal["beat_ack"]
    epoch: Epoch
    seq: int


class Command(_Message):
    """Do something; exactly one result follows."""

    kind: Literal["command"]
    id: OpId
    epoch: Epoch
    method: str
    args: dict[str, Any] = Field(default_factory=dict)


class Refused(_Message):
    """The last message was not accepted."""

    kind: Literal["refused"]
    code: Name
    message: str
    epoch: AnyEpoch = ""


ToSidecar = Welcome | BeatAck | Command | Refused


class Reply(_Message):
    """Answer to a request."""

    kind: Literal["reply"]
    id: str
    epoch: AnyEpoch
    ok: bool
    result: dict[str, Any] = Field(default_factory=dict)
    error: dict[str, Any] | None = None


class Update(_Message):
    """What changed in one role's snapshot."""

    kind: Literal["update"]
    role: Name
    epoch: Epoch
    base_revision: int
    revision: int
    update: dict[str, Any]


class Heartbeat(_Message):
    """Discovery is alive; revisions let a subscriber find a gap without traffic."""

    kind: Literal["heartbeat"]
    epoch: Epoch
    seq: int
    state: Name
    revisions: dict[str, int]


FromDiscovery = Update | Heartbeat

_TO_COORDINATOR: dict[str, type[FromSidecar | Request]] = {
    "hello": Hello,
    "beat": Beat,
    "event": Event,
    "result": Result,
    "get_snapshot": GetSnapshot,
    "get_state": GetState,
    "step_ended": StepEnded,
    "stop": Stop,
    "move_role": MoveRole,
    "gateway_up": GatewayUp,
    "wait_committed": WaitCommitted,
    "ping": Ping,
    "update_weights": UpdateWeights,
    "weights_group": WeightsGroup,
    "get_weights": GetWeights,
    **dict.fromkeys(LIFECYCLE, LifecycleAsk),
}
_TO_SIDECAR: dict[str, type[ToSidecar]] = {
    "welcome": Welcome,
    "beat_ack": BeatAck,
    "command": Command,
    "refused": Refused,
}
_ON_DISCOVERY: dict[str, type[FromDiscovery]] = {"update": Update, "heartbeat": Heartbeat}

SENDERS: dict[PeerKind, frozenset[str]] = {
    PeerKind.SIDECAR: frozenset({"hello", "beat", "event", "result"}),
    PeerKind.CLIENT: frozenset(_TO_COORDINATOR) - {"hello", "beat", "event", "result"},
    PeerKind.COORDINATOR: frozenset(),
}
"""Which kinds a peer may send to the coordinator."""


class UnknownKind(ProtocolError):
    """A well-formed body whose kind this version does not know."""

    code = "unknown_kind"


class IllFormed(ProtocolError):
    """A body of a known kind with missing or ill-typed fields."""

    code = "ill_formed"


class IdReused(ProtocolError):
    """The id of an operation or request came again with another method, kind or arguments."""

    code = "id_reused"


class Forbidden(ProtocolError):
    """A kind that this peer may not send."""

    code = "forbidden"


M = TypeVar("M", bound=_Message)


def _parse(table: Mapping[str, type[M]], body: dict[str, Any]) -> M:
    kind = body.get("kind")
    model = table.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise UnknownKind(f"message kind {str(kind)[:64]!r} is not one of {', '.join(sorted(table))}")
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise IllFormed(f"{kind}: field {where} is not acceptable: {first['msg']}") from None


def parse_for_coordinator(body: dict[str, Any], peer: PeerKind) -> FromSidecar | Request:
    """A message that arrived on `control`, checked against what this kind of peer may send."""
    message = _parse(_TO_COORDINATOR, body)
    if body["kind"] not in SENDERS[peer]:
        raise Forbidden(f"a {peer} may not send {body['kind']!r}")
    return message


def parse_for_sidecar(body: dict[str, Any]) -> ToSidecar:
    """A message from the coordinator to a sidecar."""
    return _parse(_TO_SIDECAR, body)


def parse_discovery(body: dict[str, Any]) -> FromDiscovery:
    """A message on the discovery socket."""
    return _parse(_ON_DISCOVERY, body)


def parse_reply(body: dict[str, Any]) -> Reply:
    """The answer to a request."""
    return _parse({"reply": Reply}, body)
