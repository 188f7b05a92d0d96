"""The result of verifying one tree, and the Protocol of verifiers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from jaxtyping import Float
from torch import Tensor

from engine.core.rng_keys import StepKey
from engine.core.types import ErrorCode
from engine.verify.forest import Forest


class Verdict(msgspec.Struct, frozen=True):
    """The accepted path, root first, and the extra token that follows it.

    `expected_tokens` is E[tau + 1 | tree]: the mean of `len(path)` over the verifier's own draws, given the tree and the
    distributions. It is exact for every rule but coupled, whose noise the tree shares. There it is None. At temperature 0 it is
    `len(path)`.
    """

    path: tuple[int, ...]
    extra_id: int
    expected_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class VerificationFailure:
    """The error of a tree that cannot be verified. Its request ends with this `reason` (a sentence) and `code` (a word)."""

    reason: str
    code: ErrorCode


class Verifier(Protocol):
    """A lossless rule: with trees drawn from the forest's draft distributions, output tokens have the target's distribution."""

    @property
    def name(self) -> str:
        """The name in configurations and traces."""
        ...

    def judge(self, forest: Forest, target_probs_NV: Float[Tensor, "N V"], keys: Sequence[StepKey]) -> list[Verdict]:
        """Return one verdict a tree. `target_probs_NV`: processed float32 distribution after each packed node; one key a tree.

        A tree's verdict depends on its own distributions and key alone. Raises an InvalidDistributionError that lists the trees
        that cannot be verified.
        """
        ...
