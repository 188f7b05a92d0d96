"""How far a text's past can be trusted to foretell it: how often cached laws agreed with what came, by what they rested on.

Learnt from every token that was committed, drafted or not, so that nothing is learnt only where it was believed. Rates are
everybody's, texts are not (texts.py).
"""

from bisect import bisect_right
from enum import StrEnum

from engine.draft.text.suffix_counts import Match

_MEMORY = 0.998  # weight of a past token for each new one
_WEIGHT = 12.0  # of the prior, in tokens
_LENGTHS = (2, 3, 4, 5, 7, 9, 13, 17, 25)  # where the next class of match lengths begins
_SHARES = (0.4, 0.6, 0.7, 0.85)  # the same of how much of what followed was the commonest token, had there been one more
_MOST = 0.99
_LEAST = 1e-3  # so that what never came can still be weighed


class TextSource(StrEnum):  # it is a key many times a token: a string's hash is C's, an Enum's Python's
    """Where a cached text comes from."""

    PREDICTION = "prediction"  # what the client expects to be said
    OWN = "own"  # prompt and output so far
    RECENT = "recent"  # what was said to others of the same tenant


_HALF_LENGTH = {TextSource.PREDICTION: 1.0, TextSource.OWN: 3.0, TextSource.RECENT: 3.0}  # of a match that is half believed
_Kind = tuple[TextSource, int, int]  # source, class of lengths, class of shares
_Rate = tuple[float, float]  # agreed, tried


class Agreement:
    """The chance that a token drawn from a match's continuations is the one that comes. Owned by the engine's one thread."""

    def __init__(self) -> None:
        self._rates: dict[_Kind, _Rate] = {}

    def chance(self, source: TextSource, match: Match) -> float:
        """Return it for a match in a source; neither certain nor impossible."""
        _, (agreed, tried) = self._rate(source, match, sum(match.counts.values()))
        return max(_LEAST, min(_MOST, agreed / tried))

    def observe(self, source: TextSource, match: Match, token_id: int) -> None:
        """Learn what came after a match."""
        total = sum(match.counts.values())
        kind, (agreed, tried) = self._rate(source, match, total)
        self._rates[kind] = (_MEMORY * agreed + match.counts.get(token_id, 0) / total, _MEMORY * tried + 1.0)

    def _rate(self, source: TextSource, match: Match, total: int) -> tuple[_Kind, _Rate]:
        """Return of which kind a match with so many continuations is, and what is believed of that."""
        top = max(match.counts.values())
        kind = (source, bisect_right(_LENGTHS, match.length), bisect_right(_SHARES, top / (1 + total)))
        return kind, self._rates.get(kind) or _prior(source, match.length, top / total)


def _prior(source: TextSource, length: int, share: float) -> _Rate:
    """Return what is believed before anything was seen: the longer the match and the less divided, the surer."""
    return _WEIGHT * share * length / (length + _HALF_LENGTH[source]), _WEIGHT
