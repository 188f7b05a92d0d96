"""API keys: a plain ASGI layer that checks the key of a request, except on open paths."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.types import group_of
from server.http.api_keys import UNNAMED, ApiKey
from server.http.errors import BadApiKey, WrongRole

_KEY = "latebranch.key"  # the entry of a request's scope with its key's digest and its key
OPEN_PATHS = frozenset({"/live", "/health"})


class ApiKeyGate:
    """Requires `Authorization: Bearer KEY` or `X-Api-Key: KEY` on every path but the open paths. It is not installed without
    keys. If a request has both headers, one valid key is enough.

    `also_open` are paths that are open in addition to OPEN_PATHS. A key may access the paths of its role.

    Keys are compared as digests, with every key, in constant time: the time reveals neither length nor position of a match.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[ApiKey], also_open: Collection[str] = ()) -> None:
        self.app = app
        self._open_paths = OPEN_PATHS.union(also_open)
        self._keys = [(_digest(key.secret), key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            admitted = self._admitted(Headers(scope=scope))
            if admitted is None:
                await BadApiKey().response()(scope, receive, send)
                return
            scope[_KEY] = admitted
            if not (role := admitted[1].role).may_access(scope["path"]):
                await WrongRole(role).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admitted(self, headers: Headers) -> tuple[bytes, ApiKey] | None:
        """Return the digest and key of a request if it has a valid key, else None."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        offered = [_digest(secret.strip())] if scheme.lower() == "bearer" else []
        offered += [_digest(key.strip()) for key in headers.getlist("x-api-key")[:1]]
        matches = [one for digest in offered for one in self._keys if hmac.compare_digest(digest, one[0])]
        return matches[0] if matches else None


def key_digest_of(scope: Scope) -> bytes | None:
    """Return the digest of a request's key, None if no key is required."""
    return scope[_KEY][0] if _KEY in scope else None


def key_name_of(scope: Scope) -> str:
    """Return the name of the key of a request, UNNAMED if it has none."""
    name: str = scope[_KEY][1].name if _KEY in scope else UNNAMED
    return name


def tenant_of(request: Request, user: str | None) -> str:
    """Return an opaque name of the requests that may draft from each other's texts: KEY/USER. Empty if no key is required.

    The speed of an answer can reveal the drafted text, so texts of one tenant are never drafted for another.
    """
    digest = key_digest_of(request.scope)
    if digest is None:
        return ""
    named = hmac.new(digest, (user or "").encode("utf-8", "surrogateescape"), "sha256")
    return f"{hashlib.sha256(digest).hexdigest()[:16]}/{named.hexdigest()[:32]}"


def owner_of(request: Request) -> str:
    """Return an opaque name of a request's key, under which its responses are stored. Empty if no key is required."""
    digest = key_digest_of(request.scope)
    return "" if digest is None else hashlib.sha256(digest).hexdigest()


def cache_salt_of(tenant: str, salt: str | None, is_for_all: bool) -> str:
    """Return the salt of cached prefixes: the key, unless all keys share prefixes, and the client's salt after a slash."""
    key = "" if is_for_all else group_of(tenant)
    return f"{key}/{salt}" if salt else key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
