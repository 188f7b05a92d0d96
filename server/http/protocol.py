"""uvicorn's HTTP/1.1 protocol, with this API's error body for malformed requests and too large heads, time limits for clients
that neither send nor read, and a limit of open connections.
"""

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.http.errors import InvalidRequest

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 * 1024  # the request line and all headers
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # struct linger
_LINGER_S = 2.0  # without a byte of the rest of a request that was answered early
_LOG_INTERVAL_S = 10.0  # between log lines about connections that were closed for new connections


class _Timer:
    """A timer that calls `on_expiry` unless it is ended before."""

    def __init__(self, on_expiry: Callable[[], None]) -> None:
        self._on_expiry = on_expiry
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
        """Start the timer unless it runs already."""
        self._timer = self._timer or loop.call_later(limit_s, self._on_expiry)

    def end(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None


class _BoundedHeads(h11.Connection):
    """h11 that also bounds heads that arrive in one piece; h11 itself bounds only heads in several pieces."""

    def next_event(self) -> Any:
        """Return the next event; raise RemoteProtocolError for a head that is too large."""
        if self.their_state is not h11.IDLE:
            return super().next_event()
        num_bytes = len(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request) and num_bytes - len(self.trailing_data[0]) > MAX_HEAD_BYTES:
            raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
        return event


class _LingeringTransport:
    """A transport whose `close` first reads on while the client still sends a request that is answered already.

    If it closed at once, the system would answer further data with a reset, and the client would lose the unread answer.
    Everything but closing is the transport's own.
    """

    def __init__(self, transport: asyncio.Transport, limit_s: float, is_sending: Callable[[], bool]) -> None:
        self._transport = transport
        self._limit_s = limit_s
        self._is_sending = is_sending
        self._timers: list[asyncio.TimerHandle] = []
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether nothing more will be sent."""
        return self.is_lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close, if needed after the client has sent the whole request."""
        if self.is_lingering or self._transport.is_closing() or not self._is_sending():
            if not self.is_lingering:
                self._transport.close()
            return
        self.is_lingering = True
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(limit_s, self.end) for limit_s in (self._limit_s, _LINGER_S)]

    def on_data(self) -> None:
        """Restart the linger timer: the client still sends."""
        self._timers.pop().cancel()
        self._timers.append(asyncio.get_running_loop().call_later(_LINGER_S, self.end))

    def end(self) -> None:
        """Close now."""
        for timer in self._timers:
            timer.cancel()
        self._transport.close()


class ConnectionLimit:
    """The open connections of a server, at most `most`. For one more, the connection that waits longest for a request is closed.

    Connections whose request is being answered are never closed. If all are busy, the new connection is closed.
    """

    def __init__(self, most: int, on_closed: Callable[[], None]) -> None:
        self._most = most
        self._on_closed = on_closed
        self._busy: set[Http] = set()
        self._idle: dict[Http, None] = {}  # the longest idle first
        self._uploading: dict[Http, None] = {}
        self._next_line_s = 0.0

    def put(self, connection: "Http", state: Any) -> None:
        """Update the state of a connection; `state` is h11's state of its client."""
        kind = self._idle if state is h11.IDLE else self._uploading if state is h11.SEND_BODY else None
        if kind is not None and connection in kind:
            return
        self.drop(connection)
        if kind is None:
            self._busy.add(connection)
        else:
            kind[connection] = None
        if len(self._busy) + len(self._idle) + len(self._uploading) > self._most:
            self._close_one()

    def drop(self, connection: "Http") -> None:
        """Forget a connection."""
        self._busy.discard(connection)
        self._idle.pop(connection, None)
        self._uploading.pop(connection, None)

    def _close_one(self) -> None:
        for kind in (self._idle, self._uploading):
            if kind:
                connection = next(iter(kind))
                self.drop(connection)
                connection.abort()
                self._on_closed()
                break
        if (now_s := time.monotonic()) >= self._next_line_s:
            self._next_line_s = now_s + _LOG_INTERVAL_S
            log.warning("%d connections are open: the longest waiting ones are closed for new ones", self._most)


class Http(H11Protocol):
    """Answers malformed requests with this API's error body, and cuts off clients that send or read too slowly.

    A request must arrive completely within `client_limit_s` of the connection, or of its first byte on a kept connection. While
    an answer is sent, some bytes must leave the process within each such time. Otherwise the client does not read, and an error
    answer could not reach it. A client that is cut off sees its connection reset. Its requests end as after a disconnect.

    A client that is answered before it has sent its whole request may send the rest, which is ignored.
    """

    connection_limit: ConnectionLimit
    transport: Any
    client_limit_s = 60.0

    def on_cut_off(self, at: str) -> None:
        """Called when a client is cut off while `sending` or `reading`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection, and start the time limit of its first request."""
        super().connection_made(transport)
        self.conn = _BoundedHeads(h11.SERVER, MAX_HEAD_BYTES)
        self.transport = _LingeringTransport(transport, self.client_limit_s, self._is_sending)
        self._sending, self._reading = _Timer(self._on_send_timeout), _Timer(self._on_read_timeout)
        self._has_received = False
        # Writing is paused while any byte is unsent. Not 0: TLS would treat an empty buffer as full.
        transport.set_write_buffer_limits(high=1)
        self._watch_request()

    def data_received(self, data: bytes) -> None:
        """Process data; end the time limit if the request is complete."""
        self._has_received = True
        if self.transport.is_lingering:
            self.transport.on_data()
            return
        super().data_received(data)
        self._watch_request()

    def _is_sending(self) -> bool:
        """Return whether the client has not sent a whole request, or sends a malformed one."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR)

    def abort(self) -> None:
        """End the connection at once."""
        self._sending.end()
        self.transport.abort()

    def shutdown(self) -> None:
        """Close a connection that only waits for the rest of a request."""
        super().shutdown()
        if self.transport.is_lingering:
            self.transport.end()

    def _watch_request(self) -> None:
        if not self.transport.is_closing():
            self.connection_limit.put(self, self.conn.their_state)
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._sending.begin(self.loop, self.client_limit_s)
        else:
            self._sending.end()

    def on_response_complete(self) -> None:
        """Continue with data after the request, which may be a part of the next one."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._watch_request()
        elif not self.transport.is_closing():
            self.connection_limit.put(self, self.conn.their_state)

    def pause_writing(self) -> None:
        """Start the time limit for the client to read."""
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._reading.begin(self.loop, self.client_limit_s)

    def resume_writing(self) -> None:
        """End the time limit: all bytes have been sent."""
        super().resume_writing()
        self._reading.end()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers and forget the connection."""
        self.connection_limit.drop(self)
        if self.transport.is_lingering:
            self.transport.end()
        super().connection_lost(exc)
        self._sending.end()
        self._reading.end()

    def _on_send_timeout(self) -> None:
        if self._has_received:
            self._cut_off("sending")
        else:  # browsers and balancers open spare connections
            log.debug("a connection is closed on which no data arrived")
            self.transport.close()

    def _on_read_timeout(self) -> None:
        """Restart the time limit if the client has read any bytes since the last check, else cut it off."""
        num_unsent, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        if self._num_unsent < num_unsent:
            self._reading.end()
            self._reading.begin(self.loop, self.client_limit_s)
        else:
            self._cut_off("reading")

    def _cut_off(self, at: str) -> None:
        log.warning("a client is cut off: %s took it longer than %g s", at, self.client_limit_s)
        self.on_cut_off(at)
        # With a reset: else the system would keep the unsent bytes and retry them.
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Answer and close. `msg` is uvicorn's own text, without text from the client."""
        body = InvalidRequest(f"{msg.rstrip('.')}, or a head of more than {MAX_HEAD_BYTES} bytes").body.model_dump_json().encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        headers.append(("x-content-type-options", "nosniff"))
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()


def http_protocol(limit_s: float, max_connections: int, count_cut_off: Callable[[str], None]) -> type[Http]:
    """Return the protocol of a server whose clients have `limit_s` seconds and at most `max_connections` connections."""

    class LimitedHttp(Http):
        client_limit_s = limit_s
        connection_limit = ConnectionLimit(max_connections, lambda: count_cut_off("waiting"))

        def on_cut_off(self, at: str) -> None:
            count_cut_off(at)

    return LimitedHttp
