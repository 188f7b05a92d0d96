"""Suggestions for misspelt names."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: the most similar known one, or nothing."""
    found = get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""
