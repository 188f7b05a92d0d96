"""Configurations of models without transformers, whose import takes seconds: read once by transformers, then from the cache.

A stored configuration has the attributes of transformers' text configuration, defaults included. It serves code that reads sizes.
A model is built from transformers' own.
"""

import hashlib
import json
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

from engine.weights import pretrained
from engine.weights.cache import WeightsCache, default_root
from engine.weights.separate_process import reported, run_apart

_VERSION = 3  # of the file's form, and of the refusals of `refuse_by_configuration`

Configuration: TypeAlias = Any  # transformers' configuration, or a StoredConfig


class StoredConfig:
    """A model's configuration that is not refused. `text` are the attributes of its text model."""

    def __init__(self, model_type: str, text: dict[str, Any], json_text: str) -> None:
        self.model_type = model_type
        self._text = SimpleNamespace(**text)
        self._json_text = json_text

    def get_text_config(self) -> Any:
        """Return the configuration of the text model."""
        return self._text

    def to_json_string(self) -> str:
        """Return the JSON that transformers' configuration writes."""
        return self._json_text


def read_config(folder: Path) -> Configuration:
    """Return the configuration of a model folder; raise WeightsError if it cannot be read, UnsupportedModel if it is refused."""
    cache = WeightsCache(default_root())
    found = json.loads(cache.text(cache.configuration(_key(folder)), lambda: _made(folder)))
    return pretrained.load_config(folder) if found is None else StoredConfig(**found)


def _made(folder: Path) -> str:
    """Return the text of a configuration that transformers reads: in a process of its own, unless this one has imported it."""
    return _as_text(folder) if "transformers" in sys.modules else run_apart(__spec__.name, str(folder))


def _key(folder: Path) -> str:
    """Return a digest of the configuration's file and of the library that reads it."""
    path = folder / "config.json"
    content = path.read_bytes() if path.is_file() else b""
    return hashlib.sha256(f"{_VERSION} {version('transformers')} ".encode() + content).hexdigest()[:24]


def _as_text(folder: Path) -> str:
    """Return a configuration as JSON; null if it has values that JSON does not hold."""
    config = pretrained.load_config(folder)
    text = config.get_text_config()
    others = (*getattr(text, "attribute_map", {}), "layer_types")  # the last is a property of some
    other_names = {name: getattr(text, name) for name in others if hasattr(text, name)}
    found = {"model_type": config.model_type, "text": {**text.to_dict(), **other_names}, "json_text": config.to_json_string()}
    try:
        return json.dumps(found)
    except (TypeError, ValueError):
        return "null"


if __name__ == "__main__":
    sys.exit(reported(lambda: _as_text(Path(sys.argv[1]))))
