"""GET /docs: Swagger UI over this server's schema, from the files of the package `fastapi-swagger`, without a CDN.

Page and schema need no API key: the page has a field for one (Authorize), and sends it with its API requests.
"""

from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from server.routes.playground import HEADERS

router = APIRouter(include_in_schema=False)

_PACKAGE = "fastapi_swagger"
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>latebranch API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</html>
"""
# The validator would send the schema's address to a site of Swagger's.
_START = 'SwaggerUIBundle({ url: "docs/openapi.json", dom_id: "#ui", validatorUrl: null, deepLinking: true });\n'
_FILES = {"swagger-ui.css": "text/css", "swagger-ui-bundle.js": "text/javascript"}

PAGES = frozenset({"/docs"})
PATHS = PAGES.union(f"/docs/{name}" for name in (*_FILES, "start.js", "openapi.json"))


def is_installed() -> bool:
    """Return whether the files of Swagger UI are there."""
    return find_spec(_PACKAGE) is not None


@router.get("/docs")
async def page() -> Response:
    """Answer with the page."""
    return Response(_PAGE, media_type="text/html", headers=HEADERS)


@router.get("/docs/start.js")
async def start() -> Response:
    """Answer with the script that starts the page."""
    return Response(_START, media_type="text/javascript", headers=HEADERS)


@router.get("/docs/openapi.json")
async def schema(request: Request) -> Response:
    """Answer with the schema."""
    return JSONResponse(request.app.openapi(), headers=HEADERS)


@router.get("/docs/{name}")
def file(name: str) -> Response:
    """Answer with a file of Swagger UI. No coroutine: it reads megabytes."""
    spec = find_spec(_PACKAGE)
    if name not in _FILES or spec is None or spec.origin is None:
        raise HTTPException(404)
    return Response((Path(spec.origin).parent / "resources" / name).read_bytes(), media_type=_FILES[name], headers=HEADERS)
