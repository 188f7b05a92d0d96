"""Default parameters of requests, from a model's `generation_config.json`.

As in vLLM, only values in the file count. Without `top_k` in the file a request samples from all tokens by default, while
`transformers.generate` samples from the 50 likeliest.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.core.sampling_limits import require_probs
from engine.core.types import RequestDefaults, SamplingParams
from engine.utils.one_line import one_line

_logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"it must be a number, not {value!r}")
    return float(value)


def _count(value: Any) -> int:
    if _number(value) != int(value):
        raise ValueError(f"it must be an integer, not {value!r}")
    return int(value)


def _top_k(value: Any) -> int:
    return max(0, _count(value))  # -1 is off too


def _max_tokens(value: Any) -> int:
    if _count(value) < 1:
        raise ValueError(f"it must be at least 1, not {value!r}")
    return int(value)


_FIELDS: dict[str, tuple[str, Callable[[Any], float | int]]] = {
    "temperature": ("temperature", _number),
    "top_p": ("top_p", _number),
    "top_k": ("top_k", _top_k),
    "min_p": ("min_p", _number),
    "repetition_penalty": ("repetition_penalty", _number),
    "max_new_tokens": ("max_tokens", _max_tokens),
}


def read_request_defaults(folder: Path) -> RequestDefaults:
    """Return and log the defaults of a model folder. Values that give no distribution are ignored, with a warning."""
    path = folder / FILE_NAME
    if not path.is_file():
        return RequestDefaults()
    try:
        settings = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        _logger.warning("%s cannot be read and sets no defaults: %s", path, one_line(error))
        return RequestDefaults()
    found: dict[str, Any] = {}
    for name, (field, read) in _FIELDS.items():
        if not isinstance(settings, dict) or settings.get(name) is None:
            continue
        try:
            found |= {field: _valid(field, read(settings[name]))}
        except (ValueError, OverflowError) as error:
            _logger.warning("%s: %s is ignored: %s", path, name, error)
    defaults = RequestDefaults(**found)
    if found:
        listed = ", ".join(f"{field} {value:g}" for field, value in asdict(defaults).items() if value is not None)
        _logger.info("defaults of requests, from %s: %s", FILE_NAME, listed)
    return defaults


def _valid(field: str, value: Any) -> Any:
    """Return the value; raise ValueError if no request could have it."""
    require_probs(SamplingParams(**{field: value}), 1, ())
    return value
