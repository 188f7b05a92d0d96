"""Enums shared by records of requests and of steps."""

from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a request ended. HTTP answers use `stop` and `length`; the others are metric labels and errors."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class DraftSource(StrEnum):
    """Which source proposed a drafted token."""

    MODEL = "model"
    CACHE = "cache"  # text of the request or its tenant
    PREDICTION = "prediction"  # the output that the client expects


class Origin(NamedTuple):
    """The origin of a drafted token that cached text proposed.

    `is_rather_cached`: cached text contributed more of its odds than the model. A token from the request's prediction has the
    source PREDICTION in any case. A token from other cached text has no Origin if the model contributed more.
    """

    source: DraftSource
    is_rather_cached: bool
