"""Where the engine and the selector meet: the engine of a configuration with the policy that it cannot make itself.

Importing this module loads no model code: the process that serves HTTP launches workers without paying for that.
"""

from typing import TYPE_CHECKING

from engine.core.config import EngineConfig
from engine.worker.engine_loop import SteppedEngine

if TYPE_CHECKING:
    from engine.build import Models
    from engine.engine import Engine


def served_engine(config: EngineConfig) -> SteppedEngine:
    """Return what a worker turns; raise what its loading raises. A module-level function: the worker's process imports it."""
    from engine.build import build_served  # here, because it brings torch
    from selector.build import adaptive_policy

    return build_served(config, adaptive_policy)


def preload() -> None:
    """Import what `served_engine` will need. A module-level function: a spare process imports it."""
    import engine.build  # noqa: F401
    import selector.build  # noqa: F401


def tool_engine(config: EngineConfig, models: "Models | None" = None) -> "Engine":
    """Return the engine for a tool of this process, over what `models` holds already; raise what its loading raises."""
    from engine.build import build_engine
    from selector.build import adaptive_policy

    return build_engine(config, adaptive_policy, models)
