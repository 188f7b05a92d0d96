"""Distributions of sampling parameters that do not depend on the sequence."""

from collections.abc import Callable, Sequence

from torch import Tensor

from engine.core.step_plan import SamplingContext
from engine.core.types import SamplingParams
from engine.sampling.distributions import processed_probs


def text_distribution(
    logits_after: Callable[[list[tuple[int, ...]]], Tensor], num_tokens: int, sampling: SamplingParams
) -> dict[tuple[int, ...], float]:
    """Return the probabilities of all possible texts of some tokens. `logits_after` returns a row of logits for each text."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        texts = list(distribution)
        nexts = probs_of(logits_after(texts), [sampling] * len(texts)).double()
        distribution = {
            (*text, token_id): distribution[text] * float(p)
            for text, row in zip(texts, nexts, strict=True)
            for token_id, p in enumerate(row)
            if p > 0
        }
    return distribution


def probs_of(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the distribution of each row after its sampling parameters."""
    return processed_probs(logits_NV, [SamplingContext(one) for one in params])
