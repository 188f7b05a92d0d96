"""JSON of records with numbers that JSON cannot represent."""

import json
import math
from typing import Any


def finite_json(value: Any) -> str:
    """Return the value as JSON, with null for infinite and undefined numbers."""
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
