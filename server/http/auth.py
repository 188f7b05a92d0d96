"""API keys: a plain ASGI layer that knows which keys open the door and which paths need none."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.core.types import group_of
from server.http.api_keys import UNNAMED, ApiKey
from server.http.errors import BadApiKey, WrongRole

_KEY = "latebranch.key"  # where the scope of a request has its key and the key's digest
OPEN_PATHS = frozenset({"/live", "/health"})


class ApiKeyGate:
    """Asks for `Authorization: Bearer KEY` on every path but the open ones; with no keys configured it is not installed.

    `also_open` are paths that are open beside those that always are. A key may ask for the paths of its role.

    Keys are compared as digests, each against each in constant time: neither length nor position of a match shows.
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
            if not (role := admitted[1].role).may_ask(scope["path"]):
                await WrongRole(role).response()(scope, receive, send)
                return
        await self.app(scope, receive, send)

    def _admitted(self, headers: Headers) -> tuple[bytes, ApiKey] | None:
        """Return the key of a request and its digest if it opens the door."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        offered = _digest(secret.strip())
        matches = [one for one in self._keys if hmac.compare_digest(offered, one[0])]
        return matches[0] if scheme.lower() == "bearer" and matches else None


def key_digest_of(scope: Scope) -> bytes | None:
    """Return what tells the key of a request from others, None where no key is asked for."""
    return scope[_KEY][0] if _KEY in scope else None


def key_name_of(scope: Scope) -> str:
    """Return the name of the key of a request, UNNAMED if it has none."""
    name: str = scope[_KEY][1].name if _KEY in scope else UNNAMED
    return name


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
