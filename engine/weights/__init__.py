"""Find, fetch and convert model weights: `resolve` turns a preset's name, a folder, a GGUF file or a hub id into a folder."""

from engine.weights.cache import WeightsCache, default_root
from engine.weights.errors import UnsupportedModel, WeightsError
from engine.weights.presets import Preset, load_presets
from engine.weights.references import LocalWeights, find_preset, resolve

__all__ = [
    "LocalWeights",
    "Preset",
    "UnsupportedModel",
    "WeightsCache",
    "WeightsError",
    "default_root",
    "find_preset",
    "load_presets",
    "resolve",
]
