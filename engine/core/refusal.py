"""The error for a configuration that cannot be served."""


class Refusal(Exception):
    """A setting, a file or a model cannot be used, at any start. The message is one line for the user."""
