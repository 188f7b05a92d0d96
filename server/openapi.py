"""Adds API keys to the OpenAPI schema: FastAPI cannot derive which operations need one."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

_SCHEMES = {
    "ApiKey": {"type": "http", "scheme": "bearer"},
    "XApiKey": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def declare_keys(app: FastAPI, open_paths: Collection[str]) -> None:
    """Declare API keys in the schema of an app, so that generated clients and Swagger UI send one."""
    described = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = described()
            schema.setdefault("components", {})["securitySchemes"] = _SCHEMES
            for path, operations in schema["paths"].items():
                for operation in operations.values():
                    operation["security"] = [] if path in open_paths else [{name: []} for name in _SCHEMES]
        return described()

    app.openapi = openapi  # type: ignore[method-assign]
