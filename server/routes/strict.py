"""Reading JSON bodies without trust: strict UTF-8, no NaN, no deep nesting, no objects wide enough to drown the validator."""

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

# Each unknown key of an object is an error that validation collects; no object of this API has nearly as many.
_MAX_KEYS = 256


class StrictRequest(Request):
    """A request whose body is parsed as the JSON standard says."""

    async def json(self) -> Any:
        """Return the parsed body. Raises JSONDecodeError, which is answered with 400."""
        body = await self.body()
        try:
            value = from_json(body, allow_inf_nan=False)
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        if _has_wide_object(value):
            raise json.JSONDecodeError(f"an object has more than {_MAX_KEYS} keys", "", 0)
        return value


class StrictRoute(APIRoute):
    """A route whose handler gets a StrictRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def _has_wide_object(value: Any) -> bool:
    if isinstance(value, dict):
        return len(value) > _MAX_KEYS or any(map(_has_wide_object, value.values()))
    # Lists fail at their first wrong item, so only those that begin with a container can hide one.
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict | list) and any(map(_has_wide_object, value))
