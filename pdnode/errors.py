"""Errors that cross module borders, and the exit codes and HTTP statuses that they map to."""

from dataclasses import dataclass
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of the command line (BSD sysexits, printed by name by systemd)."""

    OK = 0
    USAGE = 64
    UNAVAILABLE = 69
    INTERNAL = 70
    DEVICE_MISSING = 71
    TRY_AGAIN = 75
    CONFIG = 78
    FORCED = 143


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the configuration: `where` names the key, `text` what is allowed."""

    where: str
    text: str
    device: bool = False  # something the host lacks (exit 71), not a fault of the file (exit 78)

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class PdnodeError(Exception):
    """Base of all errors that the daemon raises on purpose."""


class ConfigError(PdnodeError):
    """The configuration cannot be used. Carries every problem, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = problems


class UsageError(PdnodeError):
    """A wrong command line that argparse cannot see: the text names the option (exit 64)."""


class DeviceMissing(PdnodeError):
    """A GPU, NIC, limit or library that the configuration asks for is not there (exit 71)."""


class EngineDied(PdnodeError):
    """The worker process is gone or answers nonsense; the text names the cause."""


class Cause(PdnodeError):
    """Why a request ended without an answer. `status` is its HTTP status (docs/api.md)."""

    status = 500
    code = "internal_error"
    retry_after_s: float | None = None


class BadRequest(Cause):
    """The request can never be served as it stands; `param` names the field."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, text: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(text)
        self.param = param
        if code is not None:
            self.code = code


class NotFound(BadRequest):
    """An unknown model or route."""

    status = 404
    code = "model_not_found"


class Unauthorized(BadRequest):
    """No API key, or one that is not known."""

    status = 401
    code = "invalid_api_key"


class QueueFull(Cause):
    status = 429
    code = "queue_full"
    retry_after_s = 1.0


class Unavailable(Cause):
    """Loading, draining, or no usable prefill under the policy `refuse`."""

    status = 503
    code = "unavailable"
    retry_after_s = 1.0


class PrefillLost(Cause):
    """The prefill peer was lost after dispatch and there was no other way."""

    status = 502
    code = "prefill_lost"


class Stalled(Cause):
    """No progress in time, and no other way."""

    status = 504
    code = "stalled"


class Corrupted(Cause):
    """`[peer] verify`: pages of the prompt do not hold what the prefill wrote."""

    code = "kv_corrupted"


class Cancelled(Cause):
    """An operator ended the request. 499 as gRPC maps its CANCELLED: no client sends it again by
    itself, as it would after 500."""

    status = 499
    code = "cancelled"


class ClientGone(Cause):
    """The client left; nobody reads the answer."""

    status = 499
    code = "client_closed_request"
