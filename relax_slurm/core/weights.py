"""New weights for a model: what is asked, what each replica reports, and what follows from all reports. Pure.

One rule decides (docs/weights.md): a model has one weight version. As soon as one replica is proven to have the new
one, that is the model's, and a replica without it serves no more; while none has it, the old one stays, and a replica
serves on when its engine confirms the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

from relax_slurm.core.engine_spec import Operation
from relax_slurm.errors import ProtocolError


class Transport(StrEnum):
    """How new weights reach an engine."""

    DISK = "disk"
    """The engine loads a checkpoint from a path."""
    TENSOR = "tensor"
    """They are in the request, usually as handles of memory on the same card."""
    DISTRIBUTED = "distributed"
    """The trainer sends them in a collective of a group that was made before."""


class GroupAction(StrEnum):
    """What is done with a group for distributed updates."""

    INIT = "init"
    """Every engine joins."""
    DESTROY = "destroy"
    """Every engine leaves."""


class Outcome(StrEnum):
    """What an update came to at one replica."""

    UPDATED = "updated"
    """Loaded, and the engine says the wanted version."""
    TAKEN = "taken"
    """A part was loaded and more is to come."""
    KEPT = "kept"
    """Not loaded, and the engine confirms its old version."""
    DOUBTFUL = "doubtful"
    """What the engine holds now is not known."""


class Verdict(StrEnum):
    """What becomes of a replica after an update."""

    SERVE = "serve"
    """It takes requests again."""
    HOLD = "hold"
    """It stays closed for the next part."""
    AWAIT = "await"
    """It stays closed until somebody sends it the model's weights."""
    REBUILD = "rebuild"
    """It is ended and started with the model's weights."""


OPERATIONS: Final[Mapping[Transport, Operation]] = MappingProxyType(
    {
        Transport.DISK: Operation.UPDATE_WEIGHTS_DISK,
        Transport.TENSOR: Operation.UPDATE_WEIGHTS_TENSOR,
        Transport.DISTRIBUTED: Operation.UPDATE_WEIGHTS_DISTRIBUTED,
    }
)
"""What `core.engine_spec` has to allow."""

OWNED: Final = frozenset({"weight_version", "is_async", "keep_pause", "abort_all_requests"})
"""Fields of SGLang's update calls that the tool writes itself: admission is closed and the engine is paused."""
DEFAULT_GROUP: Final = "weight_update_group"
"""SGLang's name for a group that is not named."""


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights of a model."""

    version: str
    path: str | None
    """Where an engine that is started finds them; None when they came from the trainer and are nowhere on disk."""


@dataclass(frozen=True, slots=True)
class Report:
    """How an update ended at one replica."""

    replica_id: str
    outcome: Outcome
    version: str | None = None
    """What the engine says, None when it was not to be had."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What follows from the reports of an update."""

    weights: Weights
    """The model's from now on."""
    verdicts: Mapping[str, Verdict]


def decide(now: Weights, wanted: Weights, reports: Iterable[Report], *, final: bool, valid: frozenset[str]) -> Decision:
    """The model's weights and every replica's fate. `valid` names replicas that had the model's weights before."""
    listed = list(reports)
    adopted = final and any(report.outcome is Outcome.UPDATED for report in listed)
    weights = wanted if adopted else now
    # What was half sent cannot be taken back: the others wait for the next part, whatever one of them says.
    under_way = any(report.outcome is Outcome.TAKEN for report in listed)
    verdicts: dict[str, Verdict] = {}
    for report in listed:
        if report.outcome is Outcome.UPDATED:
            verdict = Verdict.SERVE
        elif report.outcome is Outcome.TAKEN:
            verdict = Verdict.HOLD
        elif report.outcome is Outcome.DOUBTFUL or (adopted and weights.path is not None):
            verdict = Verdict.REBUILD
        elif adopted or under_way or report.replica_id not in valid or report.version != now.version:
            verdict = Verdict.AWAIT
        else:
            verdict = Verdict.SERVE
        verdicts[report.replica_id] = verdict
    return Decision(weights, verdicts)


def check_update(transport: Transport, payload: Mapping[str, Any], where: str) -> None:
    """Refuse a payload that no engine could take, before any replica is closed for it. `ProtocolError`."""
    owned = sorted(OWNED & payload.keys())
    if owned:
        raise ProtocolError(f"{where}: payload has {', '.join(owned)}, which the tool writes itself; leave it out")
    if transport is Transport.DISK:
        if not isinstance(payload.get("model_path"), str) or not payload["model_path"]:
            raise ProtocolError(f"{where}: payload.model_path is {payload.get('model_path')!r}, wanted a path")
    elif transport is Transport.TENSOR:
        tensors = payload.get("serialized_named_tensors")
        if not _texts(tensors) or not tensors:
            raise ProtocolError(f"{where}: payload.serialized_named_tensors must be a list of base64 texts, not empty")
    else:
        names, dtypes, shapes = (payload.get(name) for name in ("names", "dtypes", "shapes"))
        three = [entry for entry in (names, dtypes, shapes) if isinstance(entry, list) and entry]
        if not (_texts(names) and _texts(dtypes) and len(three) == 3 and len({len(entry) for entry in three}) == 1):
            raise ProtocolError(
                f"{where}: payload names, dtypes and shapes must be three lists of one length, not empty"
            )


def check_group(action: GroupAction, payload: Mapping[str, Any], where: str) -> None:
    """The same for a group."""
    wanted = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int}
    if action is GroupAction.INIT:
        wrong = [name for name, kind in wanted.items() if type(payload.get(name)) is not kind]
        if wrong:
            raise ProtocolError(f"{where}: payload {', '.join(wrong)} missing or ill-typed; see SGLang's call")
    if not isinstance(payload.get("group_name", DEFAULT_GROUP), str):
        raise ProtocolError(f"{where}: payload.group_name is no text")


def group_of(payload: Mapping[str, Any]) -> str:
    """Name of the group that a payload means."""
    return str(payload.get("group_name", DEFAULT_GROUP))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
