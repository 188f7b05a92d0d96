"""Adds to the OpenAPI schema what FastAPI does not know: which operations need an API key."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

_SCHEME = "ApiKey"


def declare_keys(app: FastAPI, open_paths: Collection[str]) -> None:
    """Declare API keys in the schema of an app, so that generated clients and Swagger UI send one."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = described()
            schema.setdefault("components", {})["securitySchemes"] = {_SCHEME: {"type": "http", "scheme": "bearer"}}
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in open_paths else [{_SCHEME: []}]
        return described()

    app.openapi = openapi  # type: ignore[method-assign]
