"""The errors of verification. Each names what it is about, so that one bad tree need not fail its batch mates.

ValueError
+-- LawError                 trees that no verifier can judge; `trees` are their indices in the forest
    +-- NotFiniteLawError    a target or draft law holds NaN or infinity
    +-- ImpossibleDraftError a drafted token that its draft law cannot draw
"""

from collections.abc import Iterable


class LawError(ValueError):
    """Trees whose laws make no sense. `trees`: their indices in the forest that was judged."""

    reason = "unusable laws"

    def __init__(self, trees: Iterable[int]) -> None:
        self.trees = tuple(trees)
        super().__init__(f"{self.reason} (trees {', '.join(map(str, self.trees))} of the forest)")


class NotFiniteLawError(LawError):
    """A law with NaN or infinity in it: never a token, never an end of text."""

    reason = "a target or draft law is not finite"


class ImpossibleDraftError(LawError):
    """A drafted token without a draft law, or of probability 0 under it."""

    reason = "a drafted token could not have been drawn from its draft law"
