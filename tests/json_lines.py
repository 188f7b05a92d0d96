"""A counting engine whose making writes to every place that a library writes to."""

import logging
import warnings

from engine.core.config import EngineConfig
from engine.utils.progress_bar import progress_bar, quiet_libraries
from engine.worker.engine_loop import SteppedEngine
from tests.counting_engine import build_counting


def talkative_engine(config: EngineConfig) -> SteppedEngine:
    """Return the engine, after a line of each kind."""
    from transformers.utils.logging import get_logger

    quiet_libraries()
    logging.getLogger("engine.some").warning("a plain line")
    get_logger("transformers.some").warning("a line of transformers")
    warnings.warn("a warning of a library", stacklevel=1)
    for _ in progress_bar(range(3), what="texts", total=3, unit="text"):
        pass
    return build_counting(config)
