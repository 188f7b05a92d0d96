"""HTTP/1.1 as uvicorn speaks it, with this API's words where a request is none, or its head is too large."""

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import InvalidRequest

MAX_HEAD_BYTES = 32 * 1024  # the request line and all headers


class Http(H11Protocol):
    """Answers what never becomes a request with an error like any other."""

    def send_400_response(self, msg: str) -> None:
        """Answer and close. `msg` is uvicorn's own, without any text of the client's."""
        body = InvalidRequest(f"{msg.rstrip('.')}, or a head of more than {MAX_HEAD_BYTES} bytes").body.model_dump_json().encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        events = (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
        self.transport.close()
