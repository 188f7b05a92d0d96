"""API keys: a plain ASGI layer that knows which keys open the door and which paths need none."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.types import group_of
from server.http.errors import BadApiKey

_KEY_DIGEST = "latebranch.key_digest"  # where the scope of a request says which key opened the door
OPEN_PATHS = frozenset({"/live", "/health"})


class ApiKeyGate:
    """Asks for `Authorization: Bearer KEY` on every path but the open ones; with no keys configured it is not installed.

    `also_open` are paths that are open beside those that always are.

    Keys are compared as digests, each against each in constant time: neither length nor position of a match shows.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], also_open: Collection[str] = ()) -> None:
        self.app = app
        self._open_paths = OPEN_PATHS.union(also_open)
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            digest = self._admitted(Headers(scope=scope))
            if digest is None:
                await BadApiKey().response()(scope, receive, send)
                return
            scope[_KEY_DIGEST] = digest
        await self.app(scope, receive, send)

    def _admitted(self, headers: Headers) -> bytes | None:
        """Return the digest of the key if it opens the door."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        offered = _digest(key.strip())
        matches = [hmac.compare_digest(offered, digest) for digest in self._digests]
        return offered if scheme.lower() == "bearer" and any(matches) else None


def key_digest_of(scope: Scope) -> bytes | None:
    """Return what tells the key of a request from others, None where no key is asked for."""
    digest: bytes | None = scope.get(_KEY_DIGEST)
    return digest


def tenant_of(request: Request, user: str | None) -> str:
    """Return an opaque name of who may draft from each other's texts: KEY/USER. Empty where no key is asked for.

    How fast an answer comes can tell what was drafted, so nobody's text is drafted from for anybody else.
    """
    digest = key_digest_of(request.scope)
    if digest is None:
        return ""
    named = hmac.new(digest, (user or "").encode("utf-8", "surrogateescape"), "sha256")
    return f"{hashlib.sha256(digest).hexdigest()[:16]}/{named.hexdigest()[:32]}"


def cache_salt_of(tenant: str, salt: str | None, is_for_all: bool) -> str:
    """Return what requests that may share cached prefixes have in common: the key, unless all share, and the client's salt."""
    key = "" if is_for_all else group_of(tenant)
    return f"{key}/{_digest(salt).hex()}" if salt else key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
