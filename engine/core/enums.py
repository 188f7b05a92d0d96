"""The words that records of requests and of steps share: why a request ended, and where a drafted token comes from."""

from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a request ended. The wire knows `stop` and `length`; the others are metrics labels and errors."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class DraftSource(StrEnum):
    """Where a drafted token comes from: what foretold it, or else proposed it."""

    MODEL = "model"
    CACHE = "cache"  # text of the request or its tenant
    PREDICTION = "prediction"  # what the client expected to be said


class Origin(NamedTuple):
    """Where a drafted token comes from that cached text foretold, and whether more of its odds are the cache's than a model's.

    What a prediction foretold is its own, whoever gives it more; what only cached text foretold and a model gives more is the
    model's, and has none.
    """

    source: DraftSource
    is_rather_cached: bool
