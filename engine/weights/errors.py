"""The errors that finding, fetching, converting and reading weights can raise."""


class WeightsError(Exception):
    """Weights cannot be found, fetched or converted. The message is one line: what failed, and what to do."""


class UnsupportedModel(Exception):
    """The model cannot be run exactly by tree-masked passes. The message is one sentence; another start would not help."""
