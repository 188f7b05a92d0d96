"""What FastAPI does not say of this API by itself: which operations ask for a key."""

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI

_SCHEME = "ApiKey"


def declare_keys(app: FastAPI, open_paths: Collection[str]) -> None:
    """Make the schema of an app declare its keys, so that clients made from it, and Swagger UI, send one."""
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
