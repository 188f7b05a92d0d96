"""Laws of cached text beside a model's, and mixtures of both, over the few tokens that any of them knows.

A mixture q = w q_cached + (1 - w) q_model is a law like any other; w is fixed by the two laws before anything is drawn from it.
Each side weighs as much as its odds to foretell the token: the cache's as they were observed, the model's (if it knows how sure
it is) by the chance that two draws from its law agree.
Shape key: R rows of the model, K tokens it knows, P proposals, M tokens that the model or a law knows.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from engine.core.enums import Origin
from engine.draft.drafter import TrimmedVocabulary
from engine.draft.text.text_cache import CachedLaw
from engine.native import mixture as native
from engine.utils.host_transfer import floats, integers

_MOST_TRUST = 0.99


@dataclass(frozen=True)
class _Entries:
    """The tokens of some cached laws: of law `law[i]`, the one in column `column[i]`, with probability `odds[i]`."""

    distribution: list[int]
    column: list[int]
    odds: list[float]
    token_id: list[int]

    @classmethod
    def of(cls, probs: Sequence[CachedLaw], vocab: TrimmedVocabulary | None) -> "_Entries":
        """Return them; every token is one of the vocabulary."""
        flat = [
            (index, token_id, odds) for index, distribution in enumerate(probs) for token_id, odds in distribution.odds.items()
        ]
        token_ids = [token_id for _, token_id, _ in flat]
        columns = _columns(token_ids, vocab)
        return cls([index for index, _, _ in flat], columns, [odds for _, _, odds in flat], token_ids)


def vocabulary_of(probs: Sequence[CachedLaw], size: int, device: torch.device) -> TrimmedVocabulary:
    """Return the laws' tokens, ascending."""
    return TrimmedVocabulary.of(_said(probs), size, device)


def with_tokens_of(probs: Sequence[CachedLaw], vocab: TrimmedVocabulary | None) -> TrimmedVocabulary | None:
    """Return a model's vocabulary with the tokens of laws that it does not know, ascending, behind its own. None: all tokens."""
    if vocab is None:
        return None
    unknown = unknown_of(probs, vocab)
    return vocab.extended(unknown) if unknown else vocab


def unknown_of(probs: Sequence[CachedLaw], vocab: TrimmedVocabulary) -> list[int]:
    """Return the laws' tokens that a vocabulary does not know, ascending."""
    said = _said(probs)
    return [token_id for token_id, column in zip(said, vocab.columns(said), strict=True) if column < 0]


def _columns(token_ids: Iterable[int], vocab: TrimmedVocabulary | None) -> list[int]:
    return [*token_ids] if vocab is None else vocab.columns(token_ids)


def _said(probs: Sequence[CachedLaw]) -> list[int]:
    return sorted({token_id for distribution in probs for token_id in distribution.odds})


def mixtures(
    model_RK: Float[Tensor, "R K"] | None,
    rows: Sequence[int | None],
    probs: Sequence[CachedLaw | None],
    vocab: TrimmedVocabulary | None,
    vocab_size: int,
    device: torch.device,
) -> tuple[Float[Tensor, "P M"], list[dict[int, Origin]]]:
    """Return logits of what the model, the cache or both say, and of each row where tokens that the cache foretold come from.

    `rows[p]` is the model's of proposal p, None where it said nothing; `laws[p]` is the cache's. The columns are the tokens of
    `vocab`, the model's own first, or all there are. On a processor our library mixes.
    """
    num_columns = vocab_size if vocab is None else len(vocab.ids_M)
    if native.can_mix(device):
        told = [
            UNTOLD if distribution is None else predicted(distribution, _columns(distribution.odds, vocab))
            for distribution in probs
        ]
        logits_PM, flags = native.mixed(model_RK, rows, told, num_columns)
        return logits_PM, [
            {} if distribution is None else distribution.origins_beside(own)
            for distribution, own in zip(probs, flags, strict=True)
        ]
    logits_PM = torch.full((len(rows), num_columns), float("-inf"), device=device)
    places = [place for place, row in enumerate(rows) if row is not None]
    if model_RK is not None and places:
        said_PK = model_RK[integers([row for row in rows if row is not None], device)]
        logits_PM[integers(places, device), : model_RK.shape[1]] = said_PK
    known = {place: distribution for place, distribution in enumerate(probs) if distribution is not None}
    alone = {place: distribution for place, distribution in known.items() if rows[place] is None}
    both = {place: distribution for place, distribution in known.items() if rows[place] is not None}
    _put_cached(logits_PM, [*alone], [*alone.values()], vocab)
    origins = {place: distribution.origins for place, distribution in alone.items()}
    origins.update(zip(both, _put_mixed(logits_PM, [*both], [*both.values()], vocab), strict=True))
    return logits_PM, [origins.get(place, {}) for place in range(len(rows))]


UNTOLD = native.Predicted((), (), 0.0)


def predicted(distribution: CachedLaw, columns: Sequence[int]) -> native.Predicted:
    """Return what a law says of the tokens in those columns, which are its own in order."""
    return native.Predicted(columns, [*distribution.odds.values()], distribution.chance)


def _put_cached(
    logits_PM: Float[Tensor, "P M"], rows: Sequence[int], probs: Sequence[CachedLaw], vocab: TrimmedVocabulary | None
) -> None:
    """Write laws, as log-probabilities, into rows in which nothing is possible yet."""
    entries, device = _Entries.of(probs, vocab), logits_PM.device
    distribution, column = (
        integers([rows[distribution] for distribution in entries.distribution], device),
        integers(entries.column, device),
    )
    logits_PM[distribution, column] = floats(entries.odds, device).float().log()


def _put_mixed(
    logits_PM: Float[Tensor, "P M"], rows: Sequence[int], probs: Sequence[CachedLaw], vocab: TrimmedVocabulary | None
) -> list[dict[int, Origin]]:
    """Mix laws into rows that hold a model's logits; return of each where its tokens come from now."""
    entries, device = _Entries.of(probs, vocab), logits_PM.device
    rows_L, distribution, column = (integers(numbers, device) for numbers in (rows, entries.distribution, entries.column))
    log_probs = logits_PM[rows_L].log_softmax(-1)
    trust = log_probs.mul(2.0).exp_().sum(-1).clamp_(max=_MOST_TRUST)
    chance = floats([one.chance for one in probs], device).float()
    model_odds, cached_odds = trust / (1.0 - trust), chance / (1.0 - chance)
    weight = cached_odds / (cached_odds + model_odds)
    mixed = log_probs + (1.0 - weight).log_()[:, None]
    cached = (weight[distribution] * floats(entries.odds, device).float()).log_()
    model = mixed[distribution, column]
    mixed[distribution, column] = torch.logaddexp(model, cached)
    logits_PM[rows_L] = mixed
    is_rather_cached: list[list[bool]] = [[] for _ in probs]
    for index, is_rather in zip(entries.distribution, (cached > model).tolist(), strict=True):
        is_rather_cached[index].append(is_rather)
    return [one.origins_beside(of_probs) for one, of_probs in zip(probs, is_rather_cached, strict=True)]
