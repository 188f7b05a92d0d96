"""API keys: a plain ASGI layer that knows which keys open the door and which paths need none."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import BadApiKey

OPEN_PATHS = frozenset({"/live", "/health"})


class ApiKeyGate:
    """Asks for `Authorization: Bearer KEY` on every path but the open ones; with no keys configured it is not installed.

    Keys are compared as digests, each against each in constant time: neither length nor position of a match shows.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._admits(Headers(scope=scope)):
            await BadApiKey().response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        offered = _digest(key.strip())
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
