"""Plain ASGI layers around every request: its id and log line, unexpected exceptions, limits of headers and body."""

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.http.anthropic_errors import is_anthropic
from server.http.auth import key_name_of
from server.http.errors import ApiError, BodyTooLarge, Overloaded, TooManyHeaders, as_api_error
from server.http.logs import request_id_var
from server.schemas.common import REQUEST_ID

log = logging.getLogger(__name__)
access_log = logging.getLogger("server.access")

_VALID_ID = re.compile(REQUEST_ID)


class RequestContext:
    """Outermost: sets the request's id (the client's own if it is valid), returns it in a header, writes the log line."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        offered = Headers(scope=scope).get("x-request-id", "")
        request_id = offered if _VALID_ID.fullmatch(offered) else uuid.uuid4().hex
        request_id_var.set(request_id)
        began_s, status = time.monotonic(), 499  # 499: the client left before an answer began

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if is_anthropic(scope):
                    headers["Request-Id"] = request_id
                headers["X-Content-Type-Options"] = "nosniff"
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        finally:
            path = scope["path"].encode("unicode_escape").decode()[:500]  # the client must not write line breaks into the log
            sender = {"client": (scope.get("client") or ["-"])[0], "key": key_name_of(scope)}
            fields = (scope["method"], path, status, (time.monotonic() - began_s) * 1000, *sender.values())
            access_log.info("%s %s %d %.1f ms from %s, key %s", *fields, extra=sender)


class ErrorBoundary:
    """Answers unexpected exceptions. It is inside RequestContext, so that their log lines and answers have the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        is_started = False

        async def watched_send(message: Message) -> None:
            nonlocal is_started
            is_started = is_started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self.app(scope, receive, watched_send)
        except Exception as error:
            if scope["type"] != "http":
                raise
            log.exception("unhandled error")
            if not is_started:
                await as_api_error(error).response()(scope, receive, send)


class HeadAsGet:
    """Innermost: answers HEAD as the GET of the same path, without its body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        scope["method"] = "GET"  # in place: the router leaves its route in the scope, for metrics
        try:
            await self.app(scope, receive, send_head)
        finally:
            scope["method"] = "HEAD"


class HeaderLimit:
    """Refuses requests with more headers than a client needs. The protocol bounds their bytes."""

    def __init__(self, app: ASGIApp, max_headers: int) -> None:
        self.app = app
        self.max_headers = max_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and len(scope["headers"]) > self.max_headers:
            await TooManyHeaders(self.max_headers).response()(scope, receive, send)
            return
        await self.app(scope, receive, send)


class BodyLimit:
    """Reads the whole body before the app sees it, and counts its bytes as they arrive (of streamed bodies too).

    Incomplete bodies are bounded together too. Beyond `max_unfinished_bytes`, bodies larger than an equal share of it are
    refused. So large and slow bodies leave room for small bodies.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, max_unfinished_bytes: int) -> None:
        self.app = app
        self._max_bytes = max_body_bytes
        self._max_unfinished_bytes = max(max_body_bytes, max_unfinished_bytes)
        self._num_unfinished = 0
        self._unfinished_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        if body["type"] == "http.request":  # else the client disconnected before it had sent the body
            await self.app(scope, _replayed(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> Message:
        """Return one message with the whole body, or the disconnect message; raise ApiError if the body is too large."""
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        chunks: list[bytes] = []
        num_bytes = 0
        self._num_unfinished += 1
        try:
            while True:
                message = await receive()
                if message["type"] != "http.request":
                    return message
                chunks.append(message.get("body", b""))
                num_bytes += len(chunks[-1])
                self._unfinished_bytes += len(chunks[-1])
                if num_bytes > self._max_bytes:
                    raise BodyTooLarge(self._max_bytes)
                if not message.get("more_body", False):
                    return {"type": "http.request", "body": b"".join(chunks), "more_body": False}
                if self._unfinished_bytes > self._max_unfinished_bytes < num_bytes * self._num_unfinished:
                    raise Overloaded("too many bytes of incomplete request bodies are held", "bodies_full", 1.0)
        finally:
            self._num_unfinished -= 1
            self._unfinished_bytes -= num_bytes


def _replayed(first: Message, receive: Receive) -> Receive:
    """Return a receive channel that returns `first`, then the messages of `receive`."""
    waiting = [first]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay
