"""Reads untrusted JSON bodies: strict UTF-8, no NaN, no deep nesting, no objects with so many keys that validation is slow."""

import logging
import re
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from server.http.errors import InvalidRequest, UnsupportedMediaType
from server.http.unknown_fields import without_unknown
from server.runtime import Runtime
from server.schemas.common import MAX_BIASED_TOKENS
from server.schemas.exact_json import with_written_floats
from server.schemas.strict_model import Ignored

log = logging.getLogger(__name__)

# Each unknown key of an object is an error that validation collects. No object of this API has more keys than a logit_bias.
_MAX_KEYS = MAX_BIASED_TOKENS
# Objects and lists in a body: more than the most messages with a few parts each, or the most prompts, need.
_MAX_CONTAINERS = 16384
# Decimals in these are not rounded.
_WITH_SCHEMAS = frozenset({"functions", "output_config", "response_format", "structured_outputs", "text", "tools"})
_MAX_WARNED = 256  # names of unknown fields that are logged; clients choose them
IGNORED_HEADER = "X-Ignored-Parameters"
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # possessive and with an optional end: linear time on any body


class StrictRequest(Request):
    """A request whose body is the result of `parsed_body`. A handler adds to `ignored` the fields that change nothing."""

    def __init__(self, scope: Scope, receive: Receive, value: Any, ignored: list[str]) -> None:
        super().__init__(scope, receive)
        self._value = value
        self.ignored = ignored

    async def json(self) -> Any:
        """Return the parsed body."""
        return self._value


class StrictRoute(APIRoute):
    """A route whose handler gets a StrictRequest without the ignored unknown fields.

    A header of the answer names the ignored fields: unknown fields, known fields that are marked as Ignored, and the handler's.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler."""
        handle = super().get_route_handler()
        model = self.dependant.body_params[0].field_info.annotation
        known, marks = _fields_of(model), _marks_of(model)
        ignorable = getattr(model, "ignored_fields", frozenset[str]())
        warned: set[str] = set()

        async def handle_strictly(request: Request) -> Response:
            body = await request.body()
            value = parsed_body(body, request.headers.get("content-type"))
            runtime: Runtime = request.app.state.runtime
            ignored: list[str] = []
            if isinstance(value, dict) and not runtime.settings.strict:
                value, ignored = without_unknown(value, known, ignorable)
            if isinstance(value, dict):
                named = [name for name in marks if name in value]
                variables = runtime.template_variables
                ignored += [name for name in named if marks[name].is_dropped(name, value[name], variables)]
            strict = StrictRequest(request.scope, request.receive, value, ignored)
            strict._body = body  # starlette caches a body that was read under this name
            response = await handle(strict)
            if ignored:
                response.headers[IGNORED_HEADER] = ", ".join(ignored)
                _warn_once(ignored, warned)
            return response

        return handle_strictly


def _fields_of(model: Any) -> frozenset[str]:
    """Return the field names and aliases of a request model."""
    return frozenset(name for key, field in model.model_fields.items() for name in (key, field.alias) if name)


def _marks_of(model: Any) -> dict[str, Ignored]:
    """Return the fields of a request model that are marked as Ignored."""
    return {name: mark for name, field in model.model_fields.items() for mark in field.metadata if isinstance(mark, Ignored)}


def _warn_once(names: Iterable[str], warned: set[str]) -> None:
    """Log each name the first time that it is ignored, up to a maximum number of names."""
    new = [name for name in names if name not in warned]
    if new and len(warned) < _MAX_WARNED:
        warned.update(new)
        log.warning("parameters are ignored, which is logged once: %s", ", ".join(new))


def parsed_body(body: bytes, content_type: str | None) -> Any:
    """Return the value of a JSON body; raise an ApiError if it is not valid JSON or exceeds a limit."""
    if not body:
        raise InvalidRequest("the body is empty")
    if not _is_json(content_type):
        raise UnsupportedMediaType
    if _num_containers(body) > _MAX_CONTAINERS:  # before parsing, which is slow for many small objects
        raise InvalidRequest(f"the body has more than {_MAX_CONTAINERS} objects and lists")
    try:
        value = from_json(body, allow_inf_nan=False)
        if isinstance(value, dict) and (with_schemas := _WITH_SCHEMAS & {*value}):
            value |= {name: field for name, field in with_written_floats(body).items() if name in with_schemas}
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    _check_keys(value)
    return value


def _is_json(content_type: str | None) -> bool:
    """Return whether a body is declared as JSON: application/json or application/*+json, as FastAPI checks it.

    A page of another origin can send other types, or none, without a CORS preflight; these must not be parsed.
    """
    kind, _, subtype = (content_type or "").partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _num_containers(body: bytes) -> int:
    """Return how many objects and lists a body opens. Brackets in strings are excluded only if the raw count is too large."""
    num_opened = body.count(b"[") + body.count(b"{")
    if num_opened <= _MAX_CONTAINERS:
        return num_opened
    outside = _STRING.sub(b"", body)
    return outside.count(b"[") + outside.count(b"{")


def _check_keys(value: Any) -> None:
    """Raise InvalidRequest for an object with too many keys."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict) and len(item) > _MAX_KEYS:
            raise InvalidRequest(f"the body has an object of more than {_MAX_KEYS} keys")
        # Validation stops at a list's first wrong item, so only a list that begins with an object or a list is searched.
        begins_with_one = isinstance(item, list) and bool(item) and isinstance(item[0], dict | list)
        inside = item.values() if isinstance(item, dict) else item if begins_with_one else ()
        waiting += [value for value in inside if isinstance(value, dict | list)]
