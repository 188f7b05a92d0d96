"""Text of errors for messages that are one line."""


def one_line(text: object) -> str:
    """Return the text of an object with every run of whitespace replaced by a space."""
    return " ".join(str(text).split())
