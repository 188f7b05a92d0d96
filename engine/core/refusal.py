"""What a user asked for and cannot have."""


class Refusal(Exception):
    """A setting, a file or a model cannot be used as asked, at any start. The message is one line for the user."""
