"""The one error that finding, fetching and converting weights can raise."""


class WeightsError(Exception):
    """Weights cannot be had. The message is one line that says what was tried and what to do."""
