"""The errors of the API and their body: `{"error": {message, type, param, code}}`, or Anthropic's shape for its clients.

    ApiError
    ├── InvalidRequest (400)
    │   ├── ContextTooLong (400, context_length_exceeded)
    │   └── UnknownHost (400, unknown_host)
    ├── BadApiKey (401)
    ├── Forbidden (403)
    │   ├── ForeignPage (403, foreign_origin)
    │   └── WrongRole (403, wrong_role)
    ├── UnknownModel (404, model_not_found)
    ├── UnknownResponse (404)
    ├── BodyTooLarge (413)
    ├── UnsupportedMediaType (415)
    ├── TooManyRequests (429, Retry-After)
    ├── TooManyHeaders (431)
    ├── GenerationFailed (500)
    ├── Overloaded (503, Retry-After)
    └── DeadlineExceeded (504; server/http/time_limits.py)

Error text is bounded: an answer must not repeat long input of the client.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.core.service import EngineBusy, EngineError, EngineUnavailable
from server.http.anthropic_errors import WRONG_BASE, anthropic_error, is_anthropic, is_messages_path
from server.http.validation_messages import messages_by_field, of_best_forms, param_of
from server.schemas.answer import ErrorBody, ErrorDetail

MAX_ERRORS = 10
MAX_MESSAGE_CHARS = 1000
MAX_INPUT_CHARS = 200
_MAX_PATH_CHARS = 100
_EMBEDDINGS = re.compile(r"/(embeddings?|embed)/?$")  # of OpenAI, llama.cpp, TEI and Ollama


def clipped(text: str, limit: int) -> str:
    """Return `text` cut to `limit` characters and fit for UTF-8 (no lone surrogates)."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


class ApiError(Exception):
    """Base of every error that has an answer; subclasses define status and type."""

    status = 500
    type = "server_error"

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorBody:
        """The answer's body."""
        param = None if self.param is None else clipped(self.param, MAX_INPUT_CHARS)
        message = clipped(str(self), MAX_MESSAGE_CHARS)
        return ErrorBody(error=ErrorDetail(message=message, type=self.type, param=param, code=self.code))

    def answer_to(self, scope: Scope) -> tuple[int, BaseModel]:
        """Return status and body in the shape that the client of a request reads."""
        return anthropic_error(self.status, self.body.error) if is_anthropic(scope) else (self.status, self.body)

    def response(self) -> Response:
        """Return the HTTP answer."""
        return ErrorResponse(self)


