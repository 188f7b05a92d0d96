"""Server-sent events: a stream of JSON objects that detects a disconnect. It may end with [DONE], after an error too."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.core.service import EngineError
from server.http.disconnect import ClientGone, until_disconnect
from server.http.errors import ApiError, as_api_error

log = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


def sse_event(body: BaseModel) -> bytes:
    """Return one event, with its type as its name if it has one. Only fields that were set are written."""
    kind = body.__dict__.get("type")  # pydantic searches long for attributes that a model does not have
    name = b"" if kind is None else f"event: {kind}\n".encode()
    return name + b"data: " + body.model_dump_json(exclude_unset=True).encode() + b"\n\n"


class EventStream(Response):
    """Sends one event for each object. Watches the connection at the same time: a disconnect is detected at once, not at the next
    send, which the server would drop. `close` runs in every case.
    """

    media_type = "text/event-stream"
    charset = "utf-8"

    def __init__(
        self, objects: AsyncIterator[BaseModel], close: Callable[[], Awaitable[None]], ends_with_done: bool = True
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._objects = objects
        self._close = close
        self._ends_with_done = ends_with_done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await until_disconnect(receive, self._send_all(scope, send))
        except ClientGone:
            log.info("the client left its stream")
        finally:
            await self._close()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for item in self._objects:
                await _send_body(send, sse_event(item))
        except (ApiError, EngineError) as error:
            await _send_error(scope, send, error)
        except Exception as error:
            log.exception("unhandled error in a stream")
            await _send_error(scope, send, error)
        if self._ends_with_done:
            await _send_body(send, _DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_error(scope: Scope, send: Send, error: Exception) -> None:
    _, body = as_api_error(error).answer_to(scope)
    await _send_body(send, sse_event(body))


async def _send_body(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})
