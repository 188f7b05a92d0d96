"""Logs the parameters and texts of requests; by default nothing."""

import json
import logging
from typing import Any, Literal

from pydantic import BaseModel

log = logging.getLogger("server.requests")

RequestLog = Literal["off", "parameters", "texts"]

MAX_VALUE_CHARS = 500
_TEXT_FREE = frozenset({"model", "request_id", "speculative", "stream_options"})  # besides numbers and booleans


def log_request(kind: RequestLog, path: str, body: BaseModel) -> None:
    """Write one line with a request's fields, unless `kind` is off."""
    if kind != "off":
        fields = body.model_dump(mode="json", exclude_none=True)
        shown = (f"{name}={_shown(value, kind == 'texts' or name in _TEXT_FREE)}" for name, value in fields.items())
        log.info("%s %s", path, " ".join(shown))


def _shown(value: Any, shows_text: bool) -> str:
    """Return a value as JSON, which escapes line breaks, cut to a maximum length; without `shows_text` only the size of texts."""
    text = json.dumps(value)
    if isinstance(value, int | float) or (shows_text and len(text) <= MAX_VALUE_CHARS):
        return text
    return f"{text[:MAX_VALUE_CHARS]}…({len(text)} characters)" if shows_text else f"({len(text)} characters)"