class ErrorResponse(Response):
    """The answer of an error, whose shape depends on the request."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(status_code=error.status)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        status, body = self._error.answer_to(scope)
        await JSONResponse(body.model_dump(), status, self._error.headers)(scope, receive, send)


class InvalidRequest(ApiError):
    """The client's mistake; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextTooLong(InvalidRequest):
    """Prompt and answer do not fit."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message, param, "context_length_exceeded")


class BadApiKey(ApiError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"

    def __init__(self) -> None:
        super().__init__("missing or wrong API key", None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


class UnknownHost(InvalidRequest):
    """A host name that is not accepted for this server."""

    def __init__(self) -> None:
        super().__init__("the name in Host is not a name of this server; allowed_hosts adds names", None, "unknown_host")


class Forbidden(ApiError):
    """An action that this client may not perform."""

    status = 403
    type = "permission_error"


class ForeignPage(Forbidden):
    """A page of another origin."""

    def __init__(self) -> None:
        super().__init__("pages of this origin may not call the API; cors_origins adds origins", None, "foreign_origin")


class WrongRole(Forbidden):
    """A key whose role does not include the path."""

    def __init__(self, role: str) -> None:
        super().__init__(f"a key of role {role} may not do this", None, "wrong_role")


class UnknownModel(ApiError):
    """A model that is not served here."""

    status = 404
    type = "invalid_request_error"

    def __init__(self, name: str) -> None:
        super().__init__(f"the model {clipped(name, MAX_INPUT_CHARS)!r} is not served here", "model", "model_not_found")


class UnknownResponse(ApiError):
    """A stored response, or an item of one, that this key has not."""

    status = 404
    type = "invalid_request_error"


class BodyTooLarge(ApiError):
    """A body over the limit."""

    status = 413
    type = "invalid_request_error"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the request body is larger than {limit_bytes} bytes", None, "body_too_large", {"Connection": "close"})


class UnsupportedMediaType(ApiError):
    """A body that is not declared as JSON: pages of other origins can send such bodies without a CORS preflight."""

    status = 415
    type = "invalid_request_error"

    def __init__(self) -> None:
        super().__init__("Content-Type must be application/json", None, "unsupported_media_type")


class TooManyRequests(ApiError):
    """More requests or tokens than this key may use; the header gives the seconds to wait."""

    status = 429
    type = "requests"  # OpenAI's type of this error

    def __init__(self, message: str, code: str, retry_after_s: float) -> None:
        super().__init__(message, None, code, _retry_after(retry_after_s))


class TooManyHeaders(ApiError):
    """More headers than a client needs."""

    status = 431
    type = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"the request has more than {limit} headers", None, "too_many_headers", {"Connection": "close"})


class GenerationFailed(ApiError):
    """The engine ended a request with an error."""


class Overloaded(ApiError):
    """The server cannot accept the request now; the header gives the seconds to wait."""

    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, code: str, retry_after_s: float) -> None:
        super().__init__(message, None, code, _retry_after(retry_after_s))


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def as_api_error(error: Exception) -> ApiError:
    """Return the API error for any exception. An unknown exception is a 500 without internal details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineBusy):
        return Overloaded(str(error), "engine_busy", error.retry_after_s)
    if isinstance(error, EngineUnavailable):
        return Overloaded(str(error), "engine_unavailable", error.retry_after_s)
    if isinstance(error, EngineError):
        return GenerationFailed(str(error))
    return ApiError("internal error; the log has it under this X-Request-Id")


def as_invalid_request(errors: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Return the 400 for validation errors: `param` is the first field, the message describes the first MAX_ERRORS."""
    errors = of_best_forms(errors)
    unknown = [param_of(error) or "" for error in errors if error["type"] == "extra_forbidden"]
    sentences = {name: f"unknown parameter: {clipped(name, MAX_INPUT_CHARS) or repr(name)}" for name in unknown}
    for param, words in messages_by_field([error for error in errors if error["type"] != "extra_forbidden"]).items():
        words = clipped(words, MAX_INPUT_CHARS)
        sentences[param or ""] = f"{clipped(param, MAX_INPUT_CHARS)}: {words}" if param else words
    shown = list(sentences.values())[:MAX_ERRORS]
    if len(sentences) > MAX_ERRORS:
        shown.append(f"and {len(sentences) - MAX_ERRORS} more")
    return InvalidRequest("; ".join(shown) or "the request is not valid", next(iter(sentences), None) or None)


async def answer_api_error(_: Request, error: Exception) -> Response:
    """Answer an ApiError or an EngineError."""
    return as_api_error(error).response()


async def answer_validation_error(_: Request, error: Exception) -> Response:
    """Answer a request that pydantic refused: 400, not 422."""
    assert isinstance(error, RequestValidationError)
    return as_invalid_request(error.errors()).response()


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Answer the router's errors: unknown paths, wrong methods."""
    assert isinstance(error, HTTPException)
    is_missing, path = error.status_code == 404, request.url.path
    is_embedding = is_missing and _EMBEDDINGS.search(path)
    unknown = f"this server has no {path[:_MAX_PATH_CHARS]}; GET /docs shows what it has" if is_missing else error.detail
    detail = "this server generates text; it has no embeddings" if is_embedding else unknown
    detail = WRONG_BASE if is_missing and is_messages_path(path) else detail
    if error.status_code == 405 and (allowed := (error.headers or {}).get("Allow")):
        detail = f"{request.method} is not possible here; use {allowed}"
    status_error = ApiError(detail, None, "no_embeddings" if is_embedding else None, error.headers)
    status_error.status = error.status_code
    status_error.type = "invalid_request_error" if error.status_code < 500 else "server_error"
    return status_error.response()
