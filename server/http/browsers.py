"""Protection against pages in browsers: pages of other origins may not call the API, nor names of other sites resolve to it.

A browser reports the site of a page in `Sec-Fetch-Site` and in `Origin`, which the page cannot change. Other clients send
neither.
"""

import re
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import ForeignPage, UnknownHost
from server.http.hosts import is_loopback

_HOST = re.compile(r"(?:\[(?P<address>[0-9A-Fa-f:.]+)\]|(?P<name>[^\s:/@\[\]]+))(?::[0-9]*)?")
_ANY = "*"


class HostGate:
    """Refuses requests under a host name that is not expected.

    Without it a page whose host name is made to resolve to 127.0.0.1 has the API in its own origin (DNS rebinding). `names` are
    accepted besides this machine's own.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and not self._is_expected(Headers(scope=scope).get("host")):
            await UnknownHost().response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_expected(self, host: str | None) -> bool:
        if host is None:  # HTTP/1.0, which no browser uses
            return True
        parts = _HOST.fullmatch(host)
        name = "" if parts is None else (parts["address"] or parts["name"]).lower()
        return name in self._names or is_loopback(name)


class OriginGate:
    """Refuses requests from pages of other origins before the body is read, unless `origins` names them or has `*`.

    `pages` are paths that a link on another site may open. The site with the link cannot read the opened page.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], pages: Collection[str]) -> None:
        self.app = app
        self._origins = frozenset(origins)
        self._pages = frozenset(pages)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] == "http" and self._is_foreign(scope, Headers(scope=scope)):
            await ForeignPage().response()(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _is_foreign(self, scope: Scope, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if site in ("same-origin", "none"):  # none: the user entered the address
            return False
        if site is None and (origin is None or origin in _own_origins(scope, headers)):
            return False
        if _ANY in self._origins or origin in self._origins:
            return False
        is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return not (is_opened and scope["method"] in ("GET", "HEAD") and scope["path"] in self._pages)


def _own_origins(scope: Scope, headers: Headers) -> tuple[str, ...]:
    """Return the origins of this server's own pages; a proxy may terminate TLS for it."""
    host = headers.get("host", "")
    return tuple(f"{scheme}://{host}" for scheme in {scope["scheme"], "https"})
