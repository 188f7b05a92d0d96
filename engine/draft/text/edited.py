"""Whether a request's edits of logits (engine.sampling.logits_processors) may take the place of what cached text foretells.

Cached text tells what the bare model said. A token that is forbidden or penalised after that is foretold no more; how far a
penalty moves it cannot be told without the model's logits, nor what a grammar forbids without its
masks. Knows parameters and token ids, neither logits nor texts.
"""

from collections.abc import Collection

from engine.core.types import SamplingParams


def may_hinder(sampling: SamplingParams, token_ids: Collection[int], num_generated: int) -> bool:
    """Return whether the edits can make some of the tokens less likely, `num_generated` tokens after the prompt."""
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
