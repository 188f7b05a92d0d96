"""The errors that finding, fetching, converting and reading weights can raise."""

from engine.core.refusal import Refusal


class WeightsError(Exception):
    """Weights cannot be found, fetched or converted. The message is one line: the failure and its remedy."""


class UnusableReference(Refusal, WeightsError):
    """A reference names no model, or one that cannot be used. The message is one line."""


class UnsupportedModel(Refusal):
    """The model cannot be run exactly by tree-masked passes. The message is one sentence; another start would not help."""
