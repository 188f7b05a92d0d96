"""What a verifier says of one tree, and the Protocol of those who say it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from engine.core.rng_keys import StepKey
from engine.core.types import ErrorCode
from engine.verify.forest import Forest


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted path, root first, and the extra token that follows it.

    `expected_tokens` is E[tau + 1 | tree]: the mean of `len(path)` over the verifier's own draws, the tree and the laws given. It
    is exact wherever masses tell where the path ends (every rule but coupled, whose noise the tree shares) and `len(path)` at
    temperature 0; else None.
    """

    path: tuple[int, ...]
    extra_id: int
    expected_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A tree that no verdict can be given on; `reason` says why in a sentence, `code` in a word. Its request ends with it."""

    reason: str
    code: ErrorCode


class Verifier(Protocol):
    """A lossless rule. With trees drawn from the forest's draft laws, the emitted tokens have the target's law."""

    @property
    def name(self) -> str:
        """The name by which configurations and traces call it."""
        ...

    def judge(self, forest: Forest, target_probs_NV: Float[Tensor, "N V"], keys: Sequence[StepKey]) -> list[Verdict]:
        """Return one verdict a tree. `target_laws_NV`: processed float32 law after each packed node; one key a tree.

        A tree's verdict depends on its own laws and key alone. Raises a LawError that names the trees it cannot judge.
        """
        ...
