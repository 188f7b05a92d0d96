"""Mixtures of cached text's and a model's draft distributions, over the tokens that either knows.

A mixture q = w q_cached + (1 - w) q_model is a valid draft distribution. The weight w is fixed by the two distributions before
anything is drawn. Each side is weighted by the odds that it predicts the token. For the cache these follow from its confidence.
For the model they follow from the probability that two draws from its distribution agree.
Shape key: R rows of the model, K tokens it knows, P proposals, M tokens that the model or the cache knows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.enums import Origin
from engine.draft.drafter import TrimmedVocabulary
from engine.draft.text.matching import CachedDistribution
from engine.native import mixture as native
from engine.utils.host_transfer import floats, integers

_MAX_CONFIDENCE = 0.99
NOTHING_CACHED = native.Predicted((), (), 0.0)


@dataclass(frozen=True)
class _Entries:
    """Tokens of several distributions: one of distribution `index[i]` is in `column[i]`, with probability `probs[i]`."""

    index: list[int]
    column: list[int]
    probs: list[float]

    @classmethod
    def of(cls, distributions: Sequence[CachedDistribution], vocab: TrimmedVocabulary | None) -> "_Entries":
        """Return the entries; every token must be in the vocabulary."""
        flat = [(i, token_id, prob) for i, one in enumerate(distributions) for token_id, prob in one.probs.items()]
        columns = _columns([token_id for _, token_id, _ in flat], vocab)
        return cls([i for i, _, _ in flat], columns, [prob for _, _, prob in flat])


def vocabulary_of(distributions: Sequence[CachedDistribution], size: int, device: torch.device) -> TrimmedVocabulary:
    """Return the vocabulary of the distributions' tokens, ascending."""
    return TrimmedVocabulary.of(_tokens_of(distributions), size, device)


def extended_vocabulary(distributions: Sequence[CachedDistribution], vocab: TrimmedVocabulary | None) -> TrimmedVocabulary | None:
    """Return a model's vocabulary with the distributions' other tokens appended, ascending. None means all tokens."""
    if vocab is None:
        return None
    missing = tokens_outside(distributions, vocab)
    return vocab.extended(missing) if missing else vocab


def tokens_outside(distributions: Sequence[CachedDistribution], vocab: TrimmedVocabulary) -> list[int]:
    """Return the distributions' tokens that are not in the vocabulary, ascending."""
    token_ids = _tokens_of(distributions)
    return [token_id for token_id, column in zip(token_ids, vocab.columns(token_ids), strict=True) if column < 0]


def _columns(token_ids: Iterable[int], vocab: TrimmedVocabulary | None) -> list[int]:
    return [*token_ids] if vocab is None else vocab.columns(token_ids)


def _tokens_of(distributions: Sequence[CachedDistribution]) -> list[int]:
    return sorted({token_id for distribution in distributions for token_id in distribution.probs})


def as_native(distribution: CachedDistribution, columns: Sequence[int]) -> native.Predicted:
    """Return a distribution for the native library; `columns` are those of its tokens, in order."""
    return native.Predicted(columns, [*distribution.probs.values()], distribution.confidence)


def mixtures(
    model_RK: Float[Tensor, "R K"] | None,
    rows: Sequence[int | None],
    distributions: Sequence[CachedDistribution | None],
    vocab: TrimmedVocabulary | None,
    vocab_size: int,
    device: torch.device,
) -> tuple[Float[Tensor, "P M"], list[dict[int, Origin]]]:
    """Return the logits of each proposal from the model, the cache or both, and the origins of its cached tokens.

    `rows[p]` is the model's row for proposal p, or None. `distributions[p]` is the cache's, or None. The columns are the tokens
    of `vocab`, the model's first, or all tokens. On a CPU the native library computes the mixtures.
    """
    num_columns = vocab_size if vocab is None else len(vocab.ids_M)
    if native.can_mix(device):
        cached = [NOTHING_CACHED if one is None else as_native(one, _columns(one.probs, vocab)) for one in distributions]
        logits_PM, flags = native.mixed(model_RK, rows, cached, num_columns)
        both_flags = zip(distributions, flags, strict=True)
        return logits_PM, [{} if one is None else one.origins_beside(of_one) for one, of_one in both_flags]
    logits_PM = torch.full((len(rows), num_columns), float("-inf"), device=device)
    modelled = [place for place, row in enumerate(rows) if row is not None]
    if model_RK is not None and modelled:
        model_PK = model_RK[integers([row for row in rows if row is not None], device)]
        logits_PM[integers(modelled, device), : model_RK.shape[1]] = model_PK
    known = {place: distribution for place, distribution in enumerate(distributions) if distribution is not None}
    alone = {place: distribution for place, distribution in known.items() if rows[place] is None}
    both = {place: distribution for place, distribution in known.items() if rows[place] is not None}
    _put_cached(logits_PM, [*alone], [*alone.values()], vocab)
    origins = {place: distribution.origins for place, distribution in alone.items()}
    origins.update(zip(both, _put_mixed(logits_PM, [*both], [*both.values()], vocab), strict=True))
    return logits_PM, [origins.get(place, {}) for place in range(len(rows))]


def _put_cached(
    logits_PM: Float[Tensor, "P M"],
    rows: Sequence[int],
    distributions: Sequence[CachedDistribution],
    vocab: TrimmedVocabulary | None,
) -> None:
    """Write distributions as log-probabilities into rows that are all -inf."""
    entries, device = _Entries.of(distributions, vocab), logits_PM.device
    row = integers([rows[index] for index in entries.index], device)
    logits_PM[row, integers(entries.column, device)] = floats(entries.probs, device).float().log()


def _put_mixed(
    logits_PM: Float[Tensor, "P M"],
    rows: Sequence[int],
    distributions: Sequence[CachedDistribution],
    vocab: TrimmedVocabulary | None,
) -> list[dict[int, Origin]]:
    """Mix distributions into rows that contain a model's logits; return the origins of each row's cached tokens."""
    entries, device = _Entries.of(distributions, vocab), logits_PM.device
    rows_L, index, column = (integers(numbers, device) for numbers in (rows, entries.index, entries.column))
    log_probs = logits_PM[rows_L].log_softmax(-1)
    own_confidence = log_probs.mul(2.0).exp_().sum(-1).clamp_(max=_MAX_CONFIDENCE)
    confidence = floats([one.confidence for one in distributions], device).float()
    model_odds, cached_odds = own_confidence / (1.0 - own_confidence), confidence / (1.0 - confidence)
    weight = cached_odds / (cached_odds + model_odds)
    mixed = log_probs + (1.0 - weight).log_()[:, None]
    cached = (weight[index] * floats(entries.probs, device).float()).log_()
    model = mixed[index, column]
    mixed[index, column] = torch.logaddexp(model, cached)
    logits_PM[rows_L] = mixed
    is_rather_cached: list[list[bool]] = [[] for _ in distributions]
    for place, is_rather in zip(entries.index, (cached > model).tolist(), strict=True):
        is_rather_cached[place].append(is_rather)
    return [one.origins_beside(flags) for one, flags in zip(distributions, is_rather_cached, strict=True)]
