"""GET / and the files of its page: the playground, served from `server/playground`.

They need no API key: the page has a field for one, and sends it with its API requests. Nothing is loaded from other sites.
"""

from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.core.tree import TREE_NAMES
from engine.core.verifier_table import VERIFIER_NAMES

router = APIRouter(include_in_schema=False)

FOLDER = Path(__file__).parents[1] / "playground"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
_NAMES = ("index.html", "style.css", "app.js", "answer.js", "tree.js", "stream.js", "markdown.js", "example.json", "mark.svg")
_FILES = {name: (FOLDER / name).read_bytes() for name in _NAMES}


def _options(names: Sequence[str]) -> bytes:
    """Return the options of a select."""
    return "\n".join(f'<option value="{name}">{name.replace("_", " ")}</option>' for name in names).encode()


_FILES["index.html"] = (
    _FILES["index.html"].replace(b"<!-- trees -->", _options(TREE_NAMES)).replace(b"<!-- verifiers -->", _options(VERIFIER_NAMES))
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

PAGES = frozenset({"/"})
PATHS = PAGES.union({*(f"/playground/{name}" for name in _NAMES)})


@router.get("/")
async def page() -> Response:
    """Answer with the page."""
    return _answer("index.html")


@router.get("/playground/{name}")
async def file(name: str) -> Response:
    """Answer with a file of the page."""
    if name not in _FILES:
        raise HTTPException(404)
    return _answer(name)


def _answer(name: str) -> Response:
    return Response(_FILES[name], media_type=_MEDIA_TYPES[Path(name).suffix], headers=HEADERS)
