"""The errors of verification. Each lists the trees concerned, so that one bad tree does not fail the others of its batch.

ValueError
+-- InvalidDistributionError        trees that no verifier can verify; `trees` are their indices in the forest
    +-- NonFiniteDistributionError  a target or draft distribution contains NaN or infinity
    +-- ImpossibleDraftError        a drafted token that cannot be drawn from its draft distribution
"""

from collections.abc import Iterable


class InvalidDistributionError(ValueError):
    """Trees with invalid distributions. `trees`: their indices in the forest."""

    reason = "invalid distributions"

    def __init__(self, trees: Iterable[int]) -> None:
        self.trees = tuple(trees)
        super().__init__(f"{self.reason} (trees {', '.join(map(str, self.trees))} of the forest)")


class NonFiniteDistributionError(InvalidDistributionError):
    """A distribution that contains NaN or infinity."""

    reason = "a target or draft distribution is not finite"


class ImpossibleDraftError(InvalidDistributionError):
    """A drafted token without a draft distribution, or of probability 0 under it."""

    reason = "a drafted token could not have been drawn from its draft distribution"
