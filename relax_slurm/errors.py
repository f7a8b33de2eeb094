"""One exception tree. Every error knows its exit code, its HTTP status and what the reader should do.

    RelaxError
    ├── ConfigError            exit 2   the run file (or a flag) is wrong
    ├── PlanRefused            exit 3   the roles do not fit; one subclass per rule in core/placement
    ├── SubmissionRefused      exit 4   Slurm (or the local backend) did not take the job
    ├── BindingMismatch        exit 5   the GPUs found are not the GPUs planned
    ├── StartupFailed          exit 6   something did not come up, or not in time
    ├── EngineFailed           exit 7   an engine or a role failed while running
    ├── Preempted              exit 8   time limit, preemption or a drain from outside
    ├── RecoveryRequired       exit 9   the state of a GPU is in doubt; it stays fenced
    ├── ProtocolError          exit 1   a peer's message could not be accepted
    ├── NotBuilt               exit 1   a documented row that this version does not have yet
    └── RequestError                    answered over HTTP
        ├── BadRequest         400
        ├── Unauthorized       401
        ├── Forbidden          403
        ├── NotFound           404
        ├── MethodNotAllowed   405
        ├── BodyTooLarge       413
        ├── UpstreamFailed     502
        ├── Unavailable        503 + Retry-After
        └── DeadlineExceeded   504

A message is one sentence that says what, where, what was seen, what was wanted and what to do.
"""

from __future__ import annotations

from typing import Any, ClassVar


class RelaxError(Exception):
    """Root of the tree. `code` is the stable machine-readable name used in JSON."""

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500
    retry_after: ClassVar[int | None] = None
    code: ClassVar[str] = "internal"

    def __init__(self, message: str, *, detail: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail or {}

    def as_json(self) -> dict[str, Any]:
        """The error as the `error` object of a JSON answer."""
        kind = "invalid_request_error" if 400 <= self.http_status < 500 else "server_error"
        body: dict[str, Any] = {"message": self.message, "type": kind, "code": self.code}
        if self.detail:
            body["detail"] = self.detail
        return body


class ConfigError(RelaxError):
    """The run file, the cluster file or a flag is wrong."""

    exit_code, http_status, code = 2, 400, "config"


class PlanRefused(RelaxError):
    """The roles do not fit the GPUs; nothing was started."""

    exit_code, http_status, code = 3, 400, "plan_refused"


class SubmissionRefused(RelaxError):
    """The backend did not accept the job."""

    exit_code, code = 4, "submission_refused"


class BindingMismatch(RelaxError):
    """The physical GPUs are not the planned ones. `rows` is the table shown to the user."""

    exit_code, code = 5, "binding_mismatch"

    def __init__(self, message: str, *, rows: list[dict[str, str]] | None = None) -> None:
        super().__init__(message, detail={"rows": rows or []})
        self.rows = rows or []


class StartupFailed(RelaxError):
    """Something did not come up, or not in time."""

    exit_code, code = 6, "startup_failed"


class EngineFailed(RelaxError):
    """An engine or a role failed while the run was up."""

    exit_code, code = 7, "engine_failed"


class Preempted(RelaxError):
    """The run was drained because of a time limit, a preemption or a request from outside."""

    exit_code, code = 8, "preempted"


class RecoveryRequired(RelaxError):
    """What a GPU holds is in doubt, so it stays fenced until there is evidence of release."""

    exit_code, http_status, code = 9, 503, "recovery_required"


class ProtocolError(RelaxError):
    """A message on the wire could not be accepted; the peer gets told, the loop goes on."""

    http_status, code = 400, "protocol"


class NotBuilt(RelaxError):
    """A documented row that this version does not have; the message names the row."""

    http_status, code = 501, "not_built"


class RequestError(RelaxError):
    """Base of everything that is answered over HTTP."""


class BadRequest(RequestError):
    """The request itself is wrong; sending it again will not help."""

    http_status, code = 400, "bad_request"


class Unauthorized(RequestError):
    """No bearer token, or not the right one."""

    http_status, code = 401, "unauthorized"


class Forbidden(RequestError):
    """The route exists, for its owner only."""

    http_status, code = 403, "forbidden"


class NotFound(RequestError):
    """No such route."""

    http_status, code = 404, "not_found"


class MethodNotAllowed(RequestError):
    """The route exists, with another method."""

    http_status, code = 405, "method_not_allowed"


class BodyTooLarge(RequestError):
    """The body is over the configured limit; it was not read."""

    http_status, code = 413, "body_too_large"


class UpstreamFailed(RequestError):
    """The engine's connection failed, or its answer was not JSON where JSON was due. Never replayed."""

    http_status, code = 502, "upstream_failed"


class Unavailable(RequestError):
    """No engine may take the request now; nothing was sent to a GPU."""

    http_status, retry_after, code = 503, 1, "unavailable"


class DeadlineExceeded(RequestError):
    """The request's deadline passed; what the engine did with it is unknown."""

    http_status, code = 504, "deadline"


def shown(text: str, limit: int = 100) -> str:
    """A value from outside as a message prints it: quoted, on one line, and not longer than `limit` characters."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
