"""A returned token: its text, its log-probabilities, its offset. Knows records and text, no wire format."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.core.types import TokenLogprobs
from server.text.codec import TokenText

_LOWEST_LOGPROB = -9999.0  # the OpenAI format's value for "hardly ever"; JSON has no infinity


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One returned token with its log-probabilities; a prompt's first token has none.

    `offset`: characters of the whole text before its own.
    """

    token: TokenText
    logprob: float | None
    top: tuple[tuple[TokenText, float], ...]
    offset: int


def entry_of(
    token_text: Callable[[int], TokenText], token_id: int, logprobs: TokenLogprobs | None, num_top: int, offset: int
) -> TokenEntry:
    """Return the entry of a token with at most `num_top` of its alternatives."""
    if logprobs is None:
        return TokenEntry(token_text(token_id), None, (), offset)
    pairs = zip(logprobs.top_ids[:num_top], logprobs.top_logprobs[:num_top], strict=True)
    top = tuple((token_text(i), finite(logprob)) for i, logprob in pairs)
    return TokenEntry(token_text(token_id), finite(logprobs.logprob), top, offset)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can represent."""
    return max(logprob, _LOWEST_LOGPROB)
