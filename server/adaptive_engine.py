"""Combines the engine and the selector: the engine of a configuration with the adaptive policy, which the engine cannot import.

Importing this module loads no model code: the HTTP process launches workers and does not need it.
"""

from typing import TYPE_CHECKING

from engine.core.config import EngineConfig
from engine.worker.engine_loop import SteppedEngine

if TYPE_CHECKING:
    from engine.build import Models
    from engine.engine import Engine


def served_engine(config: EngineConfig) -> SteppedEngine:
    """Return the engine that a worker steps; raise its loading errors. A module-level function: the worker process imports it."""
    from engine.build import build_served  # here, because it brings torch
    from selector.build import adaptive_policy

    return build_served(config, adaptive_policy)


def tool_engine(config: EngineConfig, models: "Models | None" = None) -> "Engine":
    """Return an engine for a tool in this process. `models` that are loaded are reused. Raises loading errors."""
    from engine.build import build_engine
    from selector.build import adaptive_policy

    return build_engine(config, adaptive_policy, models)
