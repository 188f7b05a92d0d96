"""What handlers share: the runtime of their app, and the errors that the OpenAPI document declares."""

from typing import Any, cast

from starlette.requests import Request

from server.runtime import Runtime
from server.schemas.answer import ErrorBody

_MEANINGS = {
    400: "The request is not valid; `param` names the field",
    401: "No API key, or a wrong one",
    404: "The model is not served here",
    413: "The body is too large",
    500: "The server failed",
    503: "Not now: loading, full or shutting down; `Retry-After` says when to try again",
}

# `default` keeps FastAPI from declaring a 422 that is never sent.
ERRORS: dict[int | str, dict[str, Any]] = {
    **{status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()},
    "default": {"model": ErrorBody, "description": "Any other error"},
}


def runtime_of(request: Request) -> Runtime:
    """Return the app's runtime."""
    return cast(Runtime, request.app.state.runtime)
