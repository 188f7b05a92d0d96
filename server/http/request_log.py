"""What is written to the log of a request's own words: by default nothing."""

import json
import logging
from typing import Any, Literal

from pydantic import BaseModel

log = logging.getLogger("server.requests")

RequestLog = Literal["off", "parameters", "texts"]

MAX_VALUE_CHARS = 500
_WORDLESS = frozenset({"model", "request_id", "speculative", "stream_options"})  # beside numbers and truth values


def log_request(kind: RequestLog, path: str, body: BaseModel) -> None:
    """Write one line of a request's fields, unless that is off."""
    if kind != "off":
        fields = body.model_dump(mode="json", exclude_none=True)
        shown = (f"{name}={_shown(value, kind == 'texts' or name in _WORDLESS)}" for name, value in fields.items())
        log.info("%s %s", path, " ".join(shown))


def _shown(value: Any, tells_words: bool) -> str:
    """Return a value as JSON, which escapes what could break a line, cut to a length; of words perhaps only their size."""
    text = json.dumps(value)
    if isinstance(value, int | float) or (tells_words and len(text) <= MAX_VALUE_CHARS):
        return text
    return f"{text[:MAX_VALUE_CHARS]}…({len(text)} characters)" if tells_words else f"({len(text)} characters)"
