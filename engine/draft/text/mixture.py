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

    law: list[int]
    column: list[int]
    odds: list[float]
    token_id: list[int]

    @classmethod
    def of(cls, laws: Sequence[CachedLaw], vocab: TrimmedVocabulary | None) -> "_Entries":
        """Return them; every token is one of the vocabulary."""
        flat = [(index, token_id, odds) for index, law in enumerate(laws) for token_id, odds in law.odds.items()]
        token_ids = [token_id for _, token_id, _ in flat]
        columns = _columns(token_ids, vocab)
        return cls([index for index, _, _ in flat], columns, [odds for _, _, odds in flat], token_ids)


def vocabulary_of(laws: Sequence[CachedLaw], size: int, device: torch.device) -> TrimmedVocabulary:
    """Return the laws' tokens, ascending."""
    return TrimmedVocabulary.of(_said(laws), size, device)


def with_tokens_of(laws: Sequence[CachedLaw], vocab: TrimmedVocabulary | None) -> TrimmedVocabulary | None:
    """Return a model's vocabulary with the tokens of laws that it does not know, ascending, behind its own. None: all tokens."""
    if vocab is None:
        return None
    unknown = unknown_of(laws, vocab)
    return vocab.extended(unknown) if unknown else vocab


def unknown_of(laws: Sequence[CachedLaw], vocab: TrimmedVocabulary) -> list[int]:
    """Return the laws' tokens that a vocabulary does not know, ascending."""
    said = _said(laws)
    return [token_id for token_id, column in zip(said, vocab.columns(said), strict=True) if column < 0]


def _columns(token_ids: Iterable[int], vocab: TrimmedVocabulary | None) -> list[int]:
    return [*token_ids] if vocab is None else vocab.columns(token_ids)


def _said(laws: Sequence[CachedLaw]) -> list[int]:
    return sorted({token_id for law in laws for token_id in law.odds})


def mixtures(
    model_RK: Float[Tensor, "R K"] | None,
    rows: Sequence[int | None],
    laws: Sequence[CachedLaw | None],
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
        told = [UNTOLD if law is None else foretold(law, _columns(law.odds, vocab)) for law in laws]
        logits_PM, flags = native.mixed(model_RK, rows, told, num_columns)
        return logits_PM, [{} if law is None else law.origins_beside(own) for law, own in zip(laws, flags, strict=True)]
    logits_PM = torch.full((len(rows), num_columns), float("-inf"), device=device)
    places = [place for place, row in enumerate(rows) if row is not None]
    if model_RK is not None and places:
        said_PK = model_RK[integers([row for row in rows if row is not None], device)]
        logits_PM[integers(places, device), : model_RK.shape[1]] = said_PK
    known = {place: law for place, law in enumerate(laws) if law is not None}
    alone = {place: law for place, law in known.items() if rows[place] is None}
    both = {place: law for place, law in known.items() if rows[place] is not None}
    _put_cached(logits_PM, [*alone], [*alone.values()], vocab)
    origins = {place: law.origins for place, law in alone.items()}
    origins.update(zip(both, _put_mixed(logits_PM, [*both], [*both.values()], vocab), strict=True))
    return logits_PM, [origins.get(place, {}) for place in range(len(rows))]


UNTOLD = native.Foretold((), (), 0.0)


def foretold(law: CachedLaw, columns: Sequence[int]) -> native.Foretold:
    """Return what a law says of the tokens in those columns, which are its own in order."""
    return native.Foretold(columns, [*law.odds.values()], law.chance)


def _put_cached(
    logits_PM: Float[Tensor, "P M"], rows: Sequence[int], laws: Sequence[CachedLaw], vocab: TrimmedVocabulary | None
) -> None:
    """Write laws, as log-probabilities, into rows in which nothing is possible yet."""
    entries, device = _Entries.of(laws, vocab), logits_PM.device
    law, column = integers([rows[law] for law in entries.law], device), integers(entries.column, device)
    logits_PM[law, column] = floats(entries.odds, device).float().log()


def _put_mixed(
    logits_PM: Float[Tensor, "P M"], rows: Sequence[int], laws: Sequence[CachedLaw], vocab: TrimmedVocabulary | None
) -> list[dict[int, Origin]]:
    """Mix laws into rows that hold a model's logits; return of each where its tokens come from now."""
    entries, device = _Entries.of(laws, vocab), logits_PM.device
    rows_L, law, column = (integers(numbers, device) for numbers in (rows, entries.law, entries.column))
    log_law = logits_PM[rows_L].log_softmax(-1)
    trust = log_law.mul(2.0).exp_().sum(-1).clamp_(max=_MOST_TRUST)
    chance = floats([one.chance for one in laws], device).float()
    model_odds, cached_odds = trust / (1.0 - trust), chance / (1.0 - chance)
    weight = cached_odds / (cached_odds + model_odds)
    mixed = log_law + (1.0 - weight).log_()[:, None]
    cached = (weight[law] * floats(entries.odds, device).float()).log_()
    model = mixed[law, column]
    mixed[law, column] = torch.logaddexp(model, cached)
    logits_PM[rows_L] = mixed
    is_rather_cached: list[list[bool]] = [[] for _ in laws]
    for index, is_rather in zip(entries.law, (cached > model).tolist(), strict=True):
        is_rather_cached[index].append(is_rather)
    return [one.origins_beside(of_law) for one, of_law in zip(laws, is_rather_cached, strict=True)]
