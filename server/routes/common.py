"""Shared by the handlers: the runtime of their app, and the errors that the OpenAPI document declares."""

from collections.abc import Coroutine
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response

from server.http.disconnect import ClientGone, until_disconnect
from server.runtime import Runtime
from server.schemas.answer import ErrorBody

_CLIENT_LEFT = 499  # for the access log: the client is gone

_MEANINGS = {
    400: "The request is not valid; `param` names the field",
    401: "No API key, or a wrong one",
    403: "The key's role does not include this path, or the request comes from a page of another origin",
    404: "The model is not served here, or a stored response is not known",
    413: "The body is too large",
    415: "The body is not declared as JSON",
    429: "More requests than this key may make; `Retry-After` gives the seconds to wait",
    431: "The request has too many headers",
    500: "The server failed",
    504: "The request exceeded its time limit; a stream that has begun ends with this error",
    503: "Not now: loading, full or shutting down; `Retry-After` gives the seconds to wait",
}

# `default` keeps FastAPI from declaring a 422 that is never sent.
ERRORS: dict[int | str, dict[str, Any]] = {
    **{status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()},
    "default": {"model": ErrorBody, "description": "Any other error"},
}


def runtime_of(request: Request) -> Runtime:
    """Return the app's runtime."""
    return cast(Runtime, request.app.state.runtime)


async def unless_gone(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response. If the client disconnects, all work for it is cancelled, encoding included."""
    try:
        return await until_disconnect(request.receive, work)
    except ClientGone:
        return Response(status_code=_CLIENT_LEFT)
