"""Confidence in cached text: how often its distributions agreed with committed tokens, by source and kind of match.

Every committed token is observed, drafted or not. Observing drafted tokens alone would bias the rates towards trusted matches.
Rates are shared by all requests; texts are not (text_cache.py).
"""

from bisect import bisect_right
from enum import StrEnum

from engine.draft.text.suffix_counts import Match

_DECAY = 0.998  # weight of a past token for each new one
_PRIOR_WEIGHT = 12.0  # in tokens
_LENGTH_BOUNDS = (2, 3, 4, 5, 7, 9, 13, 17, 25)  # lower bounds of the match length classes
_SHARE_BOUNDS = (0.4, 0.6, 0.7, 0.85)  # lower bounds of the classes of the top token's share, with one pseudo-count
_MAX_CONFIDENCE = 0.99
_MIN_CONFIDENCE = 1e-3  # above 0, so that the odds of every match are positive


class TextSource(StrEnum):  # a dictionary key in the hot path: str hashes in C, Enum in Python
    """Where a cached text comes from."""

    PREDICTION = "prediction"  # the client's expected output
    OWN = "own"  # prompt and output so far
    RECENT = "recent"  # finished outputs of the same tenant


# Match length at which the prior confidence is half the top token's share.
_HALF_LENGTH = {TextSource.PREDICTION: 1.0, TextSource.OWN: 3.0, TextSource.RECENT: 3.0}
_MatchClass = tuple[TextSource, int, int]  # source, length class, share class
_Rate = tuple[float, float]  # agreed, observed


class Agreement:
    """Estimates the probability that a draw from a match's continuations is the next token. For the engine thread alone."""

    def __init__(self) -> None:
        self._rates: dict[_MatchClass, _Rate] = {}

    def confidence(self, source: TextSource, match: Match) -> float:
        """Return the estimate for a match of a source; strictly between 0 and 1."""
        _, (agreed, observed) = self._rate(source, match, sum(match.counts.values()))
        return max(_MIN_CONFIDENCE, min(_MAX_CONFIDENCE, agreed / observed))

    def observe(self, source: TextSource, match: Match, token_id: int) -> None:
        """Learn from the token that followed a match."""
        total = sum(match.counts.values())
        match_class, (agreed, observed) = self._rate(source, match, total)
        self._rates[match_class] = (_DECAY * agreed + match.counts.get(token_id, 0) / total, _DECAY * observed + 1.0)

    def _rate(self, source: TextSource, match: Match, total: int) -> tuple[_MatchClass, _Rate]:
        """Return the class of a match with `total` continuations, and the rate of this class."""
        top = max(match.counts.values())
        match_class = (source, bisect_right(_LENGTH_BOUNDS, match.length), bisect_right(_SHARE_BOUNDS, top / (1 + total)))
        return match_class, self._rates.get(match_class) or _prior(source, match.length, top / total)


def _prior(source: TextSource, length: int, share: float) -> _Rate:
    """Return the prior rate: it grows with the match length and with the top token's share."""
    return _PRIOR_WEIGHT * share * length / (length + _HALF_LENGTH[source]), _PRIOR_WEIGHT
