"""The words that records of requests and of steps share: why a request ended, and what proposed a token."""

from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended. The wire knows `stop` and `length`; the others are metrics labels and errors."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class DraftSource(StrEnum):
    """What proposed a drafted token."""

    MODEL = "model"
    CACHE = "cache"  # text of the request or its tenant
    PREDICTION = "prediction"  # what the client expected to be said
