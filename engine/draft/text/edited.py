"""Decides whether a request's logit edits (engine.sampling.logits_processors) may invalidate tokens of cached text.

Cached text predicts the unedited model. An edit can forbid or penalise a predicted token. The effect of a penalty is unknown
without the model's logits, and the tokens that a grammar forbids are unknown without its masks. Both count as possible.
"""

from collections.abc import Collection

from engine.core.types import SamplingParams


def may_suppress(sampling: SamplingParams, token_ids: Collection[int], num_generated: int) -> bool:
    """Return whether the edits can make any of the tokens less likely, `num_generated` tokens after the prompt."""
    if not sampling.edits_logits:
        return False
    if sampling.grammar is not None or sampling.has_penalties:
        return True
    if any((bias < 0.0) == (token_id in token_ids) for token_id, bias in sampling.logit_bias if bias):
        return True
    is_short, allowed = num_generated < sampling.min_tokens, sampling.allowed_token_ids
    completing = {word[-1] for word in sampling.bad_words}
    return any(
        (is_short and token_id in sampling.stop_token_ids)
        or (allowed is not None and token_id not in allowed)
        or token_id in completing
        for token_id in token_ids
    )
