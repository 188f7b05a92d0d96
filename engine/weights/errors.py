"""The one error that finding, fetching and converting weights can raise."""


class WeightsError(Exception):
    """Weights cannot be found, fetched or converted. The message is one line: what failed, and what to do."""
