"""Formats of log lines: text or JSON, each with the id of its request."""

import json
import logging
import sys
from contextvars import ContextVar
from typing import Any, Literal

from engine.utils.progress_bar import lines_to_logging

request_id_var: ContextVar[str] = ContextVar("request_id", default="-")

_MORE = ("client", "key")  # extra fields of access log records


class _RequestIdFilter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id_var.get()
        return True


# Control characters, and characters that some log readers treat as the end of a line.
_ESCAPES = {code: f"\\u{code:04x}" for code in [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]}


class LineFormatter(logging.Formatter):
    """A text line. Text of a client in it cannot fake a line: control characters are escaped, traceback lines are indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return super().formatMessage(record).translate(_ESCAPES)

    def formatException(self, ei: Any) -> str:
        """Return the lines of a traceback."""
        return "\n".join(f"  {line.translate(_ESCAPES)}" for line in super().formatException(ei).splitlines())


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": getattr(record, "request_id", "-"),
            "process": record.process,
            "message": record.getMessage(),
            **{name: getattr(record, name) for name in _MORE if hasattr(record, name)},
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure_logging(level: str, form: Literal["text", "json"], is_worker: bool = False) -> None:
    """Send every log line of the process to stderr; with JSON, warnings and progress too.

    A worker's lines name the worker, not a request.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_RequestIdFilter())
    origin = "worker[%(process)d]" if is_worker else "[%(request_id)s]"
    text = LineFormatter(f"%(asctime)s %(levelname)s {origin} %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "info":  # our own lines report it
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if form == "json":
        logging.captureWarnings(True)
        lines_to_logging()
