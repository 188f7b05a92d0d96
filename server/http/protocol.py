"""HTTP/1.1 as uvicorn speaks it, with this API's words where a request is none, or its head is too large, and bounded patience
for clients that neither send nor read.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024  # the request line and all headers
_NO_GOODBYE = struct.pack("ii", 1, 0)


class _Patience:
    """A timer that calls `at_end` unless it is ended before."""

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Begin to wait, if that is not done already."""
        self._timer = self._timer or loop.call_later(limit_s, self._at_end)

    def end(self) -> None:
        """Wait no more."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


class Http(H11Protocol):
    """Answers what never becomes a request with an error like any other, and cuts clients off that keep it waiting.

    A request must have come whole within `client_limit_s` of the connection, or of its own first byte on one that is kept. Of
    what is sent something must leave the process within each such time; if not, the client takes nothing, and there is no way to
    tell it so. Cut off, it sees its connection reset, and its requests end like those of any client that leaves.
    """

    client_limit_s = 60.0

    def on_cut_off(self, at: str) -> None:
        """Hear of a client that was cut off, `sending` or `reading`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._sending, self._reading = _Patience(self._on_unsaid), _Patience(self._on_unread)
        self._has_spoken = False
        # Writing is paused while anything is unsent. Not 0: TLS would take an empty buffer for a full one.
        transport.set_write_buffer_limits(high=1)
        self._watch_request()

    def data_received(self, data: bytes) -> None:
        """Go on waiting unless the request is complete."""
        self._has_spoken = True
        super().data_received(data)
        self._watch_request()

    def _watch_request(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._sending.begin(self.loop, self.client_limit_s)
        else:
            self._sending.end()

    def on_response_complete(self) -> None:
        """Go on to what came behind the request, of which there may be half a body."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch_request()

    def pause_writing(self) -> None:
        """Begin to wait for the client to read."""
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._reading.begin(self.loop, self.client_limit_s)

    def resume_writing(self) -> None:
        """Go on: all has been sent."""
        super().resume_writing()
        self._reading.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nobody."""
        super().connection_lost(exc)
        self._sending.end()
        self._reading.end()

    def _on_unsaid(self) -> None:
        if self._has_spoken:
            self._cut_off("sending")
        else:  # as browsers and balancers keep one for later
            log.debug("a connection is closed on which nothing was said")
            self.transport.close()

    def _on_unread(self) -> None:
        """Begin again with a client that has read since the last look, slowly as it may."""
        num_unsent, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        if self._num_unsent < num_unsent:
            self._reading.end()
            self._reading.begin(self.loop, self.client_limit_s)
        else:
            self._cut_off("reading")

    def _cut_off(self, at: str) -> None:
        log.warning("a client is cut off: %s took it longer than %g s", at, self.client_limit_s)
        self.on_cut_off(at)
        # With a reset: the system would go on offering what it holds to somebody who takes nothing.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_GOODBYE)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer and close. `msg` is uvicorn's own, without any text of the client's."""
        body = InvalidRequest(f"{msg.rstrip('.')}, or a head of more than {MAX_HEAD_BYTES} bytes").body.model_dump_json().encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


def http_protocol(limit_s: float, tell_cut_off: Callable[[str], None]) -> type[Http]:
    """Return the protocol of a server whose clients have `limit_s` seconds."""

    class LimitedHttp(Http):
        client_limit_s = limit_s

        def on_cut_off(self, at: str) -> None:
            tell_cut_off(at)

    return LimitedHttp
