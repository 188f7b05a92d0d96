"""Errors in the shape of Anthropic's API, for the requests of its clients: on its paths, and on `/v1/models` with its header.

Statuses are the server's own, but 503 becomes 529. It is the only status that this API documents for a server that is full, and
its clients have a class of their own for it. They retry both, after `Retry-After`.
"""

import re

from starlette.datastructures import Headers
from starlette.types import Scope

from server.http.logs import request_id_var
from server.schemas.answer import ErrorDetail, MessagesError, MessagesErrorDetail

VERSION_HEADER = "anthropic-version"

_PATH = re.compile(r"(?:/v1)*/messages(?:/.*)?")  # with a wrong base URL too
_STATUSES = {503: 529}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
WRONG_BASE = (
    "not found: the Messages API is at /v1/messages. The base URL of Anthropic's clients ends before /v1, "
    "that of @ai-sdk/anthropic with /v1"
)


def is_messages_path(path: str) -> bool:
    """Return whether a path is one of the Messages API, or would be one with another base URL."""
    return _PATH.fullmatch(path) is not None


def is_anthropic(scope: Scope) -> bool:
    """Return whether the client of a request reads answers in the format of Anthropic's API."""
    path = scope["path"]
    return is_messages_path(path) or (path.startswith("/v1/models") and VERSION_HEADER in Headers(scope=scope))


def anthropic_error(status: int, error: ErrorDetail) -> tuple[int, MessagesError]:
    """Return status and body of an error. The message names the field, for which the body has no place."""
    status = _STATUSES.get(status, status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    is_named = error.param is None or error.message.startswith((f"{error.param}: ", "unknown parameter: "))
    message = error.message if is_named else f"{error.param}: {error.message}"
    details = {} if error.code is None else {"error_code": error.code}
    detail = MessagesErrorDetail(type=kind, message=message, details=details)
    return status, MessagesError(type="error", error=detail, request_id=request_id_var.get())
